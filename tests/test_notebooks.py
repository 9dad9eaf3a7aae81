"""The notebooks of `examples/` run from top to bottom, and every result can be shown."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def run(source: str, names: dict[str, Any]) -> object:
    """Run a cell as a notebook does; what its last expression is."""
    cell = ast.parse(source)
    last = cell.body.pop() if cell.body and isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "<cell>", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = json.loads(path.read_text("utf-8"))
    assert page["nbformat"] == 4
    names: dict[str, Any] = {}
    shown = 0
    for cell in page["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "outputs are not committed: they would grow stale"
        found = run("".join(cell["source"]), names)
        if hasattr(found, "_repr_html_"):
            assert found._repr_html_().startswith("<table>")
            shown += 1
    assert shown >= 2
