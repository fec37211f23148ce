"""Each part of the recipe is on: it changes the result, and the result is what the part is for."""

import json
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import WEIGHTS, record_of
from train import adapter, model
from train.config import Config

EIGHT_BIT = {"step", "state1", "qmap1", "absmax1"}


def config_of(tiny_model: Path, **settings) -> Config:
    return Config(_env_file=None, MODEL_ID=str(tiny_model), ALLOW_CPU=True, **settings)


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
        {"MAX_LENGTH": 28},
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
    ("optim", "state_keys"),
    [
        ("adamw_torch", {"step", "exp_avg", "exp_avg_sq"}),
        ("adamw_torch_fused", {"step", "exp_avg", "exp_avg_sq"}),
        ("adamw_8bit", EIGHT_BIT | {"state2", "qmap2", "absmax2"}),
        ("paged_adamw_8bit", EIGHT_BIT | {"state2", "qmap2", "absmax2"}),
        ("paged_adamw_32bit", {"step", "state1", "state2"}),
        ("lion_8bit", EIGHT_BIT),
        ("paged_lion_8bit", EIGHT_BIT),
        ("ademamix_8bit", EIGHT_BIT | {"state2", "qmap2", "absmax2"}),
        ("paged_ademamix_8bit", EIGHT_BIT | {"state2", "qmap2", "absmax2"}),
        ("adafactor", {"step", "RMS", "exp_avg_sq_row", "exp_avg_sq_col"}),
        ("sgd", set()),
    ],
)
def test_every_optimizer_keeps_its_own_state_and_lowers_the_loss(train, tmp_path, optim, state_keys):
    rate = {"sgd": 1.0, "lion_8bit": 1e-3, "paged_lion_8bit": 1e-3}.get(optim, 1e-2)
    # bitsandbytes keeps tensors below 4,096 elements in 32 bits: rank 64 makes them as large
    result = train(OPTIM=optim, LEARNING_RATE=rate, NUM_TRAIN_EPOCHS=2, LORA_R=64)
    assert result.status == 0, result.err
    run = record_of(tmp_path / "out")
    assert run["last_loss"] < run["first_loss"]
    saved = torch.load(tmp_path / "out/checkpoints/checkpoint-6/optimizer.pt", weights_only=True)
    state = next(iter(saved["state"].values()), {})
    state |= state.pop("__bnb_optimizer_quant_state__", {})
    assert set(state) == state_keys


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

    def counted(layer, *arguments, **rest):
        calls.extend([1] * layer.training)  # the adapter's proof reads a row in evaluation mode
        return forward(layer, *arguments, **rest)

    monkeypatch.setattr(LlamaAttention, "forward", counted)
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


def test_gradients_survive_an_evaluation_before_training(tiny_model, monkeypatch):
    """On a CPU with AVX512-BF16 bitsandbytes repacks the weights at the first evaluation."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    from peft import get_peft_model

    config = config_of(tiny_model)
    base = model.load_base(config, torch.float32)
    assert not any(m.support_avx512bf16_for_cpu for m in base.modules() if isinstance(m, bnb.nn.Linear4bit))
    adapted = get_peft_model(base, adapter.lora(config, config.target_modules))
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
