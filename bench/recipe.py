"""Speed and memory of `train` in several settings, each in a process of its own; one JSON line a setting.

usage: python bench/recipe.py MODEL_FOLDER DATASET OUT_FILE [NAME ...]

Time is the median of the steps after the third; tokens are the rows' own, without padding.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "1 x 16": {"PER_DEVICE_TRAIN_BATCH_SIZE": "1"},
    "16 x 1": {"PER_DEVICE_TRAIN_BATCH_SIZE": "16"},
    "no checkpointing": {"ACTIVATION_CHECKPOINTING": "false"},
    "no double quantisation": {"BNB_4BIT_USE_DOUBLE_QUANT": "false"},
    "16-bit base": {"LOAD_IN_4BIT": "false"},
    "adamw_torch": {"OPTIM": "adamw_torch"},
    "adamw_8bit": {"OPTIM": "adamw_8bit"},
    "float16": {"BNB_4BIT_COMPUTE_DTYPE": "float16"},
    "all-linear": {"TARGET_MODULES": "all-linear"},
    "all-linear, DoRA": {"TARGET_MODULES": "all-linear", "USE_DORA": "true"},
}


def measure(name: str, model: str, dataset: str, steps: int = 8) -> dict[str, Any]:
    """Train once and read the figures from the run's own record."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        settings = {
            "MODEL_ID": model,
            "DATASET": dataset,
            "OUTPUT_DIR": str(output),
            "MAX_STEPS": str(steps),
            "LOGGING_STEPS": "1",
            **SETTINGS[name],
        }
        done = subprocess.run(
            [sys.executable, "-m", "train", "train"],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"name": name, "status": done.returncode, "error": done.stderr[-600:]}
        run = json.loads((output / "run.json").read_text())
    times = [entry["time"] for entry in run["log"] if "loss" in entry]
    step = statistics.median(after - before for before, after in itertools.pairwise(times[2:]))
    examples = run["examples_a_forward_pass"] * run["forward_passes_a_step"]
    tokens = examples * run["train_rows"]["tokens"] / run["train_rows"]["used"]
    gib = 2**30
    return {
        "name": name,
        "step_s": round(step, 3),
        "tokens_a_s": round(tokens / step),
        "allocated_gib": round((run["peak_gpu_bytes_allocated"] or 0) / gib, 2),
        "reserved_gib": round((run["peak_gpu_bytes_reserved"] or 0) / gib, 2),
        "to_first_step_s": run["seconds_to_first_step"],
        "losses": [round(entry["loss"], 3) for entry in run["log"] if "loss" in entry][:: steps - 1],
        "hardware": run["hardware"].get("gpu", "CPU"),
    }


def main() -> None:
    model, dataset, out, *names = sys.argv[1:]
    with Path(out).open("a", encoding="utf-8") as file:
        for name in names or SETTINGS:
            line = json.dumps(measure(name, model, dataset))
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()


if __name__ == "__main__":
    main()
