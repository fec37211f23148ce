"""The other verbs: check, generate, merge; and starting the real process."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT
from train import doctor, gpu


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    monkeypatch.setattr(gpu, "driver_is_there", lambda: False)


def test_check_passes_what_is_fit_and_trains_nothing(run, tiny_model, rows, tmp_path):
    result = run("check", MODEL_ID=tiny_model, DATASET=rows, ALLOW_CPU="true", OUTPUT_DIR=tmp_path / "out")
    assert result.status == 0, result.out
    assert result.out.count("ok  ") == 6
    assert "24 rows usable, by the columns instruction as question" in result.out
    assert not list((tmp_path / "out").iterdir())


def test_check_tells_all_that_is_unfit(run, no_gpu, tmp_path):
    (tmp_path / "file").write_text("")
    result = run(
        "check", MODEL_ID="./none", DATASET="./none.jsonl", OUTPUT_DIR=tmp_path / "file/out", REPORT_TO="mlflow"
    )
    assert result.status == 3
    for said in (
        "--gpus all",
        "REPORT_TO=mlflow",
        "OUTPUT_DIR",
        "./none.jsonl",
        'model "./none" cannot be loaded: there is no such folder',
    ):
        assert said in result.out


@pytest.mark.parametrize("found", [[], ["/dev/nvidia0"]])
def test_without_a_gpu_train_says_so_unless_the_cpu_is_allowed(run, no_gpu, monkeypatch, tiny_model, rows, found):
    monkeypatch.setattr(gpu, "devices", lambda: found)
    result = run("train", MODEL_ID=tiny_model, DATASET=rows)
    assert result.status == 3
    assert "--gpus all" in result.err and "ALLOW_CPU=true" in result.err
    assert ("NVIDIA Container Toolkit" in result.err) is bool(found)


def test_generate_answers_each_prompt_and_compares_with_the_base(train, run, tmp_path):
    assert train(NUM_TRAIN_EPOCHS=20, TARGET_MODULES="all-linear").status == 0
    adapter = str(tmp_path / "out/adapter")
    result = run("generate", "--adapter", adapter, "--prompt", "Name a fruit. 3", "--max-new-tokens", "12")
    assert result.status == 0, result.err
    assert result.out.strip() == "A plum."  # learned, and it stops
    compared = run(
        "generate",
        "--adapter",
        adapter,
        "--compare",
        "--prompt",
        "Name a fruit. 3",
        "--prompt",
        "Name a tree. 5",
        "--max-new-tokens",
        "12",
    )
    assert "base" in compared.out and "tuned" in compared.out
    assert "A plum." in compared.out and "An oak stands tall." in compared.out


def test_generate_continues_a_raw_prompt_as_prompt_and_completion_rows_are_trained(train, run, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(json.dumps({"prompt": "Name a fruit: ", "completion": "A plum."}) + "\n")
    settings = {"DATASET": rows, "EFFECTIVE_BATCH_SIZE": 1, "NUM_TRAIN_EPOCHS": 20}
    assert train(**settings).status == 0
    asked = ["generate", "--adapter", str(tmp_path / "out/adapter"), "--prompt", "Name a fruit: "]
    assert run(*asked, "--raw", "--max-new-tokens", "12").out.strip() == "A plum."
    assert run(*asked, "--max-new-tokens", "12").out.strip() != "A plum."


def test_a_base_that_has_moved_is_named_by_model_id(train, run, own_model, tmp_path):
    assert train(MODEL_ID=own_model).status == 0
    moved = own_model.rename(tmp_path / "moved")
    asked = ["generate", "--adapter", str(tmp_path / "out/adapter"), "--prompt", "x", "--max-new-tokens", "2"]
    del os.environ["MODEL_ID"]
    assert run(*asked).status != 0
    result = run(*asked, MODEL_ID=moved)
    assert result.status == 0 and "stands in for" in result.err
    merged = run("merge", "--adapter", str(tmp_path / "out/adapter"), "--out", str(tmp_path / "m"), MODEL_ID=moved)
    assert merged.status == 0, merged.err


def test_generate_and_merge_refuse_a_folder_without_adapter(run, tmp_path):
    assert "holds no adapter" in run("generate", "--adapter", str(tmp_path), "--prompt", "x").err
    assert run("merge", "--adapter", str(tmp_path), "--out", str(tmp_path / "m")).status == 2


@pytest.mark.parametrize(
    "settings",
    [{}, {"USE_RSLORA": "true", "TARGET_MODULES": "all-linear"}, {"USE_DORA": "true"}],
    ids=["lora", "rslora", "dora"],
)
def test_merge_equals_pefts_merge_bit_for_bit(train, run, tiny_model, tmp_path, settings):
    assert train(**settings).status == 0
    adapter, merged = str(tmp_path / "out/adapter"), tmp_path / "merged"
    result = run("merge", "--adapter", adapter, "--out", str(merged))
    assert result.status == 0, result.err
    ours = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    theirs = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(ours[name], before[name]) for name in before)
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    assert run("merge", "--adapter", adapter, "--out", str(merged)).status == 2


def test_merge_reads_the_files_that_the_base_lists_and_no_others(train, run, own_model, tmp_path):
    AutoModelForCausalLM.from_pretrained(own_model).save_pretrained(own_model, max_shard_size="40KB")
    (own_model / "model.safetensors").unlink(missing_ok=True)
    assert train(MODEL_ID=own_model).status == 0
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, own_model / "consolidated.safetensors")
    merged = tmp_path / "merged"
    assert run("merge", "--adapter", str(tmp_path / "out/adapter"), "--out", str(merged)).status == 0
    weights = json.loads((merged / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.norm.weight" in weights and "tok_embeddings.weight" not in weights


@pytest.mark.parametrize(
    ("file", "changed", "said"),
    [
        ("adapter_config.json", {"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ("adapter_config.json", {"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_merge_refuses_what_it_would_merge_wrongly(train, run, own_model, tmp_path, file, changed, said):
    assert train(MODEL_ID=own_model).status == 0
    adapter = tmp_path / "out/adapter"
    path = (adapter if file == "adapter_config.json" else own_model) / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    result = run("merge", "--adapter", str(adapter), "--out", str(tmp_path / "m"))
    assert result.status == 2 and said in result.err
    assert not (tmp_path / "m").exists() and not (tmp_path / "m.partial").exists()


def test_the_process_exits_with_the_status_and_no_traceback():
    started = subprocess.run(
        [sys.executable, "-m", "train", "train"],
        check=False,
        env=os.environ | {"LEARNING_RATE": "fast"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert started.returncode == 2
    assert "LEARNING_RATE" in started.stderr and "Traceback" not in started.stderr


def test_merge_reports_the_loss_before_and_after_on_the_rows_of_the_training(train, run, rows, tmp_path):
    assert train(NUM_TRAIN_EPOCHS=4).status == 0
    adapter = str(tmp_path / "out/adapter")
    os.environ.pop("DATASET")
    result = run("merge", "--adapter", adapter, "--out", str(tmp_path / "merged"))
    assert result.status == 0, result.err
    found = re.search(r"loss on 24 rows: ([\d.]+) with the adapter on its base in 4 bits, ([\d.]+) merged", result.err)
    assert found, result.err
    before, after = map(float, found.groups())
    assert before < json.loads((tmp_path / "out/run.json").read_text())["first_loss"]
    assert after == pytest.approx(before, rel=0.25)
    given = run("merge", "--adapter", adapter, "--out", str(tmp_path / "m2"), DATASET="none.jsonl")
    assert given.status == 0 and "not compared: there is no file or folder none.jsonl" in given.err
    os.environ.pop("DATASET")
    (tmp_path / "out/run.json").unlink()
    assert "set DATASET" in run("merge", "--adapter", adapter, "--out", str(tmp_path / "m3")).err
