"""Cases 66 to 72: the machine, the folders and the settings, as far as no container engine is needed."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, WEIGHTS, record_of
from train import gpu

PROCESS = [sys.executable, "-m", "train"]


def started(*arguments, folder, **settings) -> subprocess.CompletedProcess:
    """A process of its own, for what is decided while libraries are imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in settings.items()}
    return subprocess.run(
        [*PROCESS, *arguments], check=False, env=environment, cwd=folder, capture_output=True, text=True
    )


@pytest.mark.skipif(gpu.driver_is_there(), reason="here is a GPU")
def test_66_without_a_gpu_the_run_is_refused_within_five_seconds(case):
    start = time.monotonic()
    refused = started("train", folder=case(0).folder)  # the default model and dataset, which are on the Hub
    assert time.monotonic() - start < 5
    assert refused.returncode == 3 and "Traceback" not in refused.stderr
    assert "--gpus all" in refused.stderr and "ALLOW_CPU=true" in refused.stderr


@pytest.fixture
def mounted(case):
    """A case with a folder that this user may not write to, as a user whom that holds back."""
    mounted = case(0)
    (mounted.folder / "mounted").mkdir(mode=0o555)
    user = os.getuid()
    if not user:
        os.setresuid(1000, 1000, 0)
    yield mounted
    os.setresuid(user, user, user)


def test_67_an_output_folder_of_someone_else_is_refused(mounted):
    result = mounted.run("train", OUTPUT_DIR="./mounted/out", DATASET="./train.jsonl", ALLOW_CPU="true")
    assert result.status == 3 and "Traceback" not in result.err
    assert "mounted/out" in result.err and f"user {os.getuid()}" in result.err
    assert "rows" not in result.err  # nothing was read yet


def test_67_the_owner_the_mode_and_the_way_out_are_said(mounted):
    result = mounted.run("train", OUTPUT_DIR="./mounted/out", DATASET="./train.jsonl", ALLOW_CPU="true")
    assert str(Path("mounted").stat().st_uid) in result.err and "555" in result.err
    assert "--user" in result.err or "chown" in result.err


def test_67_nothing_is_written_beside_the_rows_and_the_model(case):
    reading = case(0)
    data = reading.folder / "data"
    data.mkdir()
    shutil.copy(reading.folder / "train.jsonl", data)
    before = {path: path.read_bytes() for path in reading.folder.rglob("*") if path.is_file()}
    reading.trained(DATASET="./data", MAX_STEPS=1)
    shutil.rmtree(reading.folder / "out")
    assert {path: path.read_bytes() for path in reading.folder.rglob("*") if path.is_file()} == before


def test_68_what_lies_in_hf_home_is_used_offline(case, tmp_path):
    cached = case(0)
    kept, commit = tmp_path / "home/hub/models--someone--plum", 10 * "abcd"
    shutil.copytree(cached.folder / "model", kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(commit)
    (cached.folder / ".env").write_text(f"HF_HUB_OFFLINE=1\nHF_HOME={tmp_path / 'home'}\nMODEL_ID=someone/plum\n")
    done = started("train", folder=cached.folder, DATASET="./train.jsonl", OUTPUT_DIR="./out", ALLOW_CPU="true")
    assert done.returncode == 0, done.stderr
    assert record_of(cached.folder / "out")["model_revision"] == commit


def trained_as(case, how):
    """The record of a run whose run.env docker has read, or we have."""
    if how == "docker":
        return case.trained(**case.settings_of("run.env"))[0]
    result = case.run("train", "--env-file", case.env_file("run.env"), ALLOW_CPU="true")
    assert result.status == 0, result.err
    return record_of(case.folder / "out")


@pytest.mark.parametrize("how", ["docker", "file"])
def test_69_quotes_of_an_env_file_are_no_part_of_the_values(case, how):
    quoted = case(69)
    record = trained_as(quoted, how)
    given = record["settings"]
    assert (given["MODEL_ID"], given["DATASET"], given["LEARNING_RATE"]) == ("./model", ["./train.jsonl"], 2e-4)
    assert not given.get("PUSH_TO_HUB") and not given.get("HUB_MODEL_ID")
    assert not [path for path in quoted.folder.rglob("*") if '"' in path.name or "'" in path.name]


@pytest.mark.parametrize("how", ["docker", "file"])
def test_70_a_comment_behind_a_value_is_no_part_of_it(case, how):
    record = trained_as(case(70), how)
    assert (record["settings"]["DATASET"], record["steps"]) == (["./train.jsonl"], 4)
    assert record["settings"]["LEARNING_RATE"] == 2e-4


def test_70_a_hash_without_a_blank_before_it_stays(case):
    hashed = case(70)
    assert hashed.train(DATASET="./train.jsonl", OUTPUT_DIR="./out#1", MAX_STEPS=1).status == 0
    assert (hashed.folder / "out#1/run.json").is_file()


@pytest.mark.parametrize(
    ("env_file", "expected"), [("exported.env", '"PER_DEVICE_TRAIN_BATCH_SIZE": 1'), ("spaced.env", '"LORA_R": 8')]
)
def test_70_lines_that_docker_refuses_are_read_here(case, env_file, expected):
    shell = case(70)
    result = shell.run("config", "--env-file", shell.env_file(env_file))
    assert result.status == 0, result.err
    assert expected in result.out and '"MAX_STEPS": 4' in result.out


def test_71_wandb_without_a_key_is_refused(case):
    tracked = case(71)
    said = tracked.refused(3, NETRC=tracked.folder / "none", **tracked.settings_of("run.env"))
    assert "WANDB_API_KEY" in said


def test_71_a_key_alone_starts_no_tracking(case, monkeypatch):
    untracked = case(71)
    called = []

    def connect(_, address):
        called.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", connect)
    untracked.trained(**untracked.settings_of("key-without-asking.env"))
    assert not called
    assert not list(untracked.folder.rglob("wandb"))


def test_72_two_processes_with_one_seed_give_one_adapter(case):
    seeded = case(0)
    usual = {"MODEL_ID": "./model", "DATASET": "./train.jsonl", "ALLOW_CPU": "true", "MAX_STEPS": 2}
    for name, hash_seed in (("first", 1), ("second", 2)):
        done = started("train", folder=seeded.folder, OUTPUT_DIR=name, PYTHONHASHSEED=hash_seed, **usual)
        assert done.returncode == 0, done.stderr
    for file in (WEIGHTS, "adapter/adapter_config.json"):
        assert (seeded.folder / "first" / file).read_bytes() == (seeded.folder / "second" / file).read_bytes()
    record = record_of(seeded.folder / "first")
    assert record["settings"]["SEED"] == 42 and record["data_sha256"]["DATASET"] and record["versions"]["torch"]
