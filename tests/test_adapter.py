"""Which layers get an adapter, what stays in 16 bits, and the proof that what was saved is what was trained."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconH1Config,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
)

from tests.conftest import WEIGHTS, build_tokenizer, record_of
from train import adapter, recipe, skeleton

SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
WIDE = {"intermediate_size": 128, "bos_token_id": 0, "eos_token_id": 2, "initializer_range": 0.1}
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL, **WIDE, num_key_value_heads=2),
    "mixtral": MixtralConfig(**SMALL, **WIDE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=2),
    "gpt-neox": GPTNeoXConfig(**SMALL, intermediate_size=128),
    "phi3": Phi3Config(**SMALL, intermediate_size=128, eos_token_id=2),
    "jamba": JambaConfig(**SMALL | {"num_hidden_layers": 8}, intermediate_size=128, use_mamba_kernels=False),
    "falcon-h1": FalconH1Config(**SMALL, intermediate_size=128),
}


@pytest.fixture
def model_of(tmp_path):
    """A folder with the configuration and tokenizer of an architecture and, where asked for, random weights."""

    def build(name: str, weights: bool = False) -> Path:
        folder = tmp_path / name
        build_tokenizer().save_pretrained(folder)
        if weights:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(ARCHITECTURES[name]).to(torch.bfloat16).save_pretrained(folder)
        else:
            ARCHITECTURES[name].save_pretrained(folder)
        return folder

    return build


def adapted_names(output: Path) -> set[str]:
    """Last names of the layers that have tensors in the saved adapter."""
    return {name.partition(".lora_")[0].rpartition(".")[2] for name in load_file(output / WEIGHTS)}


def assert_share_is_true(err: str) -> None:
    """What was said before the weights loaded is what the loaded base has."""
    share, total = re.search(r"base: ([\d.]+) % of the ([\d,]+) parameters in 4 bits", err).groups()
    counts = {
        kind: int(n.replace(",", "")) for n, kind in re.findall(r"([\d,]+) (4-bit|bfloat16|float32)", by_type(err))
    }
    assert sum(counts.values()) == int(total.replace(",", ""))
    assert float(share) == pytest.approx(100 * counts["4-bit"] / sum(counts.values()), abs=0.05)


def by_type(err: str) -> str:
    return next(line for line in err.splitlines() if line.startswith("base parameters by type"))


@pytest.mark.parametrize(
    ("architecture", "targets", "said"),
    [
        ("llama", "q_porj,v_proj", ["no layer is called q_porj; did you mean q_proj?", "down_proj, gate_proj, k_proj"]),
        ("llama", "query_key_value", ["no layer is called query_key_value", "q_proj"]),
        ("llama", "attn.q_proj", ["no layer is called attn.q_proj; did you mean self_attn.q_proj?"]),
        ("llama", "q_proj,norm,mlp", ["norm is a LlamaRMSNorm, no linear layer", "mlp is a LlamaMLP"]),
        ("llama", "q_proj,embed_tokens,lm_head", ["embed_tokens is the input embedding", "lm_head is the output head",
                                                  "75.0 KiB", "not tied"]),
        ("llama", "q_proj,all-linear", ["names layers beside all-linear"]),
        ("gpt2", None, ["no layer is called q_proj", "choose from c_attn, c_fc, c_proj"]),
        ("gpt2", "c_attn,wte,lm_head", ["wte is the input embedding", "lm_head is the output head", "would lose"]),
        ("gpt-neox", None, ["no layer is called v_proj", "query_key_value"]),
        ("gpt-neox", "embed_in,embed_out", ["embed_in is the input embedding"]),
        ("phi3", None, ["no layer is called q_proj", "qkv_proj"]),
        ("mixtral", "q_proj,w1", ["w1", "w3"]),
        ("mixtral", "q_proj,w1,w2,w3", ["w1, w2, w3 are the experts", "LORA_DROPOUT=0"]),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit_are_refused_from_the_configuration_alone(train, model_of, architecture, targets, said):
    result = train(MODEL_ID=model_of(architecture), **({"TARGET_MODULES": targets} if targets else {}))
    assert result.status == 2, result.err
    for text in said:
        assert text in result.err
    assert "all-linear" in result.err or "w1" in result.err
    assert "Traceback" not in result.err


def test_paths_reach_the_layers_that_they_name_and_a_partial_match_is_said(train, tmp_path):
    result = train(TARGET_MODULES="self_attn.q_proj,layers.1.mlp.down_proj")
    assert result.status == 0, result.err
    layers = {name.partition(".lora_")[0].partition("layers.")[2] for name in load_file(tmp_path / "out" / WEIGHTS)}
    assert layers == {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj"}
    assert "layers.1.mlp.down_proj: only 1 of the 2 layers have it" in result.err
    assert "self_attn.q_proj: only" not in result.err


def test_mixed_layers_are_told_and_what_peft_refuses_is_left_out_of_all_linear(run, model_of, rows):
    usual = {"DATASET": rows, "ALLOW_CPU": "true"}
    result = run("check", MODEL_ID=model_of("jamba"), TARGET_MODULES="q_proj,in_proj", **usual)
    assert result.status == 0, result.out
    assert "q_proj: only 1 of the 8 layers have it" in result.err
    assert "in_proj: only 7 of the 8 layers have it" in result.err
    result = run("check", MODEL_ID=model_of("falcon-h1"), TARGET_MODULES="all-linear", **usual)
    assert result.status == 0, result.out
    assert "no adapter on mamba.out_proj: PEFT refuses" in result.err


def test_all_linear_is_the_seven_projections_and_nothing_of_embedding_or_head(train, model_of, tmp_path):
    folder = model_of("llama", weights=True)
    result = train(MODEL_ID=folder, TARGET_MODULES="all-linear", LORA_R=4)
    assert result.status == 0, result.err
    assert adapted_names(tmp_path / "out") == SEVEN
    expected = 2 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3)  # layers × rank × (in + out)
    assert sum(tensor.numel() for tensor in load_file(tmp_path / "out" / WEIGHTS).values()) == expected
    total = expected + sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert ", ".join(f"2 × {name}" for name in sorted(SEVEN)) in result.err
    assert f"{expected:,} of {total:,} parameters are trained ({100 * expected / total:.2f} %)" in result.err
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out/adapter")) == len(AutoTokenizer.from_pretrained(folder))
    assert_share_is_true(result.err)


def test_experts_stay_in_16_bits_with_a_warning_and_without_adapter(train, model_of, tmp_path):
    result = train(MODEL_ID=model_of("mixtral", weights=True), TARGET_MODULES="all-linear")
    assert result.status == 0, result.err
    experts, router = 2 * 4 * 3 * 64 * 128, 2 * 4 * 64
    itemsize = 4 if "float32" in by_type(result.err) else 2
    warning = next(line for line in result.err.splitlines() if line.startswith("warning: only"))
    assert f"{(experts + router) * itemsize / 1024:,.1f} KiB of it in mlp.experts.down_proj" in warning
    assert_share_is_true(result.err)
    assert adapted_names(tmp_path / "out") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    left = (
        "all-linear: no adapter on mlp.experts.down_proj, mlp.experts.gate_up_proj, mlp.gate.weight: no linear layers"
    )
    assert left in result.err
    # With nothing but linear layers and embeddings, there is nothing to warn of.
    assert "warning: only" not in train(OUTPUT_DIR=tmp_path / "dense").err


def test_experts_named_by_the_user_are_trained_and_come_back(train, run, model_of, tmp_path):
    folder = model_of("mixtral", weights=True)
    result = train(MODEL_ID=folder, TARGET_MODULES="q_proj,w1,w2,w3", LORA_DROPOUT=0)
    assert result.status == 0, result.err
    assert "w1, w2, w3: PEFT adapts mlp.experts.down_proj, mlp.experts.gate_up_proj as whole parameters" in result.err
    assert record_of(tmp_path / "out")["last_loss"] < record_of(tmp_path / "out")["first_loss"]
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert any("experts" in name and bool(w.any()) for name, w in tensors.items() if "lora_B" in name)
    merged = run("merge", "--adapter", str(tmp_path / "out/adapter"), "--out", str(tmp_path / "merged"))
    assert merged.status == 2 and "merge_and_unload" in merged.err


@pytest.mark.parametrize("four_bit", ["true", "false"])
def test_a_base_larger_than_the_gpu_is_refused_before_its_weights_load(
    train, run, model_of, rows, monkeypatch, four_bit
):
    monkeypatch.setattr(skeleton, "gpu_bytes", lambda: 200 * 1024)
    folder = model_of("mixtral")
    result = train(MODEL_ID=folder, LOAD_IN_4BIT=four_bit)
    assert result.status == 3
    assert "the GPU has 200.0 KiB in all" in result.err
    assert ("set LOAD_IN_4BIT=true" in result.err) == (four_bit == "false")
    checked = run("check", MODEL_ID=folder, DATASET=rows)
    assert checked.status == 3 and "200.0 KiB" in checked.out


@pytest.mark.parametrize("four_bit", ["true", "false"])
@pytest.mark.parametrize("targets", ["c_attn", "all-linear", "attn.c_proj"])
def test_gpt2_with_its_transposed_layers_is_trained_and_never_merged_wrongly(
    train, run, model_of, tmp_path, targets, four_bit
):
    folder = model_of("gpt2", weights=True)
    result = train(MODEL_ID=folder, TARGET_MODULES=targets, LOAD_IN_4BIT=four_bit)
    assert result.status == 0, result.err
    assert "fan_in_fan_out is set" not in result.err
    run_record = record_of(tmp_path / "out")
    assert run_record["last_loss"] < run_record["first_loss"]
    described = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert described["fan_in_fan_out"] == (four_bit == "false")
    if four_bit == "true":
        assert_share_is_true(result.err)
    merged = run("merge", "--adapter", str(tmp_path / "out/adapter"), "--out", str(tmp_path / "merged"))
    assert merged.status == 2 and "transposed" in merged.err and "merge_and_unload" in merged.err


@pytest.mark.parametrize(
    "settings",
    [
        {"USE_DORA": "true", "USE_RSLORA": "true"},
        {"BNB_4BIT_COMPUTE_DTYPE": "bfloat16", "TARGET_MODULES": "all-linear"},
        {"BNB_4BIT_COMPUTE_DTYPE": "float32", "LOAD_IN_4BIT": "false"},
        {"EVAL_FRACTION": 0.25, "EVAL_STEPS": 1, "NEFTUNE_NOISE_ALPHA": 5},
    ],
    ids=["dora-rslora", "bfloat16", "float32", "best checkpoint"],
)
def test_the_saved_adapter_is_proven_and_the_difference_recorded(train, tmp_path, settings):
    result = train(**settings)
    assert result.status == 0, result.err
    assert 0 <= record_of(tmp_path / "out")["adapter_reload_difference"] < 0.01
    assert "the adapter read back on the untouched base" in result.err
    assert not (tmp_path / "out/adapter.partial").exists()


def nudge(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(tensor for name, tensor in tensors.items() if "lora_B" in name)[0, 0] += 1e-6
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def lose(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[min(tensors)]
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def rescale(folder: Path) -> None:
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | {"lora_alpha": 64}))


@pytest.mark.parametrize("spoil", [nudge, lose, rescale])
def test_an_adapter_that_is_not_what_was_trained_is_not_put_in_place(train, tmp_path, monkeypatch, spoil):
    save = adapter.save

    def badly(adapted, tokenizer, generation, folder):
        save(adapted, tokenizer, generation, folder)
        spoil(folder)

    monkeypatch.setattr(adapter, "save", badly)
    result = train()
    assert result.status == 2, result.err
    assert "is not the trained model" in result.err and "Traceback" not in result.err
    assert not (tmp_path / "out/adapter").exists() and (tmp_path / "out/adapter.partial").exists()
    assert record_of(tmp_path / "out")["status"] != "finished"


def test_a_base_that_training_changed_is_noticed(train, tmp_path, monkeypatch):
    real = recipe.SFTTrainer.train

    def touch(trainer, *arguments, **rest):
        done = real(trainer, *arguments, **rest)
        trainer.model.get_input_embeddings().weight.data *= 1.5
        return done

    monkeypatch.setattr(recipe.SFTTrainer, "train", touch)
    result = train()
    assert result.status == 2 and "the base has changed" in result.err
    assert not (tmp_path / "out/adapter").exists()


def test_a_tied_base_merged_and_loaded_again_says_what_the_adapter_on_it_says(train, run, tiny_model, tmp_path):
    assert train(TARGET_MODULES="all-linear").status == 0
    made = str(tmp_path / "out/adapter")
    assert run("merge", "--adapter", made, "--out", str(tmp_path / "merged")).status == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, made).eval()(input_ids=ids).logits
        found = merged.eval()(input_ids=ids).logits
    scale = float(adapted.abs().max())
    assert float((found - adapted).abs().max()) < 2e-2 * scale  # the merged weights are rounded to bf16
    assert float((plain - adapted).abs().max()) > 1e-1 * scale
