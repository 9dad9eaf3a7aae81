"""The notebooks of `examples/` run from top to bottom, and contain the outputs of their cells.

`python tests/test_notebooks.py` runs them and stores the outputs.
"""

from __future__ import annotations

import ast
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
TRAIN = ("compare_honestly",)
"""Notebooks that train models; slow."""


def run(source: str, names: dict[str, Any]) -> object:
    """Run a cell like a notebook, and return the value of its last expression."""
    cell = ast.parse(source)
    last = cell.body.pop() if cell.body and isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "<cell>", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def executed(page: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook after a run from top to bottom in the working folder."""
    names: dict[str, Any] = {}
    cells, count = [], 0
    for cell in page["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            value = run("".join(cell["source"]), names)
            if hasattr(value, "_repr_html_"):
                data = {"text/html": value._repr_html_(), "text/plain": str(value)}
            else:
                data = {"text/plain": repr(value)}
            data = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
            result = {
                "output_type": "execute_result",
                "execution_count": count,
                "metadata": {},
                "data": data,
            }
            outputs = [] if value is None else [result]
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**page, "cells": cells}


def texts(page: dict[str, Any]) -> list[dict[str, str]]:
    """Return the outputs of every code cell, with 0 in place of machine-dependent numbers."""

    def masked(text: str) -> str:
        numbers = r"\d[\d.,]*(e[+-]?\d+)?|\binf\b|–"
        return re.sub(" +", " ", re.sub(numbers, "0", text))

    return [
        {
            kind: masked("".join(lines))
            for output in cell["outputs"]
            for kind, lines in output["data"].items()
        }
        for cell in page["cells"]
        if cell["cell_type"] == "code"
    ]


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in TRAIN))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    stored = json.loads(path.read_text("utf-8"))
    assert stored["nbformat"] == 4
    results = texts(executed(stored))
    assert texts(stored) == results, "store the outputs: python tests/test_notebooks.py"
    tables = [output["text/html"] for output in results if "text/html" in output]
    assert len(tables) >= 2 and all("<table>" in table for table in tables)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_name_no_folder_of_a_machine(path: Path) -> None:
    page = json.loads(path.read_text("utf-8"))
    shown = json.dumps([cell.get("outputs", []) for cell in page["cells"]])
    assert any(cell.get("outputs") for cell in page["cells"])
    assert not re.search(r"/(home|root|tmp|work|Users)/|object at 0x", shown)


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        page = json.loads(notebook.read_text("utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = json.dumps(executed(page), indent=1, ensure_ascii=False)
        notebook.write_text(text + "\n", encoding="utf-8")
