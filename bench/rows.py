"""Time and memory of `check --data` on many rows: python bench/rows.py MODEL_FOLDER DATASET ROWS

Writes ROWS rows, drawn at random from those of a JSON array or lines, to a file, and checks it in a process of its own.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from train import files


def main(model: str, dataset: str, count: int) -> None:
    """Print one JSON line: rows, bytes, seconds, and the peak resident memory of the checking process in MiB."""
    rows = [json.dumps(row) + "\n" for _, row in files.read(Path(dataset))]
    draw = random.Random(0)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for _ in range(count):
            file.write(draw.choice(rows))
        file.flush()
        size, started = Path(file.name).stat().st_size, time.monotonic()
        settings = os.environ | {"MODEL_ID": model, "DATASET": file.name}
        subprocess.run([sys.executable, "-m", "train", "check", "--data"], env=settings, check=True)
        seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(json.dumps({"rows": count, "bytes": size, "seconds": round(seconds, 1), "peak_mib": round(peak)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
