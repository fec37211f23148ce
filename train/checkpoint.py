"""Taking a run up again: which checkpoint to go on from, and whether this is still the same run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from train import record
from train.console import Refusal, say

# Settings that may differ when a run is taken up again: they do not change the adapter.
FREE = {"OUTPUT_DIR", "LOG_LEVEL", "HF_TOKEN", "WANDB_API_KEY", "REPORT_TO", "SAVE_TOTAL_LIMIT", "ALLOW_CPU"}


@dataclass
class Earlier:
    """What an earlier start of the same run has left."""

    checkpoint: str | None = None  # folder to go on from
    step: int = 0  # optimizer steps done there
    finished: bool = False


def find(output: Path, checkpoints: Path, settings: dict[str, Any], data_sha256: dict[str, str | None]) -> Earlier:
    """What is left of an earlier start of this run.

    Raises:
        Refusal: the folder holds a run of other settings, of other data, or of unknown origin.
    """
    before = record.read(output)
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    adapter = output / "adapter"
    if before is None:
        if last or adapter.exists():
            raise Refusal(f"{last or adapter} is there, but no run.json to say whose it is", ELSEWHERE)
        return Earlier()
    _refuse_another_run(before, settings, data_sha256, started=bool(last) or before["status"] == "finished")
    if before["status"] == "finished":
        if adapter.is_dir():
            say(f"{adapter} is finished with these settings: nothing to do")
            return Earlier(finished=True)
        say(f"{adapter} was finished and is gone: making it again")
    if last is None:
        return Earlier()
    say(f"going on from {last}")
    return Earlier(last, int(last.rpartition("-")[2]))


ELSEWHERE = "set OUTPUT_DIR to another folder"


def _refuse_another_run(
    before: dict[str, Any], settings: dict[str, Any], data_sha256: dict[str, str | None], started: bool
) -> None:
    """Refuse to mix two runs in one folder, once there is something to lose."""
    if not started:
        return
    then = before["settings"]
    differ = [
        f"{name}: {then.get(name)} there, {settings.get(name)} here"
        for name in sorted({*then, *settings} - FREE)
        if then.get(name) != settings.get(name)
    ]
    if differ:
        raise Refusal(
            "OUTPUT_DIR holds a run with other settings:\n  " + "\n  ".join(differ),
            f"{ELSEWHERE}, or go back to those settings",
        )
    for name, digest in data_sha256.items():
        if before["data_sha256"].get(name) != digest:
            raise Refusal(
                f"OUTPUT_DIR holds a run on other rows: {name}={settings[name]} has changed since",
                f"{ELSEWHERE}, or bring the earlier rows back",
            )
