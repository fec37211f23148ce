"""Faults that people reported, each with its files: LOG.md beside the files says what is right. Here: how they are run."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl import SFTTrainer

from tests.conftest import ROOT, Result, record_of
from train.settings_text import SETTINGS

CASES = Path(os.environ.get("CASES", ROOT.parent / "shared/cases"))
# What the cases' env files call our settings.
NAMES = {
    "MODEL": "MODEL_ID",
    "LORA_TARGETS": "TARGET_MODULES",
    "BATCH_SIZE": "PER_DEVICE_TRAIN_BATCH_SIZE",
    "GRAD_ACCUM": "GRADIENT_ACCUMULATION_STEPS",
    "NUM_EPOCHS": "NUM_TRAIN_EPOCHS",
    "HUB_REPO": "HUB_MODEL_ID",
}
NOT_YET = {"PUSH_TO_HUB", "HUB_MODEL_ID"} - set(SETTINGS)


@dataclass
class ReadRow:
    """A row as the model was given it: its tokens, its text, and the stretches of text that are learned."""

    ids: list[int]
    text: str
    learned: list[str]


class Case:
    """The input files of one reported fault, copied into the working folder, and the command line on them."""

    def __init__(self, folder: Path, run: Callable[..., Result]):
        self.folder, self.run = folder, run
        self.rows: list[ReadRow] = []  # of the last training, in its order

    def env_file(self, name: str) -> str:
        """The case's env file with our settings' names, line by line as it stands."""
        lines = (self.folder / name).read_text().splitlines()
        ours = [re.sub(r"\w+(?=\s*=)", lambda found: NAMES.get(found[0], found[0]), line, count=1) for line in lines]
        kept = [line for line in ours if line.partition("=")[0] not in NOT_YET]
        (self.folder / f"our-{name}").write_text("\n".join(kept) + "\n")
        return f"our-{name}"

    def settings_of(self, env_file: str) -> dict[str, str]:
        """What `docker run --env-file` makes of it: values as they stand, quotes and comments and all."""
        lines = (self.folder / self.env_file(env_file)).read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))

    def train(self, **settings: Any) -> Result:
        """Train into an empty `out`."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        self.rows.clear()
        for name in SETTINGS:
            os.environ.pop(name, None)
        usual = {"MODEL_ID": "./model", "OUTPUT_DIR": "./out", "ALLOW_CPU": "true", "LOGGING_STEPS": 1}
        return self.run("train", **{**usual, **settings})

    def trained(self, **settings: Any) -> tuple[dict[str, Any], str]:
        """The record of a training that must end well, and what was said before its first step."""
        result = self.train(**settings)
        assert result.status == 0, result.err
        return record_of(self.folder / "out"), result.err.partition("step 1/")[0]

    def refused(self, status: int = 2, **settings: Any) -> str:
        """What a training says that must be refused before weights load: there are none, and that is not the reason."""
        (self.folder / "model/model.safetensors").unlink(missing_ok=True)
        result = self.train(**settings)
        assert result.status == status, result.err
        assert "Traceback" not in result.err
        _, *said = re.split("^error: ", result.err, flags=re.MULTILINE)
        assert len(said) == 1, result.err
        return said[0]


def names_row(said: str, number: int) -> bool:
    """Whether a message names the row, alone or in a list."""
    return re.search(rf"\brows? (\d+(, | and ))*{number}\b", said) is not None


def answer_in(learned: str) -> str:
    """The answer in a learned stretch: without line breaks around it, and without its end, which must be there."""
    ended = re.fullmatch(r"\s*(.*?)\s*(<\|im_end\|>|</s>)+\s*", learned, re.DOTALL)
    assert ended, f"{learned!r} is learned without an end"
    return ended[1]


@pytest.fixture
def case(run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Case]:
    """Lays a case out by its number; model and rows that it has not are the common ones."""
    if not CASES.is_dir():
        pytest.skip(f"there is no folder {CASES}; CASES=… names the folder of the reported cases")

    def lay_out(number: int) -> Case:
        folder = tmp_path / "case"
        folder.mkdir()
        sources = [CASES / "00-common", *CASES.glob(f"{number:02}-*")]
        for path in {path.name: path for source in sources for path in source.iterdir()}.values():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # where it comes from it may be read-only
        monkeypatch.chdir(folder)
        return _noting_rows(Case(folder, run), monkeypatch)

    return lay_out


def _noting_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Note what the model is really given to read and learn, whatever made it."""
    compute_loss = SFTTrainer.compute_loss

    def noting(trainer: SFTTrainer, model: Any, inputs: dict[str, Any], *arguments: Any, **rest: Any) -> Any:
        if model.training:
            decode = AutoTokenizer.from_pretrained("./model").decode
            for row in zip(*(inputs[name].tolist() for name in ("input_ids", "labels", "attention_mask")), strict=True):
                pairs = [(token, label >= 0) for token, label, real in zip(*row, strict=True) if real]
                stretches = [
                    [token for token, _ in group] for learned, group in groupby(pairs, lambda p: p[1]) if learned
                ]
                ids = [token for token, _ in pairs]
                case.rows.append(ReadRow(ids, decode(ids), [decode(stretch) for stretch in stretches]))
        return compute_loss(trainer, model, inputs, *arguments, **rest)

    monkeypatch.setattr(SFTTrainer, "compute_loss", noting)
    return case
