"""Settings from the process environment and an env file into a `Config`, every mistake reported at once.

Order: process environment, then the env file, then defaults. Names one slip away from a setting are refused, and so
is a name in the env file that is nobody's: a setting that silently does nothing costs a whole run.
"""

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from os.path import commonprefix
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic import ValidationError

from train.config import Config
from train.console import Refusal, conceal
from train.settings_text import SETTINGS, allowed, is_secret

# Names that other programs own; an env file may carry them, and they keep their meaning.
ECOSYSTEM = re.compile(
    r"BNB_(?!4BIT_)\w+|(HF|HUGGINGFACE|TRANSFORMERS|DATASETS|TOKENIZERS|ACCELERATE|BITSANDBYTES|WANDB|TRACKIO"
    r"|TENSORBOARD|MLFLOW|COMET|CLEARML|SWANLAB|CUDA|NVIDIA|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON"
    r"|OMP|MKL|OPENBLAS|MASTER|PET|SLURM|LC|XDG)_\w+|PYTHON\w+|(LOCAL_|NODE_)?RANK|WORLD_SIZE|HOME|PATH|LD_LIBRARY_PATH|TMPDIR|TZ|LANG"
    r"|(HTTPS?|NO|ALL|https?|no|all)_(PROXY|proxy)|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
)
# Another program's name that is one slip away from a setting.
FALSE_FRIENDS = {"LOGLEVEL"}
# Settings in which a # or a quote may mean itself.
PROSE = {"PROMPT_TEMPLATE", "SYSTEM_PROMPT"}
SECRETS = [name for name in SETTINGS if is_secret(name)]
SECRET_FILES = [f"{name}_FILE" for name in SECRETS]
ENCODING = "utf-8-sig"  # Windows editors put a byte order mark first.


def read_config(env_file: str | None = None) -> Config:
    """The settings in force; the env file's names for other libraries are handed on to them.

    Args:
        env_file: a file of NAME=value lines; None reads `.env` in the working directory where there is one.

    Raises:
        Refusal: names every mistake, what was given and what is allowed.
    """
    path = Path(env_file or ".env")
    there = _is_file(path)
    if env_file and not there:
        raise Refusal(f"there is no env file {env_file}", "name a file of NAME=value lines, or leave --env-file out")
    mistakes = list(_broken_lines(path)) if there else []
    readable = there and not mistakes
    from_file = (
        {name: value or "" for name, value in dotenv_values(path, encoding=ENCODING).items()} if readable else {}
    )
    mistakes += _tidy_environment()
    given = {**from_file, **{name: value for name, value in os.environ.items() if value}}
    mistakes += _wrong_names(from_file)
    try:
        secrets = _secrets_from_files(given, mistakes)
        config = Config(_env_file=path if readable else None, _env_file_encoding=ENCODING, **secrets)  # type: ignore
    except ValidationError as error:
        mistakes += _explain(error, given)
    if mistakes:
        count = "1 setting is" if len(mistakes) == 1 else f"{len(mistakes)} settings are"
        raise Refusal(f"{count} wrong:\n  " + "\n  ".join(mistakes), "change what is named above and start again")
    for name, value in from_file.items():
        if name not in SETTINGS and value:
            os.environ.setdefault(name, value)
    for name in SECRETS:  # The libraries look for these in the environment.
        if secret := getattr(config, name.lower()):
            os.environ[name] = secret.get_secret_value()
            conceal(secret.get_secret_value())
    return config


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for the file system
        return False


