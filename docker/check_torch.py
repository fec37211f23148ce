"""Is the torch in this image the locked one, built for this CUDA and for the cards that people have?

usage: check_torch.py LOCK CUDA
"""

import re
import sys
from pathlib import Path

import torch

# T4, A100, RTX 30, RTX 40 (runs sm_86), H100, B200, RTX 50.
CARDS = {"sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"}

lock, cuda = sys.argv[1:]
(locked,) = re.findall(r"^torch==([\d.]+)", Path(lock).read_text(), flags=re.MULTILINE)
architectures = set(torch._C._cuda_getArchFlags().split())
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {' '.join(sorted(architectures))}")
if torch.__version__.partition("+")[0] != locked or torch.version.cuda != cuda or CARDS - architectures:
    sys.exit(f"wanted torch {locked}, CUDA {cuda}, {' '.join(sorted(CARDS))}")
