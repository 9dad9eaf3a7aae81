"""Allowed imports between modules."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import recollect

SRC = Path(recollect.__file__).parent
CORE = (
    "recollect.blocks",
    "recollect.choices",
    "recollect.costs",
    "recollect.decoder",
    "recollect.explanation",
    "recollect.functional",
    "recollect.layer",
    "recollect.parallel",
    "recollect.recipe",
    "recollect.state",
)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module imports at run time; other packages by first name."""
    paths = {module_name(path, root): path for path in root.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        result: set[str] = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = {
            id(one)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for one in ast.walk(node)
        }
        for node in (one for one in ast.walk(tree) if id(one) not in for_types):
            if isinstance(node, ast.Import):
                result |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{name}: imports are absolute"
                for one in node.names:
                    full = f"{node.module}.{one.name}"
                    result.add(full if full in paths else node.module)
        graph[name] = {x if x.split(".")[0] == root.name else x.split(".")[0] for x in result}
        graph[name] -= {name}
    return graph


@functools.cache
def graph() -> dict[str, set[str]]:
    return import_graph(SRC)


def test_graph_has_imports_inside_functions_and_none_for_types(tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "from typing import TYPE_CHECKING\nimport p.b\nif TYPE_CHECKING:\n    from p.c import C\n"
    )
    (package / "b.py").write_text("class B:\n    def f(self):\n        from p import a\n")
    result = import_graph(package)
    assert result == {"p": set(), "p.a": {"typing", "p.b"}, "p.b": {"p.a"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(result).prepare()


def test_imports_have_no_cycles() -> None:
    graphlib.TopologicalSorter(graph()).prepare()  # raises CycleError with the cycle


def test_reference_imports_only_common() -> None:
    """An allow-list, also for indirect imports and for other packages."""
    allowed = ("engines.reference", "engines.base", "engines.common", "choices", "recipe", "state")
    allowed += ("typing", "fields", "messages", "numerics", "serialization")
    recorded: set[str] = set()
    todo = {name for name in graph() if name.startswith("recollect.engines.reference")}
    while todo:
        name = todo.pop()
        recorded.add(name)
        todo |= {x for x in graph().get(name, set()) if x.startswith("recollect.")} - recorded
    ours = {name.removeprefix("recollect.") for name in recorded}
    # Notes of costs format numbers with units, and recipes have a notebook representation.
    shown = {"report.formatting", "report.notebook"}
    strange = {name for name in ours - shown if not _within(name, allowed)}
    assert not strange
    theirs = {x for name in recorded for x in graph()[name] if x.split(".")[0] != "recollect"}
    assert theirs - set(sys.stdlib_module_names) == {"torch"}


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_imports_precede_code() -> None:
    trailing = [
        f"{path.relative_to(SRC)}:{number}"
        for path in sorted(SRC.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "noqa" in line and "E402" in line
    ]
    assert not trailing


def test_no_name_hides_a_module() -> None:
    """`import recollect.functional.recall as m` binds the module, not the function."""
    names = [name for name in sorted(graph()) if name.startswith(CORE)]
    assert "recollect.functional.recall" in names
    for name in names:
        module = importlib.import_module(name)
        parent, _, leaf = name.rpartition(".")
        assert getattr(importlib.import_module(parent), leaf) is module, name


def test_the_package_imports_its_names_on_first_use() -> None:
    code = (
        "import sys, recollect as rc; print('torch' in sys.modules);"
        "import recollect.functional.checks, recollect.costs, recollect.explanation.diagnose;"
        "print([f.__module__ for f in (rc.recall, rc.cost, rc.explain)]);"
        "print(rc.load_recipe.__module__, rc.zoo.get('gla').name, sorted(rc.__all__) == dir(rc))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SRC.parent)},
    )
    assert done.stdout.splitlines() == [
        "False",
        "['recollect.functional.recall', 'recollect.blocks.cost', 'recollect.explanation.explain']",
        "recollect.recipe.files gla True",
    ]


LEFT_OUT = {
    "recollect.cli.app": ("recollect.benchmarks",),
    "recollect.blocks": ("torch._dynamo", "recollect.benchmarks"),
    "recollect.lm": ("datasets", "recollect.benchmarks", "recollect.lm.training"),
}
"""Modules that the import of the first modules in this table must not load, in its order."""


def test_imports_do_not_load_slow_modules() -> None:
    """The compiler takes as long as torch, and a model needs no Trainer."""
    lines = ["import importlib, sys"]
    for importing, names in LEFT_OUT.items():
        lines.append(f"importlib.import_module({importing!r})")
        lines.append(f"print([name for name in sys.modules if name.startswith({names!r})])")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split("\n") == [*["[]"] * len(LEFT_OUT), ""]


def test_names_of_benchmarks_equal_those_of_the_suites() -> None:
    from recollect.benchmarks.suites import SUITES

    suite = importlib.import_module("recollect.cli.bench").Suite
    assert (*SUITES, "train", "memory") == tuple(suite)
