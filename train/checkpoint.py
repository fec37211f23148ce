"""Stopping a run and taking it up again: signals, which checkpoint to go on from, whether this is still the same run."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from train import record
from train.console import Refusal, say

# Settings that may differ when a run is taken up again: they do not change the adapter.
FREE = {"OUTPUT_DIR", "LOG_LEVEL", "HF_TOKEN", "WANDB_API_KEY", "REPORT_TO", "SAVE_TOTAL_LIMIT", "ALLOW_CPU"}

ELSEWHERE = "set OUTPUT_DIR to another folder"


class StopOnSignal(TrainerCallback):
    """SIGTERM (docker stop) and SIGINT (Ctrl-C) end the run behind the step in progress, with that step saved.

    A context manager: signals mean this only inside. A second signal ends the run at once.
    """

    received: str | None = None

    def __enter__(self) -> Self:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        say(f"{self.received}: finishing and saving this step; once more ends the run at once")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.received:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # Stopping in mid-epoch looks like its end: an evaluation then is one that the whole run would not have had.
        if self.received and state.epoch != int(state.epoch or 0):
            control.should_evaluate = control.should_save = False


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
