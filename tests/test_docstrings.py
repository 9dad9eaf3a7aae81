"""What is public says what its arguments are, and shows itself in an example that runs."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import recollect as rc
from recollect.choices import member

# Faces of the package beside the modules that `rc` names.
zoo_presets = importlib.import_module("recollect.zoo.preset")  # `rc.zoo.preset` is the decorator

FACES = (
    "recollect",
    *(f"recollect.{n}" for n in ("benchmarks", "layer", "recipe", "report")),
    *(f"recollect.explanation.{n}" for n in ("composition", "explain", "naming")),
)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every name in the ``__all__`` of a module and of the modules that it names."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from public(value)
        elif getattr(value, "__module__", "").startswith("recollect"):
            yield f"{value.__module__}.{getattr(value, '__qualname__', name)}", value


@dataclass(frozen=True)
class Documented:
    """A function, and the docstrings that speak of it: an override's base class speaks for it."""

    function: Callable[..., Any]
    arguments: tuple[str, ...]
    docstrings: tuple[str, ...]


def arguments(function: Callable[..., Any], *, bound: bool) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[bound:]


def methods(cls: type) -> Iterator[tuple[str, Documented]]:
    for name in dir(cls):
        owners = [base for base in cls.__mro__ if name in base.__dict__]
        # Its arguments are those of a class of ours; a class documents those of its constructor.
        if name.startswith("_") or not owners[0].__module__.startswith("recollect"):
            continue
        raw = owners[0].__dict__[name]
        function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
        if inspect.isfunction(function):
            said = (inspect.getdoc(base.__dict__[name]) or "" for base in owners)
            given = arguments(function, bound=not isinstance(raw, staticmethod))
            yield (
                f"{owners[0].__module__}.{owners[0].__qualname__}.{name}",
                Documented(function=function, arguments=given, docstrings=tuple(said)),
            )
    # Fields of a dataclass are explained where they stand, or as attributes.
    result = dataclasses.is_dataclass(cls) or getattr(cls, "_is_protocol", False)
    if "__init__" in cls.__dict__ and not result:
        given = arguments(cls.__init__, bound=True)
        yield (
            f"{cls.__module__}.{cls.__qualname__}",
            Documented(
                function=cls.__init__, arguments=given, docstrings=(inspect.getdoc(cls) or "",)
            ),
        )


def walk() -> dict[str, Documented]:
    result: dict[str, Documented] = {}
    for face in FACES:
        for name, value in public(importlib.import_module(face)):
            if inspect.isclass(value):
                result.update(methods(value))
            elif inspect.isfunction(value):
                result[name] = Documented(
                    function=value,
                    arguments=arguments(value, bound=False),
                    docstrings=(inspect.getdoc(value) or "",),
                )
    return {name: one for name, one in result.items() if len(one.arguments) >= 2}


def explained(docstring: str) -> set[str]:
    """The arguments (or a dataclass's fields) that a docstring's sections have an item for."""
    match = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)+)", docstring, re.MULTILINE)
    items = re.findall(r"^ {4}([*\w][\w*, ]*):", match[1], re.MULTILINE) if match else []
    return {name.strip().lstrip("*") for item in items for name in item.split(",")}


