"""The run through the command line on a tiny model: what it leaves and how it ends."""

import json
from functools import cached_property

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput

from tests.conftest import WEIGHTS, record_of
from train import doctor, recipe, record
from train.config import Config
from train.console import Refusal


def test_a_run_leaves_an_adapter_that_plain_peft_loads_and_a_record(train, tiny_model, tmp_path):
    result = train(HF_TOKEN="hf_plumplumplum", WANDB_API_KEY="wandbplum")
    assert result.status == 0, result.err
    out = tmp_path / "out"
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted = PeftModel.from_pretrained(base, str(out / "adapter"))
    assert any(bool(w.any()) for name, w in adapted.state_dict().items() if "lora_B" in name)
    assert AutoTokenizer.from_pretrained(out / "adapter").chat_template

    run = record_of(out)
    assert run["status"] == "finished"
    assert run["steps"] == 3  # 24 rows, 8 a step
    assert (run["examples_a_forward_pass"], run["forward_passes_a_step"]) == (4, 2)
    assert run["last_loss"] < run["first_loss"]
    assert run["train_rows"]["used"] == 24
    assert run["settings"]["HF_TOKEN"] == "********"
    assert run["adapter_sha256"] == record.sha256(out / WEIGHTS)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]

    files = [file for file in out.rglob("*") if file.is_file()]
    assert any(file.name == "training_args.bin" for file in files)
    for secret in (b"hf_plumplumplum", b"wandbplum"):
        assert not [file for file in files if secret in file.read_bytes()]
        assert secret.decode() not in result.out + result.err
    assert all(file.stat().st_mode & 0o044 for file in (out / "adapter").iterdir())


def test_the_same_seed_gives_the_same_adapter_bytes_and_another_seed_does_not(train, tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (7, 7, 8), strict=True):
        assert train(OUTPUT_DIR=folder, SEED=seed).status == 0
    first, second, third = ((folder / WEIGHTS).read_bytes() for folder in folders)
    assert first == second != third
    described = json.loads((folders[0] / "adapter/adapter_config.json").read_text())
    assert described["target_modules"] == sorted(described["target_modules"])  # PEFT's set has no order of its own
    assert (folders[0] / "adapter/adapter_config.json").read_text() == (
        folders[1] / "adapter/adapter_config.json"
    ).read_text()


def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(train):
    result = train(DATASET_SPLIT="train[:1]", EVAL_FRACTION=0.5)
    assert result.status == 2 and "EVAL_FRACTION" in result.err


def test_evaluation_rows_may_come_from_a_file(train, tmp_path, rows):
    assert train(EVAL_DATASET=rows).status == 0
    assert record_of(tmp_path / "out")["eval_rows"]["used"] == 24


def test_a_loss_that_is_no_number_ends_the_run_with_nothing_saved_as_final(train, tmp_path):
    result = train(LEARNING_RATE=1e30, OPTIM="sgd", MAX_GRAD_NORM=0, NUM_TRAIN_EPOCHS=4)
    assert result.status == 6
    assert "error: loss became" in result.err  # not the gradient: the log must not filter it away
    assert "LEARNING_RATE" in result.err and "Traceback" not in result.err
    assert not (tmp_path / "out/adapter").exists()
    assert record_of(tmp_path / "out")["status"] != "finished"


@pytest.mark.parametrize("steps", [1, 3], ids=["after the last logged step", "at the last step"])
def test_weights_that_are_no_number_are_never_saved_as_final(train, tmp_path, monkeypatch, steps):
    def spoil(trainer, *arguments, **rest):
        next(p for p in trainer.model.parameters() if p.requires_grad).data.fill_(float("nan"))
        return TrainOutput(steps, 1.0, {"train_runtime": 1.0})

    monkeypatch.setattr(recipe.SFTTrainer, "train", spoil)
    result = train()
    assert result.status == 6 and "became no number" in result.err
    assert not (tmp_path / "out/adapter").exists()


