"""Invalid recipes, members, declarations and files of recipes."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.misuse.sentences import refuses

import recollect as rc
from recollect.recipe.toml_text import read_toml

HUGE = 10**400


def _nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"member": "Keep"}
    for _ in range(depth):
        inner = {"member": "Lq", "decay": inner}
    return {"retention": inner}


def _text(depth: int) -> str:
    return '{"retention":' + '{"member":"Lq","decay":' * depth + "1" + "}" * depth + "}"


# Contents of a JSON file in place of a recipe, and parts of the message.
TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a degree that never ends": (
        '{"features": {"member": "Polynomial", "degree": 9007199254740993}}',
        ("degree", "from 1 to 100"),
    ),
    "maps that never end": (
        '{"memory": {"member": "MLP", "depth": 9007199254740993}}',
        ("depth", "from 1 to 1000"),
    ),
    "a number that is another as a float": (
        '{"algorithm": {"member": "GradientDescent", "lr": 9007199254740993}}',
        ("lr", "float holds exactly"),
    ),
    "a number float32 lacks": (
        '{"algorithm": {"member": "GradientDescent", "lr": 1e40}}',
        ("lr", "at most 3.4e+38"),
    ),
    "41 digits": (
        '{"algorithm": {"member": "GradientDescent", "lr": 1' + "0" * 40 + "}}",
        ("lr", "at most 3.4e+38", "41 digits"),
    ),
    "a schema of 5001 digits": ('{"schema": 1' + "0" * 5000 + "}", ("not JSON", "5,001 digits")),
    "nothing": ("", ("not JSON",)),
    "half": ('{"bias": {"member": "L2"', ("not JSON",)),
    "a comment": ('{} // "L2"', ("not JSON",)),
    "a trailing comma": ('{"bias": {"member": "L2"},}', ("not JSON",)),
    "single quotes": ("{'bias': {'member': 'L2'}}", ("not JSON",)),
    "a list": ("[]", ("mapping of choices", "list")),
    "a word": ('"gla"', ("mapping of choices", "str")),
    "a number": ("3", ("mapping of choices", "int")),
    "null": ("null", ("mapping of choices", "NoneType")),
    "true": ("true", ("mapping of choices", "bool")),
    "another choice": ('{"loss": {"member": "L2"}}', ("no choice 'loss'", "bias")),
    "a long name": ('{"' + "x" * 5000 + '": 1}', ("no choice",)),
    "another schema": ('{"schema": 1}', ("schema 1", "reads schema 2")),
    "a schema in words": ('{"schema": "1"}', ("schema '1'",)),
    "a schema that is true": ('{"schema": true}', ("schema True",)),
    "a schema with a point": ('{"schema": 1.0}', ("schema 1.0",)),
    "a null schema": ('{"schema": null}', ("schema None",)),
    "a choice twice": (
        '{"bias": {"member": "L2"}, "bias": {"member": "Huber"}}',
        ("'bias'", "twice"),
    ),
    "a member twice": ('{"bias": {"member": "L2", "member": "Huber"}}', ("'member'", "twice")),
    "a field twice": (
        '{"context": {"member": "Window", "size": 2, "size": 3}}',
        ("'size'", "twice"),
    ),
    "nested too deep": (_text(50_000), ("nested too deep",)),
    "no member": ('{"bias": {}}', ('names its "member"',)),
    "a field and no member": ('{"bias": {"threshold": 1}}', ('names its "member"', "threshold")),
    "a member that is a number": (
        '{"bias": {"member": 3}}',
        ("name of a member must be text", "3"),
    ),
    "a member that is null": (
        '{"bias": {"member": null}}',
        ("name of a member must be text", "None"),
    ),
    "a member that is a list": ('{"bias": {"member": ["L2"]}}', ("name of a member must be text",)),
    "a member that is true": (
        '{"bias": {"member": true}}',
        ("name of a member must be text", "True"),
    ),
    "nearly a member": ('{"memory": {"member": "Matriks"}}', ("did you mean 'Matrix'",)),
    "nearly another": ('{"bias": {"member": "huber"}}', ("did you mean 'Huber'",)),
    "nobody's member": ('{"bias": {"member": "Quux"}}', ("no member named 'Quux'", "import")),
    "an empty name": ('{"bias": {"member": ""}}', ("no member named ''",)),
    "a long member": ('{"bias": {"member": "' + "x" * 5000 + '"}}', ("no member named",)),
    "a word for a member": ('{"bias": "L2"}', ("Recipe(bias=...)", "'L2'")),
    "null for a member": ('{"bias": null}', ("Recipe(bias=...)", "None")),
    "a list for a member": ('{"bias": []}', ("Recipe(bias=...)",)),
    "a long word": ('{"bias": "' + "x" * 5000 + '"}', ("Recipe(bias=...)",)),
    "another choice's member": ('{"bias": {"member": "Decay"}}', ("Recipe(bias=...)",)),
    "no such field": ('{"bias": {"member": "L2", "lr": 1}}', ("L2 has no field 'lr'",)),
    "a long field": ('{"bias": {"member": "L2", "' + "x" * 5000 + '": 1}}', ("no field",)),
    "401 digits": (
        '{"algorithm": {"member": "GradientDescent", "lr": 1' + "0" * 400 + "}}",
        ("lr", "finite number", "401 digits"),
    ),
    "5001 digits": (
        '{"algorithm": {"member": "GradientDescent", "lr": 1' + "0" * 5000 + "}}",
        ("not JSON", "digits"),
    ),
    "an overflow": ('{"algorithm": {"member": "GradientDescent", "lr": 1e400}}', ("lr", "inf")),
    "NaN": ('{"algorithm": {"member": "GradientDescent", "lr": NaN}}', ("lr", "nan")),
    "minus infinity": ('{"algorithm": {"member": "GradientDescent", "lr": -Infinity}}', ("-inf",)),
    "a negative rate": ('{"algorithm": {"member": "GradientDescent", "lr": -1}}', (">= 0", "-1")),
    "a rate that is true": ('{"algorithm": {"member": "GradientDescent", "lr": true}}', ("True",)),
    "a rate that is null": ('{"algorithm": {"member": "GradientDescent", "lr": null}}', ("None",)),
    "a rate that is a list": ('{"algorithm": {"member": "GradientDescent", "lr": [1]}}', ("lr",)),
    "a rate in words": ('{"algorithm": {"member": "GradientDescent", "lr": "1"}}', ("'input'",)),
    "a batch with a point": (
        '{"algorithm": {"member": "GradientDescent", "batch_size": 1.5}}',
        ("1.5",),
    ),
    "a batch in words": (
        '{"algorithm": {"member": "GradientDescent", "batch_size": "2"}}',
        ("'2'",),
    ),
    "no batch": ('{"algorithm": {"member": "GradientDescent", "batch_size": 0}}', (">= 1", "0")),
    "a batch beyond sizes": (
        '{"algorithm": {"member": "GradientDescent", "batch_size": 1' + "0" * 40 + "}}",
        ("batch_size", "64 bits"),
    ),
    "a window beyond sizes": (
        '{"context": {"member": "Window", "size": 1' + "0" * 400 + "}}",
        ("size", "64 bits"),
    ),
    "an unknown word": ('{"retention": {"member": "Decay", "when": "during"}}', ("when", "during")),
    "a long value": (
        '{"retention": {"member": "Decay", "when": "' + "x" * 5000 + '"}}',
        ("when", "must be one of"),
    ),
    "a decay above 1": ('{"retention": {"member": "Decay", "alpha": 1.5}}', ("(0, 1]", "1.5")),
    "a power below 1": ('{"bias": {"member": "Lp", "p": 0.5}}', ("p=", ">= 1")),
    "a member in a number": ('{"bias": {"member": "Lp", "p": {"member": "L2"}}}', ("p=",)),
    "a number in a slot": ('{"retention": {"member": "Lq", "decay": 3}}', ("decay", "3")),
}


@pytest.mark.parametrize("what", TEXTS)
def test_invalid_texts(what: str) -> None:
    text, says = TEXTS[what]
    refuses(lambda: rc.Recipe.from_json(text), *says, error=rc.RecipeError)


@pytest.mark.parametrize("what", TEXTS)
def test_invalid_files(what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(TEXTS[what][0], encoding="utf-8")
    refuses(lambda: rc.load_recipe(path), "mine.json", error=rc.RecipeError)


TOML: dict[str, tuple[str, tuple[str, ...]]] = {
    "half": ("[bias", ("not TOML",)),
    "a table twice": ('[bias]\nmember = "L2"\n[bias]\nmember = "Huber"', ("not TOML",)),
    "a key twice": ('[bias]\nmember = "L2"\nmember = "Huber"', ("not TOML",)),
    "a date": ('[bias]\nmember = "Lp"\np = 2020-01-01', ("p=",)),
    "401 digits": ('[bias]\nmember = "Lp"\np = 1' + "0" * 400, ("401 digits",)),
    "infinity": ('[bias]\nmember = "Lp"\np = inf', ("inf",)),
    "a member outside": ('member = "L2"', ("no choice 'member'",)),
    "lists in lists": ("bias = " + "[" * 30_000 + "]" * 30_000, ("nested too deep",)),
    "a list of tables": ('[[bias]]\nmember = "L2"', ("Recipe(bias=...)",)),
    "a key of 50,000 parts": (".".join("a" * 50_000) + " = 1", ("more than 32 dotted parts",)),
    "a table of 50,000 parts": (f"[{'.'.join('a' * 50_000)}]", ("more than 32 dotted parts",)),
    "parts in quotes": ('"a" . ' * 40 + "'a' = 1", ("more than 32 dotted parts",)),
    "parts behind four quotes": (f'bias = {{b = """x"""", {"a." * 40}a = 1}}', ("more than 32",)),
    "parts in a table in a line": (f"bias = {{{'a.' * 40}a = 1}}", ("more than 32 dotted parts",)),
}


@pytest.mark.parametrize("what", TOML)
def test_invalid_toml(what: str, tmp_path: Path) -> None:
    text, says = TOML[what]
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    refuses(lambda: rc.load_recipe(path), "mine.toml", *says, error=rc.RecipeError)


DOTS = ".".join("a" * 40)


@pytest.mark.parametrize("quote", ['"', "'", '"""', "'''"])
@pytest.mark.parametrize("quotes", [0, 2])
def test_dots_in_toml_strings_and_comments_are_no_keys(quote: str, quotes: int) -> None:
    inside = DOTS + (quote[0] * quotes if len(quote) == 3 else "")
    text = f"x = {quote}{inside}{quote} # {DOTS}\ny.z = [1.5, {', '.join(['0.5'] * 99)}]"
    assert read_toml(text) == tomllib.loads(text)


