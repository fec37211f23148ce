"""The same command again: what is taken up, what is left alone, what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from tests.conftest import ROOT, WEIGHTS, record_of
from train import record


@contextmanager
def during(step: int, do: Callable[[], None]):
    """Something happens to the runs started inside, before the end of a step."""
    on_step_end = record.RunLog.on_step_end

    def happen(self, args, state, control, **rest):
        on_step_end(self, args, state, control, **rest)
        if state.global_step == step:
            do()

    with patch.object(record.RunLog, "on_step_end", happen):
        yield


def interrupt(after_step: int):
    """Runs started inside end at once, as killed, behind a step."""

    def end():
        raise KeyboardInterrupt

    return during(after_step, end)


def evaluations(output) -> list[tuple[int, float]]:
    return [(entry["step"], entry["eval_loss"]) for entry in record_of(output)["log"] if "eval_loss" in entry]


def test_a_finished_run_does_nothing_again_and_refuses_other_settings(train, tmp_path):
    assert train().status == 0
    before = (tmp_path / "out/run.json").read_text()
    again = train()
    assert again.status == 0 and "nothing to do" in again.err
    other = train(LORA_R=4)
    assert other.status == 2 and "LORA_R: 16 there, 4 here" in other.err
    assert (tmp_path / "out/run.json").read_text() == before


def test_a_finished_run_whose_adapter_is_gone_makes_it_again(train, tmp_path):
    assert train().status == 0
    before = (tmp_path / "out" / WEIGHTS).read_bytes()
    shutil.rmtree(tmp_path / "out/adapter")
    assert train().status == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == before


def test_checkpoints_of_an_unknown_run_are_not_touched(train, tmp_path):
    (tmp_path / "out/checkpoints/checkpoint-7").mkdir(parents=True)
    result = train()
    assert result.status == 2 and "OUTPUT_DIR" in result.err
    assert (tmp_path / "out/checkpoints/checkpoint-7").is_dir()


def test_an_interrupted_run_goes_on_to_the_same_bytes_and_the_same_log(train, tmp_path):
    settings = {"SAVE_STEPS": 2, "NUM_TRAIN_EPOCHS": 2}
    assert train(OUTPUT_DIR=tmp_path / "whole", **settings).status == 0
    with interrupt(after_step=4):  # step 3 is in the log, the last checkpoint is of step 2
        assert train(**settings).status == 75
    lines = (tmp_path / "out/log.jsonl").read_text()
    (tmp_path / "out/log.jsonl").write_text(lines + '{"step": 4, "lo')  # what a kill leaves
    result = train(**settings)
    assert result.status == 0 and "going on from" in result.err
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    whole, resumed = (record_of(tmp_path / name) for name in ("whole", "out"))
    losses = [[(e["step"], e["loss"]) for e in run["log"] if "loss" in e] for run in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert resumed["first_loss"] == whole["first_loss"]
    written = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert written == resumed["log"]


@pytest.mark.parametrize(
    ("step", "evaluation"), [(2, {"EVAL_FRACTION": 0.25}), (3, {})], ids=["in mid-epoch", "at its end"]
)
def test_a_signal_in_mid_run_saves_the_step_and_the_run_goes_on_to_the_same_bytes(train, tmp_path, step, evaluation):
    settings = {"NUM_TRAIN_EPOCHS": 2, **evaluation}
    assert train(OUTPUT_DIR=tmp_path / "whole", **settings).status == 0
    with during(step, do=lambda: os.kill(os.getpid(), signal.SIGTERM)):
        stopped = train(**settings)
    assert stopped.status == 75
    assert f"SIGTERM behind step {step} of" in stopped.err and "Traceback" not in stopped.err
    assert not (tmp_path / "out/adapter").exists()
    result = train(**settings)
    assert result.status == 0 and f"checkpoint-{step}" in result.err
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    assert evaluations(tmp_path / "out") == evaluations(tmp_path / "whole")


@pytest.mark.parametrize(
    ("every", "at"), [({"EVAL_STEPS": 1}, 2), ({"SAVE_STEPS": 2, "LOAD_BEST_MODEL_AT_END": "false"}, 3)]
)
def test_a_signal_at_an_evaluation_ends_the_run_at_once_and_the_step_is_done_again(train, tmp_path, every, at):
    settings = {"NUM_TRAIN_EPOCHS": 2, "EVAL_FRACTION": 0.25, **every}
    assert train(OUTPUT_DIR=tmp_path / "whole", **settings).status == 0
    with during(at, do=lambda: os.kill(os.getpid(), signal.SIGTERM)):
        stopped = train(**settings)
    assert stopped.status == 75 and f"during an evaluation, at step {at}" in stopped.err
    assert not (tmp_path / f"out/checkpoints/checkpoint-{at}").exists()
    result = train(**settings)
    assert result.status == 0 and f"checkpoint-{at - 1}" in result.err
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
    assert evaluations(tmp_path / "out") == evaluations(tmp_path / "whole")


def test_a_signal_while_loading_ends_the_process_as_stopped():
    command = [sys.executable, "-m", "train", "train"]
    environment = os.environ | {"ALLOW_CPU": "true"}
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr.readline() == "loading libraries\n"
    process.terminate()
    assert process.wait(timeout=30) == 75
    assert "Traceback" not in process.stderr.read()


def test_early_stopping_goes_on_counting_after_an_interruption(train, tmp_path):
    settings = {
        "EVAL_FRACTION": 0.25,
        "EVAL_STEPS": 1,
        "EARLY_STOPPING_PATIENCE": 3,
        "MAX_STEPS": 40,
        "LEARNING_RATE": 3.0,
        "OPTIM": "sgd",
    }
    assert train(OUTPUT_DIR=tmp_path / "whole", **settings).status == 0
    whole = record_of(tmp_path / "whole")
    assert whole["steps"] < 40
    with interrupt(after_step=whole["steps"]):  # before its last evaluation
        assert train(**settings).status == 75
    assert train(**settings).status == 0
    assert record_of(tmp_path / "out")["steps"] == whole["steps"]


def test_a_checkpoint_whose_saving_was_cut_off_is_passed_over(train, tmp_path):
    settings = {"SAVE_STEPS": 1, "NUM_TRAIN_EPOCHS": 2}
    assert train(OUTPUT_DIR=tmp_path / "whole", **settings).status == 0
    with interrupt(after_step=3):
        assert train(**settings).status == 75
    (tmp_path / "out/checkpoints/checkpoint-2/trainer_state.json").unlink()
    result = train(**settings)
    assert result.status == 0, result.err
    assert "checkpoint-2 is not whole" in result.err and "going on from" in result.err
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("finished", [True, False])
def test_other_rows_under_the_same_name_are_refused(train, tmp_path, rows, finished):
    copy = tmp_path / "copy.jsonl"
    shutil.copyfile(rows, copy)
    settings = {"DATASET": copy, "SAVE_STEPS": 1}
    if finished:
        assert train(**settings).status == 0
    else:
        with interrupt(after_step=2):
            assert train(**settings).status == 75
    copy.write_text(copy.read_text().replace("plum", "pear"))
    result = train(**settings)
    assert result.status == 2
    assert f"DATASET={copy} has changed since" in result.err


def test_an_adapter_of_unknown_origin_is_not_touched(train, tmp_path):
    (tmp_path / "out/adapter").mkdir(parents=True)
    (tmp_path / "out/adapter/mine.txt").write_text("keep me")
    result = train()
    assert result.status == 2 and "OUTPUT_DIR" in result.err
    assert (tmp_path / "out/adapter/mine.txt").exists()
