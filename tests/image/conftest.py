"""The image as `docker run` starts it, on a real engine. Nothing here is skipped: without an engine the tests fail."""

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

DOCKER = os.environ.get("DOCKER", "docker")
IMAGE = os.environ.get("IMAGE", "qlora-train:cuda13.0")
# Whose the host's folders are: another user's where the tests may give files away, else our own.
OWNER = 4321 if os.getuid() == 0 else os.getuid()


def docker(*arguments: Any, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the engine's client; its output as text."""
    command = [DOCKER, *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0 or not check, done.stderr
    return done


def layers(image: str) -> list[str]:
    """Digests of an image's layers, the base's first."""
    return json.loads(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", image).stdout)


def owned(folder: Path) -> Path:
    """A folder of OWNER's."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        os.chown(folder, OWNER, OWNER)
    return folder


@dataclass
class Container:
    """Arguments of `docker run` for one training on the tiny model, with host folders for /outputs and /cache."""

    model: Path
    rows: Path
    outputs: Path
    cache: Path
    options: list[str] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")

    def arguments(self, *verb: str, **settings: Any) -> list[str]:
        """What follows `docker run`."""
        usual = {"MODEL_ID": "/model", "DATASET": "/rows.jsonl", "ALLOW_CPU": 1, "EFFECTIVE_BATCH_SIZE": 8}
        volumes = {self.model: "/model:ro", self.rows: "/rows.jsonl:ro", self.outputs: "/outputs", self.cache: "/cache"}
        return [
            *("--name", self.name, *self.options),
            *(part for source, target in volumes.items() for part in ("--volume", f"{source}:{target}")),
            *(part for name, value in {**usual, **settings}.items() for part in ("--env", f"{name}={value}")),
            *(IMAGE, *verb),
        ]

    def run(self, *verb: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end."""
        return docker("run", "--rm", *self.arguments(*verb, **settings), check=False)

    def wait_for(self, said: str, seconds: float = 120) -> None:
        """Wait until the container started in the background has said something."""
        deadline = time.monotonic() + seconds
        while said not in docker("logs", self.name).stderr:
            assert time.monotonic() < deadline, docker("logs", self.name).stderr
            time.sleep(0.2)


@pytest.fixture
def container(tmp_path: Path, tiny_model: Path, rows: Path) -> Iterator[Callable[..., Container]]:
    """Make containers whose host folders belong to OWNER; what is left of them is removed."""
    made: list[Container] = []

    def container(*options: str) -> Container:
        folders = [owned(tmp_path / name) for name in ("outputs", "cache")]
        for readable in (*tmp_path.parents, tiny_model, *tiny_model.parents, *rows.parents):
            if readable.owner() == Path.home().owner() and "pytest" in str(readable):
                readable.chmod(0o755)
        made.append(Container(tiny_model, rows, *folders, options=list(options)))
        return made[-1]

    yield container
    for left in made:
        docker("rm", "--force", left.name, check=False)
