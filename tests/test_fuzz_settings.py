"""Random settings, through the environment and through env files: told what is wrong, or taken as they are written."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import SECRET, Fuzz, examples, seldom
from train.environment import SECRET_FILES
from train.settings_text import SETTINGS

Draw = Callable[..., Any]

ODD = [
    "\x1b[31mred",
    "\x07",
    "\x85",
    "\x9b31m",
    "\u202e",
    "'",
    '"',
    '"a',
    "a'",
    "#",
    " #",
    "$",
    "${HOME}",
    "\\",
    "\\n",
    "=",
]
ODD_NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "-0",
    "0",
    "1e400",
    "1e-400",
    "9" * 400,
    "9" * 5000,
    "0x10",
    "1_0",
    "٣",
    "1.0",
]
# An OS passes any bytes but NUL; Python shows those that are no UTF-8 as surrogates.
passable = st.one_of(
    st.sampled_from(
        [*ODD, *ODD_NUMBERS, "", " ", ",", ",,a,", "a,b", "x" * 300, "x" * 5000, "~", "~/a", "~x/a", "[]", "null"]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    st.lists(st.sampled_from(ODD), max_size=4).map("".join),
    st.binary(max_size=12).map(lambda given: os.fsdecode(given.replace(b"\0", b""))),
)
odd_numbers = st.one_of(st.integers(), st.floats(), st.sampled_from(ODD_NUMBERS)).map(str)
PIECES = ["a", "b", "_", "/", ".", " ", " #", "'", '"', "$", "${a}", "\\", "\\n", "{}", "\n", "\t", "é"]


def right(annotation: Any) -> Any:
    """Values of a setting's type, or nearly."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else ()
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is list:
        return st.lists(right(kinds[0]), max_size=3).map(",".join)
    if kinds:  # X | None, Annotated
        return right(kinds[0])
    words = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
    usual = {bool: ["true", "false", "1", "no"], int: ["8", "16", "64", "8 # c"], float: ["0.5", "1e-3", "0.0625"]}
    return seldom(st.sampled_from(usual[annotation]), odd_numbers) if annotation in usual else words


@st.composite
def slips(draw: Draw) -> str:
    """A setting's name with a letter more, less, other, or swapped; or in other case."""
    name = draw(st.sampled_from(list(SETTINGS)))
    at, letter = draw(st.integers(0, len(name) - 1)), draw(st.sampled_from("AXx_1é\x1b\udce9"))
    return str(
        draw(
            st.sampled_from(
                [name[:at] + letter + name[at:], name[:at] + name[at + 1 :], name[:at] + letter + name[at + 1 :]]
                + [name[:at] + name[at : at + 2][::-1] + name[at + 2 :], name.lower(), name + "S"]
            )
        )
    )


def value(name: str) -> Any:
    """A value for the setting, right more often than not."""
    if name in SECRET_FILES or name not in SETTINGS:
        return passable
    if name in ("HF_TOKEN", "WANDB_API_KEY"):
        return seldom(st.just(SECRET), passable.map(lambda odd: odd and f"{SECRET} {odd}"), of=4)
    return seldom(right(SETTINGS[name].annotation), passable)


foreign = ["HF_HOME", "WANDB_PROJECT", "TZ", "PLUM", "é", "\x1b", "a b", "HF_\x1b", "RANK", "LOGLEVEL"]
secret = ["HF_TOKEN", "WANDB_API_KEY"]
common = st.sampled_from(list(SETTINGS))
names = st.one_of(common, common, common, st.sampled_from(secret + SECRET_FILES + foreign))
pairs = seldom(names, slips().filter(bool), of=30).flatmap(lambda name: st.tuples(st.just(name), value(name)))
environments = st.lists(pairs, max_size=8).map(dict)


USUAL = ["{0}={1}", "{0}='{1}'", '{0}="{1}"', "export {0}={1} # c"]
FORMS = ["{0}", "{0}=", "={1}", "'{0}'={1}", "{0} = {1}", "{0}='{1}", '{0}="\\{1}"', "{0}=${{{0}}}", "{0}=${{A:-{1}}}"]
FORMS += ["{0}=a\0", "{0}=\0{1}", "{0}:{1}", "{0}={0}\n{1}"]


@st.composite
def env_files(draw: Draw) -> bytes:
    """Lines of NAME=value as people, Docker and Windows write them; seldom whatever bytes."""
    lines = []
    for name, content in draw(st.lists(pairs, max_size=8)):
        form = draw(seldom(st.sampled_from(USUAL), st.sampled_from(FORMS), of=5))
        line = form.format(name, content).encode(errors="surrogateescape")
        lines.append(draw(seldom(st.just(line), st.binary(max_size=10), of=30)))
    text = draw(st.sampled_from([b"\n", b"\r\n", b"\r"])).join(lines)
    text = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"# c\n"])) + text
    utf16 = st.just(text.decode(errors="replace").encode("utf-16"))
    return bytes(draw(seldom(st.just(text), st.one_of(utf16, st.binary(max_size=30)))))


@examples(300)
@given(environment=environments, style=st.sampled_from(["json", "env", "markdown"]))
def test_any_environment_is_taken_or_refused(fuzz: Fuzz, environment, style):
    fuzz.folder()
    fuzz("config", "--format", style, **environment)


@examples(200)
@given(environment=environments)
def test_any_settings_in_force_read_back_the_same(fuzz: Fuzz, environment):
    fuzz.folder()
    environment = {name: value for name, value in environment.items() if name in SETTINGS and SECRET not in value}
    first = fuzz("config", **environment)
    if first.status == 0:
        Path("again.env").write_text(fuzz("config", "--format", "env", **environment).out)
        assert json.loads(fuzz("config", "--env-file", "again.env").out) == json.loads(first.out)


@examples(400)
@given(environment=seldom(st.just({}), environments), written=env_files(), named=st.booleans())
def test_any_env_file_is_taken_or_refused(fuzz: Fuzz, environment, written, named):
    file = fuzz.folder() / ("other.env" if named else ".env")
    file.write_bytes(written)
    fuzz("config", *(["--env-file", file.name] if named else []), **environment)


@examples(50)
@given(name=passable)
def test_any_name_of_an_env_file_is_taken_or_refused(fuzz: Fuzz, name):
    fuzz.folder()
    fuzz("config", f"--env-file={name}")
