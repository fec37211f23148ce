"""Stopping a run and taking it up again: signals, which checkpoint to go on from, whether this is still the same run."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import IntervalStrategy

from train import record
from train.console import Exit, Refusal, say, warn

# Settings that may differ when a run is taken up again: they do not change the adapter.
FREE = {"OUTPUT_DIR", "LOG_LEVEL", "HF_TOKEN", "WANDB_API_KEY", "REPORT_TO", "SAVE_TOTAL_LIMIT", "ALLOW_CPU"}

ELSEWHERE = "set OUTPUT_DIR to another folder"


def stopped(how: str) -> Refusal:
    """The refusal of a run that a signal ended."""
    return Refusal(f"stopped {how}", "the same command goes on from the last checkpoint, if there is one", Exit.STOPPED)


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
        say(f"{self.received}: finishing this step and saving it; once more ends the run at once")

    def ends(self, state: TrainerState) -> bool:
        """Whether a signal ends the run before its last step; behind that one it is finished all the same."""
        return self.received is not None and state.global_step < state.max_steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.ends(state):
            control.should_training_stop = True
            # An evaluation that is due belongs to the step: without it the step is not saved, but done again.
            evaluates = args.eval_strategy == IntervalStrategy.EPOCH and _is_whole(state.epoch)
            control.should_save = not evaluates

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # An evaluation may take longer than whoever stops the run will wait.
        if self.received:
            raise stopped(f"by {self.received} during an evaluation, at step {state.global_step}")

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # Stopping in mid-epoch looks like its end: an evaluation then is one that the whole run would not have had.
        if self.ends(state) and not _is_whole(state.epoch):
            control.should_evaluate = control.should_save = False


def _is_whole(epoch: float | None) -> bool:
    return epoch is not None and epoch == int(epoch)


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
    adapter = output / "adapter"
    if before is None:
        for found in (adapter, *checkpoints.glob("checkpoint-*")):
            if found.exists():
                raise Refusal(f"{found} is there, but no run.json to say whose it is", ELSEWHERE)
        return Earlier()
    last = _last_whole(checkpoints)
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


def _last_whole(checkpoints: Path) -> str | None:
    """The newest checkpoint whose saving came to its end: the trainer writes its state last."""
    for folder in sorted(
        checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]), reverse=True
    ):
        if (folder / TRAINER_STATE_NAME).is_file():
            return str(folder)
        warn(f"{folder} is not whole: its saving was cut off")
    return None


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
                f"OUTPUT_DIR holds a run on other rows: {name}={','.join(settings[name])} has changed since",
                f"{ELSEWHERE}, or bring the earlier rows back",
            )