def raises(function: Callable[..., Any]) -> set[str]:
    """Names of the errors that a function's own text raises and does not catch."""
    result: set[str] = set()
    (top,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    nodes: list[ast.AST] = list(ast.iter_child_nodes(top))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            result.add(ast.unparse(node.exc.func))
        if isinstance(node, ast.FunctionDef):  # what it makes raises when it is called
            continue
        caught = node.body if isinstance(node, ast.Try) else []
        nodes += [child for child in ast.iter_child_nodes(node) if child not in caught]
    return result


PUBLIC = walk()


def test_the_walk_reaches_functions_methods_and_constructors() -> None:
    """It would assert nothing about what it does not see."""
    assert {
        "recollect.functional.recall.recall",
        "recollect.choices.bias.base.Bias.loss",
        "recollect.layer.memory_layer.MemoryLayer",
        "recollect.lm.prompt.CachedPrompt.load",
        "recollect.tasks.mqar.mqar",
        "recollect.theory.snr.min_key_dim",
        "recollect.zoo.preset.Preset.build",
    } <= set(PUBLIC)
    assert len(PUBLIC) > 200


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_argument_is_explained(name: str) -> None:
    """A public function of two or more arguments has an Args section with an item for each."""
    one = PUBLIC[name]
    missing = set(one.arguments) - set().union(*map(explained, one.docstrings))
    assert not missing, f"{name} explains {sorted(missing)} nowhere: add an Args section"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_error_is_announced(name: str) -> None:
    """An error that the function itself raises stands in a Raises section."""
    one = PUBLIC[name]
    errors = raises(one.function) - {"AssertionError"}
    said = " ".join(text.partition("\nRaises:\n")[2] for text in one.docstrings)
    missing = {error for error in errors if error not in said}
    assert not missing, f"{name} raises {sorted(missing)} and does not say so"


def examples() -> dict[str, doctest.DocTest]:
    """Every docstring of the package with lines that begin with ``>>>``; commands apart."""
    finder, result = doctest.DocTestFinder(exclude_empty=True), {}
    for module in pkgutil.walk_packages(rc.__path__, "recollect."):
        if not module.name.startswith("recollect.cli"):
            known = {"rc": rc, "torch": torch, "__name__": "__main__"}
            for test in finder.find(importlib.import_module(module.name), globs=known):
                if test.examples:
                    result[test.name] = test
    return result


EXAMPLES = examples()
SLOW = {
    "recollect.experiments.comparison.ledger.extend_table",
    "recollect.experiments.comparison.ledger.write_rows_table",
    "recollect.experiments.comparison.results.Comparison",
    "recollect.experiments.framework.run.Run",
}
"""Examples that train or run a step, beside those of the functions that do: `compare`, `train`,
`reproduce`."""


def shown() -> Iterator[tuple[str, str, Any]]:
    """Every public name: how it is reached, its last part, and what it is."""
    faces = {"rc": rc}
    faces |= {f"rc.{n}": getattr(rc, n) for n in rc.__all__ if inspect.ismodule(getattr(rc, n))}
    for face, module in faces.items():
        yield from ((f"{face}.{name}", name, getattr(module, name)) for name in module.__all__)


def defined(name: str, value: Any) -> str:
    """Where a name is defined, as `EXAMPLES` calls it."""
    if inspect.ismodule(value):
        return value.__name__
    ours = str(getattr(value, "__module__", "")).startswith("recollect")
    own = ours and hasattr(value, "__qualname__")
    return f"{value.__module__}.{value.__qualname__}" if own else f"constant {name}"


def constants() -> dict[str, doctest.DocTest]:
    """Examples in the strings below public names that are neither class nor function."""
    expected = {name for _, name, value in shown() if defined(name, value).startswith("constant")}
    line = re.compile(rf"^({'|'.join(expected)})(?:: .*)? = ", re.MULTILINE)
    result: dict[str, doctest.DocTest] = {}
    for path in Path(*rc.__path__).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not line.search(text):
            continue
        for assigned, below in itertools.pairwise(ast.parse(text).body):
            targets = getattr(assigned, "targets", [getattr(assigned, "target", None)])
            name = getattr(targets[0], "id", "")
            match below:
                case ast.Expr(value=ast.Constant(value=str(said))) if name in expected:
                    known = {"rc": rc, "torch": torch, "__name__": "__main__"}
                    where = f"constant {name}"
                    test = doctest.DocTestParser().get_doctest(said, known, where, str(path), 0)
                    if test.examples:
                        result[where] = test
    return result


EXAMPLES |= constants()


@pytest.mark.parametrize(("where", "name", "value"), list(shown()))
def test_every_public_name_has_an_example(where: str, name: str, value: Any) -> None:
    """A name of `rc` or of a module that it names shows itself."""
    assert defined(name, value) in EXAMPLES, f"{where} has no Examples section"


def test_every_system_of_the_zoo_stands_in_the_example_of_its_family() -> None:
    for name in (*rc.zoo.names(), *rc.zoo.names(kind="hybrid")):
        family = importlib.import_module(f"recollect.zoo.{rc.zoo.get(name).family}")
        assert name in re.findall(r"\w+", family.__doc__ or ""), name


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(EXAMPLES)],
)
def test_every_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a docstring shows is what comes out. Files of an example lie in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    # Its members are those of the package and its own, whatever other tests have registered.
    classes = {n: cls for n, cls in member._REGISTRY.items() if n[0] == "recollect"}
    monkeypatch.setattr(member, "_REGISTRY", classes)
    monkeypatch.setattr(zoo_presets, "_PRESETS", dict(zoo_presets._PRESETS))
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, attempts = runner.run(EXAMPLES[name], out=told.append)
    assert attempts
    assert not failed, "".join(told)
