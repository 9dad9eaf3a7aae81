"""Every command in the pages of results/ has the options and files that it names."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import recollect as rc

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import typer

from recollect.cli import build
from recollect.cli.bench import Suite

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(
    r"`((?:\w+=\S+ )*(?:recollect|python|make) [^`]+)`|^    ((?:recollect|python|make) .+)$",
    re.MULTILINE,
)
PAGES = sorted((ROOT / "results").rglob("*.md"))
COMMANDS = [
    (str(page.relative_to(ROOT)), " ".join((code or block).split()))
    for page in PAGES
    for code, block in COMMAND.findall(page.read_text(encoding="utf-8"))
]
ARGUMENTS = {"NAME": "gla", "NAMES": "gla,rls", "K": "8", "FILE": "x.json", "...": "gla"}
"""Values of placeholders."""


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a command without running it, and return its parameters."""
    group: Any = typer.main.get_command(build())
    name, command, rest = group.resolve_command(typer.Context(group), words)
    return command.make_context(name, rest).params if rest else {}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_has_the_options_and_files_that_it_names(page: str, command: str) -> None:
    words = [ARGUMENTS.get(word, word) for word in shlex.split(command)]
    while "=" in words[0]:
        words.pop(0)  # an environment variable
    program, *rest = words
    if program == "recollect":
        params = parse(rest)
        systems = {*rc.zoo.names(), *rc.zoo.names(kind="hybrid")}
        assert set((params.get("models") or "gla").split(",")) <= systems
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest[0] in targets
    else:
        path = ROOT / rest[0]
        assert path.is_file(), f"{page} names a file that does not exist"
        check_imports(path)


def check_imports(path: Path) -> None:
    """Check that all names that a script imports exist, without running the script."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported = {alias.name: [] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported = {node.module: [alias.name for alias in node.names]}
        else:
            continue
        for module, names in imported.items():
            if not (path.parent / f"{module}.py").exists():  # imported from the folder of a script
                for name in names:
                    assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_the_pages_name_commands_of_each_kind() -> None:
    programs = {shlex.split(re.sub(r"^(\w+=\S+ )*", "", text))[0] for _, text in COMMANDS}
    assert programs == {"recollect", "python", "make"}
    assert len(COMMANDS) > 20


def test_suites_in_the_pages_exist() -> None:
    for page in PAGES:
        for suite in re.findall(r"--suite (\w+)", page.read_text(encoding="utf-8")):
            assert suite in set(Suite), page
