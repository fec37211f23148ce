"""A tiny model built here, without any download, and the command line as a user starts it."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests import fuzzing
from train.__main__ import main
from train.settings_text import SETTINGS

torch.set_num_threads(1)  # the tiny models are slower on several
ROOT = Path(__file__).parents[1]
WEIGHTS = "adapter/adapter_model.safetensors"  # in OUTPUT_DIR
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
QUESTIONS = [
    ("Name a fruit.", "A plum."),
    ("Name a tree.", "An oak stands tall."),
    ("Name a colour.", "Red, like a rose."),
]


@dataclass
class Result:
    """What a command left: exit status and its two outputs."""

    status: int
    out: str
    err: str


def build_tokenizer(chat_template: str | None = CHAT_TEMPLATE, **special: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with <|bos|>, <|start|>, <|end|> and <|eos|>, and no pad token unless given."""
    tokens = ["<|bos|>", "<|start|>", "<|end|>", "<|eos|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=tokens, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([q + " " + a for q, a in QUESTIONS], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"bos_token": "<|bos|>", "eos_token": "<|end|>", **special}
    )
    wrapped.chat_template = chat_template
    return wrapped


def pytest_configure() -> None:
    """`make test-gpu` is not to pass on a machine without one."""
    if os.environ.get("REQUIRE_GPU") and not torch.cuda.is_available():
        pytest.exit("there is no GPU to be seen", returncode=3)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama of 64 wide and its chat tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    architecture = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        initializer_range=0.1,
        dtype="bfloat16",
    )
    LlamaForCausalLM(architecture).to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # a container may have another user
    return folder


@pytest.fixture
def own_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "own-model"))


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-four instruction rows in a JSONL file."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"instruction": f"{q} {n}", "output": a}) + "\n" for n in range(8) for q, a in QUESTIONS)
    )
    return file


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests' rows stay out of the user's cache."""
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts in an empty folder, without settings, and leaves the environment as it was."""
    before = dict(os.environ)
    for name in SETTINGS:
        os.environ.pop(name, None)
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command line with settings as environment variables."""

    def run(*arguments: str, **settings: Any) -> Result:
        os.environ.update({name: str(value) for name, value in settings.items()})
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as leaving:  # argparse
            status = int(leaving.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture
def fuzz(
    run: Callable[..., Result],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[fuzzing.Fuzz]:
    """The command line on many examples; the invariant is checked on each."""
    with capsys.disabled():
        trace = os.dup(2)  # the real one, for the trace of a hang
    yield fuzzing.Fuzz(run, tmp_path, request.node.name, monkeypatch, trace)
    os.close(trace)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much was tried."""
    for test, count in fuzzing.COUNTS.items():
        terminalreporter.write_line(f"fuzzed: {count:,} examples of {test}")


@pytest.fixture
def train(run: Callable[..., Result], tiny_model: Path, rows: Path, tmp_path: Path) -> Callable[..., Result]:
    """Train the tiny model on the rows; settings given stand above these."""

    def train(**settings: Any) -> Result:
        usual = {
            "MODEL_ID": tiny_model,
            "DATASET": rows,
            "OUTPUT_DIR": tmp_path / "out",
            "ALLOW_CPU": "true",
            "EFFECTIVE_BATCH_SIZE": 8,
            "LOGGING_STEPS": 1,
            "LEARNING_RATE": 1e-2,
        }
        for name in SETTINGS:
            os.environ.pop(name, None)
        return run("train", **{**usual, **settings})

    return train


def record_of(output: Path) -> dict[str, Any]:
    """The run's record."""
    return json.loads((output / "run.json").read_text())
