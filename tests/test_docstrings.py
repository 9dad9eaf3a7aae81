"""Public objects document their arguments and have examples that run."""

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

# Modules of the package besides those that `rc` names.
zoo_presets = importlib.import_module("recollect.zoo.preset")  # `rc.zoo.preset` is the decorator

FACES = (
    "recollect",
    *(f"recollect.{n}" for n in ("benchmarks", "layer", "recipe", "report")),
    *(f"recollect.explanation.{n}" for n in ("composition", "explain", "naming")),
)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield every name in the ``__all__`` of a module and of the modules that it names."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from public(value)
        elif getattr(value, "__module__", "").startswith("recollect"):
            yield f"{value.__module__}.{getattr(value, '__qualname__', name)}", value


@dataclass(frozen=True)
class Documented:
    """A function, and its docstrings: an override inherits those of its base classes."""

    function: Callable[..., Any]
    arguments: tuple[str, ...]
    docstrings: tuple[str, ...]


def arguments(function: Callable[..., Any], *, bound: bool) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[bound:]


def methods(cls: type) -> Iterator[tuple[str, Documented]]:
    for name in dir(cls):
        owners = [base for base in cls.__mro__ if name in base.__dict__]
        # Only classes of the package count; a class documents the arguments of its constructor.
        if name.startswith("_") or not owners[0].__module__.startswith("recollect"):
            continue
        raw = owners[0].__dict__[name]
        function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
        if inspect.isfunction(function):
            docs = (inspect.getdoc(base.__dict__[name]) or "" for base in owners)
            names = arguments(function, bound=not isinstance(raw, staticmethod))
            yield (
                f"{owners[0].__module__}.{owners[0].__qualname__}.{name}",
                Documented(function=function, arguments=names, docstrings=tuple(docs)),
            )
    # Fields of a dataclass are documented next to their definition, or as attributes.
    result = dataclasses.is_dataclass(cls) or getattr(cls, "_is_protocol", False)
    if "__init__" in cls.__dict__ and not result:
        names = arguments(cls.__init__, bound=True)
        yield (
            f"{cls.__module__}.{cls.__qualname__}",
            Documented(
                function=cls.__init__, arguments=names, docstrings=(inspect.getdoc(cls) or "",)
            ),
        )


def documented_functions() -> dict[str, Documented]:
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
    """Return the arguments (or a dataclass's fields) that a docstring's sections describe."""
    match = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)+)", docstring, re.MULTILINE)
    items = re.findall(r"^ {4}([*\w][\w*, ]*):", match[1], re.MULTILINE) if match else []
    return {name.strip().lstrip("*") for item in items for name in item.split(",")}


def raises(function: Callable[..., Any]) -> set[str]:
    """Return the names of the errors that a function's own code raises and does not catch."""
    result: set[str] = set()
    (top,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    nodes: list[ast.AST] = list(ast.iter_child_nodes(top))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            result.add(ast.unparse(node.exc.func))
        if isinstance(node, ast.FunctionDef):  # an error of a nested function is raised by its call
            continue
        caught = node.body if isinstance(node, ast.Try) else []
        nodes += [child for child in ast.iter_child_nodes(node) if child not in caught]
    return result


PUBLIC = documented_functions()


def test_documented_functions_include_methods_and_constructors() -> None:
    """Otherwise the tests below would check nothing."""
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
def test_every_error_is_documented(name: str) -> None:
    """An error that the function raises is listed in a Raises section."""
    one = PUBLIC[name]
    errors = raises(one.function) - {"AssertionError"}
    documented = " ".join(text.partition("\nRaises:\n")[2] for text in one.docstrings)
    missing = {error for error in errors if error not in documented}
    assert not missing, f"{name} raises {sorted(missing)} and does not say so"


def examples() -> dict[str, doctest.DocTest]:
    """Return docstrings of the package with lines that begin with ``>>>``, without commands."""
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
"""Examples that train or run a step, besides those of `compare`, `train` and `reproduce`."""


def shown() -> Iterator[tuple[str, str, Any]]:
    """Yield every public name: its path, its last part, and its value."""
    faces = {"rc": rc}
    faces |= {f"rc.{n}": getattr(rc, n) for n in rc.__all__ if inspect.ismodule(getattr(rc, n))}
    for face, module in faces.items():
        yield from ((f"{face}.{name}", name, getattr(module, name)) for name in module.__all__)


def defined(name: str, value: Any) -> str:
    """Return the definition of a name, as in `EXAMPLES`."""
    if inspect.ismodule(value):
        return value.__name__
    ours = str(getattr(value, "__module__", "")).startswith("recollect")
    is_object = ours and hasattr(value, "__qualname__")
    return f"{value.__module__}.{value.__qualname__}" if is_object else f"constant {name}"


def constants() -> dict[str, doctest.DocTest]:
    """Return examples in the strings below public names that are neither class nor function."""
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
                    key = f"constant {name}"
                    test = doctest.DocTestParser().get_doctest(said, known, key, str(path), 0)
                    if test.examples:
                        result[key] = test
    return result


EXAMPLES |= constants()


@pytest.mark.parametrize(("path", "name", "value"), list(shown()))
def test_every_public_name_has_an_example(path: str, name: str, value: Any) -> None:
    """Every name of `rc`, and of a module that it names, has an example."""
    assert defined(name, value) in EXAMPLES, f"{path} has no Examples section"


def test_every_system_is_in_the_example_of_its_family() -> None:
    for name in (*rc.zoo.names(), *rc.zoo.names(kind="hybrid")):
        family = importlib.import_module(f"recollect.zoo.{rc.zoo.get(name).family}")
        assert name in re.findall(r"\w+", family.__doc__ or ""), name


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(EXAMPLES)],
)
def test_every_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples print their output. Their files are in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    # Members are those of the package and of the example, without members of other tests.
    classes = {n: cls for n, cls in member._REGISTRY.items() if n[0] == "recollect"}
    monkeypatch.setattr(member, "_REGISTRY", classes)
    monkeypatch.setattr(zoo_presets, "_PRESETS", dict(zoo_presets._PRESETS))
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, attempts = runner.run(EXAMPLES[name], out=output.append)
    assert attempts
    assert not failed, "".join(output)
