"""Run the page's scripts by node, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recollect.page.write import read_static

FOLDER = Path(__file__).parent


def node(
    script: str, data: object, scripts: Sequence[str], *, ahead: str = "", between: str = ""
) -> Any:
    """Return the result of a script of this folder.

    Args:
        script: reads the data as ``input`` and ends with ``answer(...)``.
        data: plain data.
        scripts: of the page, run before it.
        ahead: of this folder, run before those. between: run after them.
    """
    program = shutil.which("node")
    if program is None:
        pytest.skip("node is not installed: what the page's scripts compute is not checked")
    texts = [(FOLDER / ahead).read_text(encoding="utf-8")] if ahead else []
    texts += [read_static(name) for name in scripts]
    texts += [(FOLDER / between).read_text(encoding="utf-8")] if between else []
    texts.append((FOLDER / script).read_text(encoding="utf-8"))
    start = (
        "const input = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
        "const answer = (x) => process.stdout.write(JSON.stringify(x));\n"
    )
    path = [program, "-e", start + "\n".join(texts)]
    result = subprocess.run(
        path, input=json.dumps(data), capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
