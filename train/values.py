"""The kinds of values that settings have, and how text becomes one."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "lion_8bit",
    "paged_lion_8bit",
    "ademamix_8bit",
    "paged_ademamix_8bit",
    "adafactor",
    "sgd",
]
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "constant",
    "constant_with_warmup",
]
Tracker = Literal["none", "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "clearml"]

# Never meant, and nothing that a file name, a terminal or an env file takes well. A text may have lines and tabs.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# How Python holds the bytes of an environment variable that are no UTF-8.
SURROGATE = re.compile("[\ud800-\udfff]")


def printable(value: Any) -> Any:
    """The value, unless it is a text that no one writes on purpose."""
    if isinstance(value, str) and (found := CONTROL.search(value)):
        raise ValueError(f"holds the control character U+{ord(found[0]):04X}")
    if isinstance(value, str) and SURROGATE.search(value):
        raise ValueError("is not UTF-8 text")
    return value


def _split_at_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _expand_home(value: str) -> str:
    try:
        return str(Path(value).expanduser()) if re.match("~(/|$)", value) else value
    except RuntimeError as error:  # a container's user may have none
        raise ValueError("has ~, but this user has no home folder; write the folder's path") from error


def _line_breaks(value: str) -> str:
    return value.replace("\\n", "\n")  # an env file of docker's has no other way to write one


def _one_word(value: SecretStr) -> SecretStr:
    if re.search(r"\s", value.get_secret_value()):
        raise ValueError("has blanks inside; a comment after it is not allowed")
    return value


def _some_training(value: Any) -> Any:
    if re.fullmatch(r"0+(\.0*)?", str(value).strip()):
        raise ValueError("nothing to train")
    return value


_COMMAS = (NoDecode, BeforeValidator(_split_at_commas))
Place = Annotated[str, AfterValidator(_expand_home)]  # a path, or a name on the Hub
Places = Annotated[list[Place], *_COMMAS]
Names = Annotated[list[str], *_COMMAS]
Trackers = Annotated[list[Tracker], *_COMMAS]
Weights = Annotated[list[Annotated[float, Field(gt=0)]], *_COMMAS]
Prose = Annotated[str, AfterValidator(_line_breaks)]
Secret = Annotated[SecretStr, AfterValidator(_one_word)]
Length = BeforeValidator(_some_training)  # of training, in epochs or steps
