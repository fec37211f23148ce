"""The run through the command line on a tiny model: what it leaves, that each part of the recipe is on, how it ends."""

import json
import shutil
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import record_of
from train import model, recipe, record
from train.config import Config

WEIGHTS = "adapter/adapter_model.safetensors"


def config_of(tiny_model: Path, **settings) -> Config:
    return Config(_env_file=None, MODEL_ID=str(tiny_model), ALLOW_CPU=True, **settings)


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


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory):
    """Adapter bytes of the run without any change, made once."""
    return {}


@pytest.mark.parametrize(
    "changed",
    [
        {"BNB_4BIT_QUANT_TYPE": "fp4"},
        {"BNB_4BIT_USE_DOUBLE_QUANT": "false"},
        {"LOAD_IN_4BIT": "false"},
        {"LORA_ALPHA": 64},
        {"LORA_DROPOUT": 0.4},
        {"USE_RSLORA": "true"},
        {"USE_DORA": "true"},
        {"TARGET_MODULES": "all-linear"},
        {"EFFECTIVE_BATCH_SIZE": 4},
        {"LEARNING_RATE": 1e-3},
        {"LR_SCHEDULER_TYPE": "cosine"},
        {"WARMUP_STEPS": 2},
        {"WEIGHT_DECAY": 0.5},
        {"MAX_GRAD_NORM": 0.01, "OPTIM": "sgd"},
        {"NEFTUNE_NOISE_ALPHA": 5},
        {"MAX_LENGTH": 24},
        {"COMPLETION_ONLY_LOSS": "false"},
        {"NUM_TRAIN_EPOCHS": 2},
        {"MAX_STEPS": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_each_part_of_the_recipe_changes_the_result(train, tmp_path, plain_weights, changed):
    optim = changed.get("OPTIM", "paged_adamw_8bit")
    if optim not in plain_weights:
        assert train(OUTPUT_DIR=tmp_path / "plain", OPTIM=optim).status == 0
        plain_weights[optim] = (tmp_path / "plain" / WEIGHTS).read_bytes()
    result = train(OUTPUT_DIR=tmp_path / "changed", **changed)
    assert result.status == 0, result.err
    assert (tmp_path / "changed" / WEIGHTS).read_bytes() != plain_weights[optim]


@pytest.mark.parametrize(
    "optim",
    ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit"]
    + ["paged_lion_8bit", "ademamix_8bit", "paged_ademamix_8bit", "adafactor", "sgd"],
)
def test_every_optimizer_lowers_the_loss(train, tmp_path, optim):
    rate = {"sgd": 1.0, "lion_8bit": 1e-3, "paged_lion_8bit": 1e-3}.get(optim, 1e-2)
    result = train(OPTIM=optim, LEARNING_RATE=rate, NUM_TRAIN_EPOCHS=2)
    assert result.status == 0, result.err
    run = record_of(tmp_path / "out")
    assert run["last_loss"] < run["first_loss"]


def test_the_base_is_nf4_with_double_quantisation_and_stays_in_bf16_around_a_float32_adapter(tiny_model):
    config = config_of(tiny_model, BNB_4BIT_COMPUTE_DTYPE="bfloat16")
    base = model.load_base(config, torch.bfloat16)
    linear = [module for module in base.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(linear) == 2 * 7
    for module in linear:
        state = module.weight.quant_state
        assert (state.quant_type, state.nested, state.dtype) == ("nf4", True, torch.bfloat16)
    assert base.get_input_embeddings().weight.dtype == torch.bfloat16
    assert base.get_output_embeddings().weight.dtype == torch.bfloat16


def test_training_keeps_the_adapter_in_float32(train, tmp_path):
    assert train(BNB_4BIT_COMPUTE_DTYPE="bfloat16").status == 0
    assert {w.dtype for w in load_file(tmp_path / "out" / WEIGHTS).values()} == {torch.float32}
    assert record_of(tmp_path / "out")["compute_dtype"] == "bfloat16"


def test_rslora_and_dora_and_named_targets_reach_the_adapter(train, tmp_path):
    assert train(USE_RSLORA="true", USE_DORA="true", TARGET_MODULES="q_proj,down_proj", LORA_R=4).status == 0
    described = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert (described["use_rslora"], described["use_dora"], described["r"]) == (True, True, 4)
    names = load_file(tmp_path / "out" / WEIGHTS)
    assert {name.split(".")[-3] for name in names if "lora_A" in name} == {"q_proj", "down_proj"}
    assert sum("lora_magnitude_vector" in name for name in names) == 2 * 2


def test_activation_checkpointing_runs_each_layer_again_and_gives_the_same_losses(train, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaAttention

    calls, forward = [], LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda self, *a, **k: (calls.append(1), forward(self, *a, **k))[1])
    seen = {}
    for setting in ("true", "false"):
        calls.clear()
        assert train(OUTPUT_DIR=tmp_path / setting, ACTIVATION_CHECKPOINTING=setting, LORA_DROPOUT=0).status == 0
        losses = [entry["loss"] for entry in record_of(tmp_path / setting)["log"] if "loss" in entry]
        seen[setting] = len(calls), losses
    assert seen["true"][0] == 2 * seen["false"][0]
    assert seen["true"][1] == pytest.approx(seen["false"][1], rel=1e-5)


def test_accumulation_and_batch_give_the_same_loss_and_gradient(train, tmp_path, rows):
    uneven = tmp_path / "uneven.jsonl"
    lines = rows.read_text().splitlines()
    uneven.write_text(
        "\n".join(json.dumps(json.loads(line) | {"output": "plum " * (n + 1)}) for n, line in enumerate(lines))
    )
    seen = []
    for per_device in (1, 8):
        result = train(
            OUTPUT_DIR=tmp_path / str(per_device),
            DATASET=uneven,
            PER_DEVICE_TRAIN_BATCH_SIZE=per_device,
            LORA_DROPOUT=0,
            OPTIM="sgd",
            LOAD_IN_4BIT="false",
            BNB_4BIT_COMPUTE_DTYPE="float32",
        )
        assert result.status == 0, result.err
        assert "= 8 examples" in result.err
        first = record_of(tmp_path / str(per_device))["log"][0]
        seen.append((first["loss"], first["grad_norm"]))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)


def test_evaluation_keeps_the_best_checkpoint_and_stops_early(train, tmp_path):
    result = train(
        EVAL_FRACTION=0.25,
        EVAL_STEPS=1,
        EARLY_STOPPING_PATIENCE=2,
        MAX_STEPS=40,
        LEARNING_RATE=3.0,
        OPTIM="sgd",
        MAX_GRAD_NORM=1,
    )
    assert result.status == 0, result.err
    run = record_of(tmp_path / "out")
    evaluated = {entry["step"]: entry["eval_loss"] for entry in run["log"] if "eval_loss" in entry}
    assert run["eval_rows"]["used"] == 6 and run["train_rows"]["used"] == 18
    assert run["best_eval_loss"] == min(evaluated.values()) == evaluated[run["best_checkpoint_step"]]
    assert run["steps"] < 40
    best = load_file(tmp_path / f"out/checkpoints/checkpoint-{run['best_checkpoint_step']}/adapter_model.safetensors")
    kept = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(best[name], kept[name]) for name in kept)


def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(train):
    result = train(DATASET_SPLIT="train[:1]", EVAL_FRACTION=0.5)
    assert result.status == 2 and "EVAL_FRACTION" in result.err


def test_evaluation_rows_may_come_from_a_file(train, tmp_path, rows):
    assert train(EVAL_DATASET=rows).status == 0
    assert record_of(tmp_path / "out")["eval_rows"]["used"] == 24


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


def test_an_interrupted_run_goes_on_to_the_same_bytes(train, tmp_path, monkeypatch):
    assert train(OUTPUT_DIR=tmp_path / "whole", SAVE_STEPS=1, NUM_TRAIN_EPOCHS=2).status == 0
    on_step_end = record.RunLog.on_step_end

    def interrupt(self, args, state, control, **rest):
        on_step_end(self, args, state, control, **rest)
        if state.global_step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(record.RunLog, "on_step_end", interrupt)
    assert train(SAVE_STEPS=1, NUM_TRAIN_EPOCHS=2).status == 75
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    result = train(SAVE_STEPS=1, NUM_TRAIN_EPOCHS=2)
    assert result.status == 0 and "going on from" in result.err
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_a_loss_that_is_no_number_ends_the_run_with_nothing_saved_as_final(train, tmp_path):
    result = train(LEARNING_RATE=1e30, OPTIM="sgd", MAX_GRAD_NORM=0, NUM_TRAIN_EPOCHS=4)
    assert result.status == 6
    assert "error: loss became" in result.err  # not the gradient: the log must not filter it away
    assert "LEARNING_RATE" in result.err and "Traceback" not in result.err
    assert not (tmp_path / "out/adapter").exists()
    assert record_of(tmp_path / "out")["status"] != "finished"


def test_gradients_survive_an_evaluation_before_training(tiny_model, monkeypatch):
    """On a CPU with AVX512-BF16 bitsandbytes repacks the weights at the first evaluation."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    from peft import get_peft_model

    config = config_of(tiny_model)
    base = model.load_base(config, torch.float32)
    assert not any(m.support_avx512bf16_for_cpu for m in base.modules() if isinstance(m, bnb.nn.Linear4bit))
    adapted = get_peft_model(base, model.lora(config))
    ids = torch.arange(10)[None].to(base.device)

    def gradient_norm() -> float:
        adapted.train()
        adapted.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        return sum(
            float(p.grad.norm()) for name, p in adapted.named_parameters() if "layers.0" in name and p.grad is not None
        )

    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    torch.manual_seed(0)
    before = gradient_norm()
    adapted.eval()
    with torch.no_grad():
        adapted(input_ids=ids)
    torch.manual_seed(0)
    assert gradient_norm() == pytest.approx(before, rel=1e-5) and before > 0


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


def test_more_examples_a_step_than_rows_is_one_step_an_epoch_with_a_warning(train, tmp_path):
    result = train(EFFECTIVE_BATCH_SIZE=32, NUM_TRAIN_EPOCHS=2)
    assert result.status == 0
    assert "effective batch of 32 exceeds the 24 rows" in result.err
    assert record_of(tmp_path / "out")["steps"] == 2


def test_tensorboard_gets_the_log_and_wandb_needs_its_key(train, tmp_path):
    assert train(REPORT_TO="tensorboard").status == 0
    assert list((tmp_path / "out").rglob("events.out.tfevents*"))
    refused = train(REPORT_TO="wandb", OUTPUT_DIR=tmp_path / "other")
    assert refused.status == 2 and "WANDB_API_KEY" in refused.err
