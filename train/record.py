"""What went in and what came out: `run.json` for the run, `log.jsonl` for its course.

Files are written beside their place and renamed, so a reader never sees half a file.
"""

import hashlib
import json
import math
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash

from train.adapter import trained_is_finite
from train.console import Exit, Refusal, has_terminal, notes, say

PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets", "huggingface-hub")
SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "learning_rate": "rate {:.2e}",
    "grad_norm": "norm {:.3f}",
}


def versions() -> dict[str, str]:
    """Python and the packages that decide the result."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def hardware() -> dict[str, Any]:
    """The machine, as far as results and speed depend on it."""
    found: dict[str, Any] = {"platform": platform.platform(), "cpu": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": driver_version()}
    return found


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def sha256(file: Path) -> str:
    """Hash of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def commit_of(model_id: str, revision: str | None) -> str | None:
    """Commit of a base model from the Hub, as it lies in the cache; None for a local folder."""
    return extract_commit_hash(cached_file(model_id, CONFIG_NAME, revision=revision, local_files_only=True), None)


def write(output: Path, run: dict[str, Any]) -> None:
    """Put `run.json` in place whole."""
    partial = output / "run.json.partial"
    partial.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    partial.replace(output / "run.json")


def read(output: Path) -> dict[str, Any] | None:
    """The record of the run that last wrote to `output`; None where there is none."""
    file = output / "run.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def diverged(what: str, computed: str) -> Refusal:
    """The refusal of a run whose numbers are none any more, with the arithmetic that they came from."""
    return Refusal(
        f"{what}, computed {computed}; nothing was saved as final",
        "lower LEARNING_RATE, set BNB_4BIT_COMPUTE_DTYPE=bfloat16 where the GPU has it, or look for broken rows",
        Exit.DIVERGED,
    )


def _entries(file: Path, last_step: int) -> list[dict[str, Any]]:
    """Log entries up to a step; a line that a kill cut off ends them."""
    entries = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [entry for entry in entries if entry["step"] <= last_step]


class RunLog(TrainerCallback):
    """Writes every log entry to `log.jsonl`, tells it, draws the bar, and ends a run whose loss is no number.

    A context manager: bar and file are closed however the run ends.

    Args:
        output: folder of `log.jsonl`.
        done: optimizer steps that the checkpoint to go on from has done; later entries of an earlier start go.
        computed: type of the arithmetic and kind of attention, for the message.
    """

    def __init__(self, output: Path, done: int, computed: str):
        self.computed = computed
        self.entries = _entries(output / "log.jsonl", done) if done else []
        self.file = (output / "log.jsonl").open("w", encoding="utf-8")
        self.file.writelines(json.dumps(entry) + "\n" for entry in self.entries)
        self.evaluating: TaskID | None = None
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=notes,
            disable=not has_terminal(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.file.close()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.task = self.bar.add_task("training", total=state.max_steps, completed=state.global_step)
        self.bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: DataLoader | None = None,
        **_: Any,
    ) -> None:
        if self.evaluating is None:
            self.evaluating = self.bar.add_task("evaluating", total=len(eval_dataloader) if eval_dataloader else None)
        self.bar.advance(self.evaluating)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.evaluating is not None:
            self.bar.remove_task(self.evaluating)
            self.evaluating = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        entry = {"step": state.global_step, **(logs or {}), "time": round(time.time(), 3)}
        self.entries.append(entry)
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        shown = [form.format(entry[key]) for key, form in SHOWN.items() if key in entry]
        if shown:
            say(f"step {state.global_step}/{state.max_steps}  " + "  ".join(shown))
        # Under fp16 the loss scaler looks for its scale by overflowing: it skips such a step itself.
        for key in ("loss", "eval_loss") if args.fp16 else ("loss", "eval_loss", "grad_norm"):
            if not math.isfinite(entry.get(key, 0)):
                raise diverged(f"{key} became {entry[key]} by step {state.global_step}", self.computed)


class SaveOnlyNumbers(TrainerCallback):
    """Ends a run before it saves a checkpoint whose weights are no numbers, which would push a good one out.

    Between two log lines nothing else looks. It comes behind every callback that asks for a save.
    """

    def __init__(self, computed: str):
        self.computed = computed

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        if control.should_save and not trained_is_finite(rest["model"]):
            raise diverged(f"the adapter became no number by step {state.global_step}", self.computed)

    on_epoch_end = on_step_end


def follow_umask(folder: Path) -> None:
    """Make what safetensors wrote with mode 0600 as readable as everything else here."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)
