"""Settings as text: what each allows, README's table, `env.example`, and the values in force with secrets masked."""

import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from train.config import Config
from train.console import MASK

SETTINGS: dict[str, FieldInfo] = {name.upper(): field for name, field in Config.model_fields.items()}


def is_secret(name: str) -> bool:
    """Whether the setting's value must never be shown."""
    return _kind(SETTINGS[name].annotation) == "secret"


def allowed(name: str) -> str:
    """What a setting may be, in words."""
    field = SETTINGS[name]
    limits = [
        f"{word} {getattr(limit, key)}"
        for limit in field.metadata
        for kind, key, word in (
            (annotated_types.Ge, "ge", "at least"),
            (annotated_types.Gt, "gt", "above"),
            (annotated_types.Lt, "lt", "below"),
            (annotated_types.Le, "le", "at most"),
        )
        if isinstance(limit, kind)
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        if get_origin(item) is Literal:
            return f"comma-separated names: {_kind(item)}"
        return "comma-separated " + ("names" if _kind(item) == "text" else "numbers, each above 0")
    names = {bool: "true | false", int: "whole number", float: "number", str: "text", SecretStr: "secret"}
    return names[annotation]


def _as_env(value: Any) -> str:
    """A value as it is written after NAME=."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)


def _quoted(text: str) -> str:
    """The text in quotes, as python-dotenv reads it back: `${` it would take for a variable, so a default says the $."""
    for meant, put in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\t", r"\t"), ("${", "${:-$}{")):
        text = text.replace(meant, put)
    return f'"{text}"'


def resolved(config: Config) -> dict[str, Any]:
    """Setting name to value in force, secrets masked; JSON-serialisable."""
    values = {name.upper(): value for name, value in config.model_dump().items()}
    return {name: MASK if isinstance(value, SecretStr) else value for name, value in values.items()}


def as_json(config: Config) -> str:
    """The values in force as JSON."""
    return json.dumps(resolved(config), indent=2)


def as_markdown() -> str:
    """README's settings table: every setting with default and meaning."""
    lines = []
    for group, names in _groups():
        lines += [f"**{group}**", "", "| setting | default | allowed | meaning |", "|---|---|---|---|"]
        for name in names:
            default = _as_env(SETTINGS[name].default)
            cells = (f"`{name}`", f"`{default}`" if default else "", allowed(name), SETTINGS[name].description or "")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def as_env(config: Config) -> str:
    """An env file of the values in force: what differs from the defaults set, the rest as comments.

    Of the defaults this is `env.example`.
    """
    lines = ["# Settings of one run: copy to .env and take the # off what you change."]
    for group, names in _groups():
        lines += ["", f"## {group}"]
        for name in names:
            value, default = getattr(config, name.lower()), SETTINGS[name].default
            written = "" if is_secret(name) else _as_env(value)
            quoted = _quoted(written) if re.search(r"""[\s#'"$]""", written) else written
            lines += ["", f"# {SETTINGS[name].description} ({allowed(name)})"]
            lines.append(f"{'#' if value == default or is_secret(name) else ''}{name}={quoted}")
    return "\n".join(lines) + "\n"


def _groups() -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name, field in SETTINGS.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        groups.setdefault(str(extra["group"]), []).append(name)
    yield from groups.items()
