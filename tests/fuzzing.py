"""What must hold of the command line whatever it is given, and how long it is tried: `make test` briefly, `make fuzz`."""

import faulthandler
import itertools
import os
import shutil
import signal
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from hypothesis import HealthCheck, configuration, database, settings
from hypothesis import strategies as st

import train.__main__
from train import console

LONGEST = 30  # seconds of one example
ROOT = Path(__file__).parents[1]
COUNTS: Counter[str] = Counter()  # examples of each test, for the summary
SECRET = "hf_plumplumplum"  # the beginning of every secret that is given; it must never be printed

configuration.set_hypothesis_home_dir(ROOT / ".cache/hypothesis")
COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": False,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}
# The same examples each time where a failure would hold somebody up; new ones, and failures kept, where it is wanted.
settings.register_profile("ci", derandomize=True, database=None, **COMMON)
settings.register_profile(
    "long", database=database.DirectoryBasedExampleDatabase(ROOT / ".cache/hypothesis/examples"), **COMMON
)
PROFILE = os.environ.get("FUZZ", "ci")
settings.load_profile(PROFILE)


def examples(count: int) -> settings:
    """`count` examples in CI, and many times more in a long run."""
    return settings(max_examples=count * (10 if PROFILE == "long" else 1))


def seldom(usual: Any, odd: Any, of: int = 10) -> Any:
    """`usual`, and once in a while `odd`: what is wrong everywhere is refused at its first byte."""
    return st.sampled_from([usual] * (of - 1) + [odd]).flatmap(lambda chosen: chosen)


class Hang(BaseException):
    """An example took too long; no `except Exception` on the way stops it."""


class Fuzz:
    """Runs the command line on one example after another, each in a folder of its own, and checks what must hold."""

    def __init__(self, run: Callable[..., Any], folder: Path, test: str, monkeypatch: pytest.MonkeyPatch, trace: int):
        self.run, self.parent, self.test, self.trace = run, folder, test, trace
        self.numbers = itertools.count()
        self.environment = dict(os.environ)
        # An error that nobody foresaw comes up here as it is: it shows where, and Hypothesis tells one from another.
        monkeypatch.setattr(train.__main__, "_unforeseen", self._as_it_is)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        self.set_cache = lambda place: monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place)

    @staticmethod
    def _as_it_is(error: Exception) -> int:
        raise error

    def folder(self) -> Path:
        """A new and empty working directory, without what the last example left."""
        shutil.rmtree(self.parent / "example", ignore_errors=True)
        # The libraries know a file by its path and time: no two examples share a path.
        folder = self.parent / "example" / str(next(self.numbers))
        folder.mkdir(parents=True)
        os.chdir(folder)
        self.set_cache(folder.parent / "cache")
        COUNTS[self.test] += 1
        return folder

    def __call__(self, *arguments: str, **given: str) -> Any:
        """Run with these settings.

        Raises:
            AssertionError: one of the things that must hold does not.
        """
        os.environ.clear()
        os.environ.update(self.environment)
        console._secrets.clear()  # those of the last example
        hung = []

        def stop(*_: Any) -> None:
            hung.append(True)
            raise Hang

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, LONGEST, 1)  # again and again: a callback can swallow one
        # Where native code hangs no Python handler is called: this ends the whole run and says where it was.
        faulthandler.dump_traceback_later(4 * LONGEST, exit=True, file=self.trace)
        try:
            result = self.run(*arguments, **given)
        except Hang:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()
        assert not hung, f"not done after {LONGEST} seconds"
        said = result.out + result.err
        assert result.status in (0, 2, 3), f"exit status {result.status}: {said}"
        assert "Traceback" not in said
        if result.status:
            assert "error: " in result.err and "fix: " in result.err, said
        hidden = {c for c in said if c != "\n" and unicodedata.category(c) in ("Cc", "Cs")}
        assert not hidden, f"{hidden} is printed: {said!r}"
        assert SECRET not in said
        return result