def _tidy_environment() -> Iterator[str]:
    """Make the settings' values what a shell would have made of them, and name those where that is a guess.

    `docker run --env-file` keeps quotes, comments, carriage returns and trailing blanks; python-dotenv does not, so
    the values of an env file are left as they are.
    """
    for name in [*SETTINGS, *SECRET_FILES]:
        value = os.environ.get(name, "").strip()
        if quoted := re.fullmatch(r"""(["'])(.*)\1(\s+#.*)?""", value):
            value = quoted[2].strip()
        elif name not in PROSE:
            value = value if name in SECRETS else re.sub(r"\s+#.*", "", value)
            if value[:1] in ("'", '"') or value[-1:] in ("'", '"'):
                shown = "a secret" if name in SECRETS else value
                yield f"{name} is {shown}: has a quote without its partner"
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def _broken_lines(path: Path) -> Iterator[str]:
    """Lines that python-dotenv would skip with a mere log line."""
    try:
        with path.open(encoding=ENCODING) as stream:
            for binding in parse_stream(stream):
                # The environment, where names of other programs go, holds no NUL.
                if binding.error or (binding.key and binding.value is None) or "\0" in binding.original.string:
                    yield f"{path}, line {binding.original.line}: is not NAME=value"
    except (OSError, UnicodeDecodeError) as error:
        yield f"{path}: cannot be read as UTF-8 text ({error.__class__.__name__})"


def _wrong_names(from_file: Mapping[str, str]) -> Iterator[str]:
    """Names that look like a slip, and env file names that no program reads."""
    known = [*SETTINGS, *SECRET_FILES]
    for name in sorted({*os.environ, *from_file}):
        if name in known or name in FALSE_FRIENDS:
            continue
        if slips := [right for right in known if _one_slip(name.upper(), right)]:
            yield f"{name}: is not a setting; did you mean {slips[0]}?"
        elif name in from_file and not ECOSYSTEM.fullmatch(name):
            near = get_close_matches(name.upper(), known, n=1, cutoff=0.5)
            yield f"{name}: is not a setting" + (f"; did you mean {near[0]}?" if near else "")


def _one_slip(name: str, right: str) -> bool:
    """Whether one letter more, less, other or swapped makes `name` the setting `right` (or only its case is wrong)."""
    if min(len(name), len(right)) < 6:
        return name == right
    start = len(commonprefix([name, right]))
    rest_a, rest_b = name[start:], right[start:]
    end = len(commonprefix([rest_a[::-1], rest_b[::-1]]))
    rest_a, rest_b = rest_a[: len(rest_a) - end], rest_b[: len(rest_b) - end]
    swapped = len(rest_a) == 2 and rest_a == rest_b[::-1]
    return swapped or (len(rest_a) <= 1 and len(rest_b) <= 1)


def _secrets_from_files(given: Mapping[str, str], mistakes: list[str]) -> dict[str, str]:
    """Secrets that come as NAME_FILE, the path of a file that holds the value."""
    secrets = {}
    for name in SECRETS:
        path = given.get(f"{name}_FILE")
        if not path:
            continue
        if given.get(name):
            mistakes.append(f"{name} and {name}_FILE are both given: leave one out")
            continue
        try:
            secrets[name] = Path(path).read_text(encoding=ENCODING).strip()
        except (OSError, UnicodeDecodeError) as error:
            # Not the value: someone may have put the secret itself there.
            mistakes.append(f"{name}_FILE: the file it names cannot be read ({error.__class__.__name__})")
    return secrets


def _explain(error: ValidationError, given: Mapping[str, str]) -> Iterator[str]:
    """Each mistake with the variable's name, what was given and what is allowed."""
    seen = set()
    for mistake in error.errors(include_url=False, include_input=False):
        if not mistake["loc"]:
            yield from mistake["msg"].removeprefix("Value error, ").split("\n")
            continue
        name = str(mistake["loc"][0])
        if name in seen:  # One list can hold several wrong items.
            continue
        seen.add(name)
        value = "a secret" if is_secret(name) else f'"{given.get(name, "")}"'
        reason = mistake["msg"].removeprefix("Value error, ") + "; " if mistake["type"] == "value_error" else ""
        yield f"{name} is {value}: {reason}allowed: {allowed(name)}"