def test_unclosed_toml_strings_are_read_once() -> None:
    """A pattern that starts again at every quote would take minutes."""
    for text in ('x = "' + '\\"' * 200_000, '"""' + '\\"""' * 100_000 + "\\", "a" * 400_000):
        began = time.process_time()
        with pytest.raises(ValueError, match="at "):
            read_toml(text)
        assert time.process_time() - began < 5


def test_invalid_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.json").write_bytes(b'{"bias": "\xe9"}')
    (tmp_path / "mine.yaml").write_text("bias: L2")
    (tmp_path / "plain").write_text("{}")
    os.mkfifo("pipe.toml")
    os.mkfifo("pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "large.json").write_text("{}" + " " * (2**20 - 1))
    cases: list[tuple[Any, str]] = [
        ("folder.toml", "Is a directory"),
        ("latin.json", "not UTF-8"),
        ("mine.yaml", "neither .json nor .toml"),
        ("plain", "neither .json nor .toml"),
        ("none.json", "there is no file none.json"),
        ("", "neither .json nor .toml"),
        ("pipe.toml", "pipe.toml cannot be read: it is a pipe"),
        ("pipe.json", "pipe.json cannot be read: it is a pipe"),
        ("device.json", "device.json cannot be read: it is a pipe, a socket or a device"),
        ("large.json", "it has 1,048,577 bytes, and at most 1,048,576 are read"),
        ("a\0b.json", "null byte"),
        ("x" * 300 + ".json", "File name too long"),
        (3, "takes the path of a file, not int"),
        (None, "takes the path of a file, not NoneType"),
        ({"bias": {}}, "takes the path of a file, not dict"),
    ]
    for path, says in cases:
        refuses(lambda path=path: rc.load_recipe(path), says, error=rc.RecipeError)


DATA: dict[str, tuple[Any, str]] = {
    "nested too deep": (_nested(5000), "nested too deep"),
    "keys that are numbers": ({3: {}}, "no choice 3"),
    "keys that are None": ({None: {}}, "no choice None"),
    "fields that are None": ({"bias": {"member": "L2", None: 1}}, "L2 has no field None"),
    "fields that are numbers": ({"bias": {"member": "L2", 3: 1, "x": 2}}, "L2 has no field 3"),
    "text": ("{}", "mapping of choices, not str"),
    "a recipe": (rc.Recipe(), "mapping of choices, not Recipe"),
    "a class": ({"bias": rc.bias.L2}, "rc.bias.L2()"),
}


@pytest.mark.parametrize("what", DATA)
def test_invalid_data(what: str) -> None:
    data, says = DATA[what]
    refuses(lambda: rc.Recipe.from_dict(data), says, error=rc.RecipeError)


@pytest.mark.parametrize("value", [None, 3, ["{}"], {}, 1.5])
def test_json_must_be_text(value: Any) -> None:
    refuses(lambda: rc.Recipe.from_json(value), "must be text", error=rc.RecipeError)


def test_recipe_round_trips_through_json() -> None:
    """The refused recipes follow the path of this one."""
    for name in rc.zoo.names():
        recipe = rc.zoo.get(name).recipe
        assert rc.Recipe.from_json(recipe.to_json()) == recipe
        assert json.loads(recipe.to_json()) == recipe.to_dict()


MEMBERS: dict[str, tuple[Callable[[], object], str]] = {
    "a huge rate": (lambda: rc.algorithm.GradientDescent(lr=HUGE), "401 digits"),
    "minus a huge rate": (lambda: rc.algorithm.GradientDescent(lr=-HUGE), "401 digits"),
    "a huge power": (lambda: rc.bias.Lp(p=HUGE), "401 digits"),
    "a rate without end": (lambda: rc.algorithm.GradientDescent(lr=float("inf")), "inf"),
    "a complex rate": (lambda: rc.algorithm.GradientDescent(lr=1j), "1j"),  # type: ignore[arg-type]
    "a batch of bytes": (lambda: rc.algorithm.GradientDescent(batch_size=b"2"), "b'2'"),  # type: ignore[arg-type]
    "a huge batch": (lambda: rc.algorithm.GradientDescent(batch_size=HUGE), "401 digits"),
    "a window of true": (lambda: rc.context.Window(size=True), "True"),
    "a window of minus one": (lambda: rc.context.Window(size=-1), "-1"),
    "a window of nan": (lambda: rc.context.Window(size=float("nan")), "nan"),  # type: ignore[arg-type]
    "another choice's name": (lambda: rc.Recipe().replace(loss=1), "no choice 'loss'"),
}


@pytest.mark.parametrize("what", MEMBERS)
def test_invalid_members(what: str) -> None:
    make, says = MEMBERS[what]
    refuses(make, says, error=rc.RecipeError)


DECLARED: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "init below": (lambda: rc.quantity(init=-1, above=0), ("quantity(init=...)", "> 0", "-1")),
    "init at an open end": (lambda: rc.quantity(init=0, above=0), ("quantity(init=...)", "> 0")),
    "init unsaid": (lambda: rc.quantity(below=1), ("quantity(init=...)", "< 1", "1.0")),
    "init nan": (lambda: rc.quantity(init=float("nan")), ("quantity(init=...)", "nan")),
    "init huge": (lambda: rc.quantity(init=HUGE), ("quantity(init=...)", "401 digits")),
    "init in words": (lambda: rc.quantity(init="a"), ("quantity(init=...)", "'a'")),  # type: ignore[arg-type]
    "a word": (lambda: rc.quantity("tok"), ("quantity(default=...)", "'input'", "'tok'")),
    "a default below": (lambda: rc.quantity(-1.0, above=0), ("quantity(default=...)", "-1")),
    "no default": (lambda: rc.quantity(None), ("quantity(default=...)", "None")),  # type: ignore[arg-type]
    "a true default": (lambda: rc.quantity(True), ("quantity(default=...)", "True")),
    "a default of another kind": (
        lambda: rc.quantity("input", sources=("learned",)),
        ("quantity(default=...)", "'learned'"),
    ),
    "bounds that cross": (lambda: rc.quantity(above=2, below=1), ("no number is",)),
    "bounds that meet": (lambda: rc.quantity(above=1, at_most=1), ("no number is",)),
    "an integer below": (lambda: rc.fields.integer(0, at_least=1), ("the default", ">= 1")),
    "an integer with a point": (lambda: rc.fields.integer(1.5), ("the default", "1.5")),
    "an integer of true": (lambda: rc.fields.integer(True), ("the default", "True")),
    "no integer": (lambda: rc.fields.integer(None), ("the default", "None")),
    "a number below": (lambda: rc.fields.number(-1.0, above=0), ("the default", "> 0")),
    "a number in words": (lambda: rc.fields.number("1"), ("the default", "'1'")),
    "a flag in words": (lambda: rc.fields.flag("yes"), ("the default", "'yes'")),  # type: ignore[arg-type]
    "an option that is no word": (lambda: rc.fields.option(3, "a"), ("the default", "'a'", "3")),
}


