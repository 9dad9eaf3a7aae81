"""The check of names and sentences that `make lint` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_style.py"


def test_faults_are_printed_with_their_places(tmp_path: Path) -> None:
    """The script finds its checkout from its own path."""
    script = tmp_path / "scripts" / "check_style.py"
    package = tmp_path / "src" / "recollect" / "state"
    package.mkdir(parents=True)
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    (package / "long.py").write_text("x = 1\n" * 601, encoding="utf-8")
    (package / "words.py").write_text(
        '"""What nobody needs."""\nfound = 1\n\n\ndef result(told: int) -> int:\n'
        '    """Return the argument."""\n    return told\n',
        encoding="utf-8",
    )
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_words.py").write_text("found = 1\n" + "x = 1\n" * 600, encoding="utf-8")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    places = [line.split(": ")[:2] for line in run.stdout.splitlines()]
    assert places == [
        ["src/recollect/state/long.py", "601 lines, and at most 600 are allowed"],
        ["src/recollect/state/words.py:1", "docstring opens with a clause"],
        [
            "src/recollect/state/words.py:1",
            "unnamed person 'nobody'",
        ],
        ["src/recollect/state/words.py:2", "name 'found'"],
        ["src/recollect/state/words.py:5", "name 'told'"],
        ["tests/test_words.py:1", "name 'found'"],
        ["state", run.stdout.splitlines()[-2].removeprefix("state: ")],
        ["3 files, 7 faults"],
    ]


def test_a_plain_file_passes(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "check_style.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    package = tmp_path / "src" / "recollect"
    package.mkdir(parents=True)
    (package / "plain.py").write_text('"""Return values."""\nresult = 1\n', encoding="utf-8")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "1 files, 0 faults\n")