def test_the_loss_scaler_may_overflow_and_an_evaluation_may_not(tmp_path):
    control, state = TrainerControl(), TrainerState(global_step=3)
    fp16 = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    fp16.fp16 = True  # refused on a CPU, and only this is read
    with record.RunLog(tmp_path, done=0, computed="in float16") as log:
        log.on_log(fp16, state, control, logs={"loss": 1.0, "grad_norm": float("inf")})
        with pytest.raises(Refusal, match="eval_loss became nan by step 3"):
            log.on_log(fp16, state, control, logs={"eval_loss": float("nan")})


def test_out_of_memory_says_what_to_lower(train, monkeypatch):
    def explode(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(recipe.SFTTrainer, "train", explode)
    result = train()
    assert result.status == 4
    assert "PER_DEVICE_TRAIN_BATCH_SIZE" in result.err and "Traceback" not in result.err


def test_debug_shows_the_traceback(train, monkeypatch):
    def explode(*_, **__):
        raise RuntimeError("token hf_plumplum is wrong")

    monkeypatch.setattr(recipe.SFTTrainer, "train", explode)
    quiet = train(HF_TOKEN="hf_plumplum")
    assert quiet.status == 1 and "Traceback" not in quiet.err
    loud = train(HF_TOKEN="hf_plumplum", LOG_LEVEL="debug")
    assert "Traceback" in loud.err
    assert "hf_plumplum" not in quiet.err + loud.err


def test_wrong_targets_are_refused_before_weights_load(train, tmp_path):
    result = train(TARGET_MODULES="q_porj,v_proj")
    assert result.status == 2
    assert "q_porj" in result.err and "q_proj" in result.err and "all-linear" in result.err
    assert not (tmp_path / "out/checkpoints").exists()


def test_a_base_that_lacks_weights_is_refused(train, own_model):
    weights = load_file(own_model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, own_model / "model.safetensors", metadata={"format": "pt"})
    result = train(MODEL_ID=own_model)
    assert result.status == 2
    assert "lacks 1 of the weights" in result.err and "model.layers.1.mlp.up_proj.weight" in result.err


def test_a_base_whose_generation_settings_contradict_each_other_is_trained_all_the_same(train, own_model, tmp_path):
    wrong = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 2]}
    (own_model / "generation_config.json").write_text(json.dumps(wrong))
    result = train(MODEL_ID=own_model)
    assert result.status == 0, result.err
    assert GenerationConfig.from_pretrained(tmp_path / "out/adapter").eos_token_id == [2, 3]


def test_the_adapter_names_its_base_and_the_bases_revision(train, tiny_model, tmp_path):
    assert train(MODEL_REVISION="plum").status == 0
    described = PeftConfig.from_pretrained(str(tmp_path / "out/adapter"))
    assert (described.base_model_name_or_path, described.revision) == (str(tiny_model), "plum")


def test_several_visible_gpus_do_not_wrap_the_model(train, monkeypatch):
    real = TrainingArguments._setup_devices

    def two_gpus(arguments):
        device = real.func(arguments)
        arguments._n_gpu = 2
        return device

    patched = cached_property(two_gpus)
    patched.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", patched)
    result = train()
    assert result.status == 0, result.err


def test_more_examples_a_step_than_rows_is_one_step_an_epoch_with_a_warning(train, tmp_path):
    result = train(EFFECTIVE_BATCH_SIZE=32, NUM_TRAIN_EPOCHS=2)
    assert result.status == 0
    assert "effective batch of 32 exceeds the 24 rows" in result.err
    assert record_of(tmp_path / "out")["steps"] == 2


def test_trackers_get_the_log(train, tmp_path):
    result = train(REPORT_TO="tensorboard,wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    assert result.status == 0, result.err
    assert list((tmp_path / "out").rglob("events.out.tfevents*"))
    assert list((tmp_path / "out/wandb").rglob("*.wandb"))


def test_wandb_needs_a_key_or_a_login(train, tmp_path):
    refused = train(REPORT_TO="wandb", NETRC=tmp_path / "netrc")
    assert refused.status == 3 and "WANDB_API_KEY" in refused.err
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'a' * 40}\n")
    config = Config(_env_file=None, REPORT_TO="wandb")
    assert doctor.trackers(config) == "wandb"