@pytest.mark.parametrize("what", DECLARED)
def test_contradictory_declarations(what: str) -> None:
    declare, says = DECLARED[what]
    refuses(declare, *says, error=ValueError)


SIZES: dict[str, tuple[Callable[[], object], str]] = {
    "shapes(-1, a)": (lambda: rc.Recipe().shapes(-1, "a"), "K must be a whole number >= 1"),  # type: ignore[arg-type]
    "shapes(1.5, 2)": (lambda: rc.Recipe().shapes(1.5, 2), "1.5"),  # type: ignore[arg-type]
    "shapes(2, 0)": (lambda: rc.Recipe().shapes(2, 0), "V must be a whole number >= 1"),
    "shapes of attention": (
        lambda: rc.zoo.get("softmax_attention").recipe.shapes(0, 1),
        "K must be a whole number",
    ),
    "axes(0, 1)": (lambda: rc.Recipe().axes(0, 1), "K must be"),
    "axes(True, 1)": (lambda: rc.Recipe().axes(True, 1), "True"),
    "axes(None, 1)": (lambda: rc.Recipe().axes(None, 1), "None"),  # type: ignore[arg-type]
    "params of no heads": (lambda: rc.initial_params(rc.Recipe(), H=0, K=1, V=1), "H must be"),
    "params of half a head": (
        lambda: rc.initial_params(rc.Recipe(), H=0.5, K=1, V=1),  # type: ignore[arg-type]
        "0.5",
    ),
    **{
        f"cost({name}={value!r})": (
            lambda name=name, value=value: rc.cost(rc.Recipe(), **{name: value}),
            f"{name} must be",
        )
        for name in ("K", "V", "H", "B", "G", "T", "dtype_bytes")
        for value in (-1, 1.5, "64", None, True, HUGE)
    },
    "cost(dtype_bytes=3)": (lambda: rc.cost(rc.Recipe(), dtype_bytes=3), "2, 4 or 8"),
    "cost(engine=fast)": (lambda: rc.cost(rc.Recipe(), engine="fast"), "engine='fast'"),
    "cost(engine=None)": (lambda: rc.cost(rc.Recipe(), engine=None), "engine=None"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", SIZES)
def test_invalid_sizes(what: str) -> None:
    ask, says = SIZES[what]
    refuses(ask, says, error=ValueError)
