"""Cases 60 to 65: losses, steps and rates are what the settings say."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from trl import SFTTrainer

from tests.conftest import record_of

EXACT = {"BNB_4BIT_COMPUTE_DTYPE": "float32", "LORA_DROPOUT": 0}


def logged(record, key) -> list[float]:
    return [entry[key] for entry in record["log"] if key in entry]


def test_60_accumulation_changes_neither_loss_nor_gradient(case):
    unequal = case(0)
    rows = [{"prompt": "Count: ", "completion": " ".join(map(str, range(1 + n * n % 23)))} for n in range(16)]
    (unequal.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for forward, accumulated in ((8, 1), (1, 8)):
        batch = {"PER_DEVICE_TRAIN_BATCH_SIZE": forward, "GRADIENT_ACCUMULATION_STEPS": accumulated}
        record, said = unequal.trained(DATASET="./rows.jsonl", MAX_STEPS=1, **batch, **EXACT)
        assert re.search(r"effective batch: .*\b8 examples", said)
        found.append((record["first_loss"], *logged(record, "grad_norm")))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=0.01)


def test_61_a_loss_that_is_no_number_ends_the_run_at_once_with_what_computed_it(case):
    broken = case(0)
    file = broken.folder / "model/model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, file, metadata={"format": "pt"})
    result = broken.train(DATASET="./train.jsonl", NUM_TRAIN_EPOCHS=3, **EXACT)
    assert result.status == 6 and "Traceback" not in result.err
    said = result.err.partition("error: ")[2]
    assert "step 1" in said and "float32" in said and "sdpa attention" in said
    assert not (broken.folder / "out/adapter").exists()
    assert not list((broken.folder / "out").rglob("*.safetensors"))


def test_61_a_broken_checkpoint_is_never_saved_and_the_last_good_one_stays(case, monkeypatch):
    later = case(0)
    compute_loss = SFTTrainer.compute_loss

    def breaking(trainer, *arguments, **rest):
        return compute_loss(trainer, *arguments, **rest) * (torch.nan if trainer.state.global_step == 3 else 1)

    monkeypatch.setattr(SFTTrainer, "compute_loss", breaking)
    result = later.train(DATASET="./train.jsonl", MAX_STEPS=8, SAVE_STEPS=1, LOGGING_STEPS=8)
    assert result.status == 6 and "step 4" in result.err
    assert {path.name for path in later.folder.glob("out/checkpoints/checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    kept = load_file(later.folder / "out/checkpoints/checkpoint-3/adapter_model.safetensors")
    assert all(weight.isfinite().all() for weight in kept.values())
    assert record_of(later.folder / "out")["status"] != "finished"


def test_62_an_evaluation_row_without_an_answer_is_dropped_and_named(case):
    evaluated = case(62)
    record, said = evaluated.trained(**evaluated.settings_of("run.env"))
    assert (record["eval_rows"]["read"], record["eval_rows"]["used"]) == (2, 1)
    assert re.search(r"eval.*dropped 1 of 2", said)
    losses = logged(record, "eval_loss")
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)


def test_62_evaluation_rows_that_are_all_without_an_answer_are_refused(case):
    evaluated = case(62)
    file = evaluated.folder / "eval.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    said = evaluated.refused(**evaluated.settings_of("run.env"))
    assert re.search(r"\b(0|none|no)\b.*\beval", said) and re.search(r"\b1\b", said)


def test_63_fewer_rows_than_a_step_takes_are_a_step_an_epoch(case):
    few = case(63)
    record, said = few.trained(**few.settings_of("run.env"))
    assert record["steps"] == 2
    assert re.search(r"warning: .*batch of 32.*\b3 rows", said)


@pytest.mark.parametrize(
    ("env_file", "expected"),
    [
        ("both.env", ["MAX_STEPS", "NUM_TRAIN_EPOCHS"]),
        ("zero.env", ["MAX_STEPS", "NUM_TRAIN_EPOCHS", "nothing to train"]),
    ],
)
def test_64_steps_and_epochs_that_contradict_each_other_or_are_none_are_refused(case, env_file, expected):
    both = case(64)
    said = both.refused(**both.settings_of(env_file))
    assert all(word in said for word in expected)


@pytest.mark.parametrize("zero", ["0", "0.0"])
def test_64_either_of_them_at_zero_is_nothing_to_train(case, zero):
    neither = case(64)
    for name in ("MAX_STEPS", "NUM_TRAIN_EPOCHS"):
        said = neither.refused(DATASET="./train.jsonl", **{name: zero})
        assert f'{name} is "{zero}": nothing to train' in said


def test_65_a_warm_up_that_outlasts_the_run_is_warned_of(case):
    short = case(65)
    record, said = short.trained(**short.settings_of("run.env"))
    assert record["steps"] == 10
    assert max(logged(record, "learning_rate")) == pytest.approx(1.8e-5)
    plan = next(line for line in said.splitlines() if line.startswith("plan: "))
    assert "10 optimizer steps" in plan and "warm-up 100" in plan and "1.8e-05" in plan
    assert re.search(r"warning: WARMUP_STEPS=100 .*\b10 steps.* 1.8e-05 ", said)


@pytest.mark.parametrize(
    "given",
    [
        {"WARMUP_STEPS": 0.2},
        {"WARMUP_STEPS": 9, "LR_SCHEDULER_TYPE": "cosine"},
        {"WARMUP_STEPS": 100, "LR_SCHEDULER_TYPE": "constant"},
        {"WARMUP_STEPS": 10},
        {"WARMUP_STEPS": 11, "LR_SCHEDULER_TYPE": "polynomial"},
        {"WARMUP_STEPS": 3, "NUM_TRAIN_EPOCHS": 0.15},
        {"WARMUP_STEPS": 3, "MAX_STEPS": 2},
    ],
    ids=str,
)
def test_65_the_plan_is_what_the_trainer_does(case, given):
    record, said = case(65).trained(
        DATASET="./train.jsonl", PER_DEVICE_TRAIN_BATCH_SIZE=1, GRADIENT_ACCUMULATION_STEPS=1, **given
    )
    steps, peak = re.search(r"plan: (\d+) optimizer steps.* peak learning rate (\S+)", said).groups()
    assert int(steps) == record["steps"]
    assert float(peak) == pytest.approx(max(logged(record, "learning_rate")), rel=0.01)
    assert ("warning: WARMUP_STEPS" in said) == (float(peak) < 2e-4)


def test_65_a_warm_up_that_this_schedule_divides_by_zero_for_is_refused_before_the_last_step(case):
    given = {"WARMUP_STEPS": 10, "LR_SCHEDULER_TYPE": "polynomial"}
    batch = {"PER_DEVICE_TRAIN_BATCH_SIZE": 1, "GRADIENT_ACCUMULATION_STEPS": 1}
    said = case(65).refused(DATASET="./train.jsonl", **batch, **given)
    assert "WARMUP_STEPS" in said and "LR_SCHEDULER_TYPE=polynomial" in said
