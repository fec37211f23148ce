"""The demo, on a real model: the habit is in the tuned answers, absent from the base's, and content survives."""

import os
import subprocess
import sys

import pytest
from dotenv import dotenv_values

from tests.conftest import ROOT, record_of
from train import answers
from train.config import Config
from train.settings_text import SETTINGS

HELD_OUT = {
    "Why is the sky blue?": ("light", "scatter", "atmosphere"),
    "What does the heart do?": ("blood",),
    "What is a library for?": ("book", "read", "information", "knowledge"),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's adapter, trained once, and its output folder."""
    assert (ROOT / ".cache/SmolLM2-135M-Instruct").is_dir(), "use make test, which unpacks the demo's model"
    output = tmp_path_factory.mktemp("demo")
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS} | {"OUTPUT_DIR": str(output)}
    command = [sys.executable, "-m", "train", "train", "--env-file", "demo/demo.env"]
    subprocess.run(command, check=True, cwd=ROOT, env=clean)
    return output


@pytest.fixture(scope="module")
def answered(demo):
    """Prompt, the base's answer and the tuned one."""
    config = Config(_env_file=None, ALLOW_CPU=True, MODEL_ID=str(ROOT / ".cache/SmolLM2-135M-Instruct"))
    return list(answers.generate(config, str(demo / "adapter"), list(HELD_OUT), 48, compare=True))


def test_the_loss_falls(demo):
    run = record_of(demo)
    assert run["last_loss"] < 0.75 * run["first_loss"]
    assert run["train_rows"]["used"] >= 100


def test_the_habit_is_learned_and_the_base_has_it_not(answered):
    assert all(tuned.startswith("In brief:") for _, _, tuned in answered)
    assert not any("in brief" in base.lower() for _, base, _ in answered)


def test_answers_stop_by_themselves_and_keep_their_content(answered):
    for prompt, _, tuned in answered:
        assert tuned.endswith("."), tuned
        assert any(word in tuned.lower() for word in HELD_OUT[prompt]), tuned


def test_held_out_prompts_are_those_that_make_demo_shows_and_not_in_the_training_rows():
    makefile = (ROOT / "Makefile").read_text()
    rows = (ROOT / dotenv_values(ROOT / "demo/demo.env")["DATASET"]).read_text()
    for prompt in HELD_OUT:
        assert f'"{prompt}"' in makefile
        assert prompt not in rows
