"""Commands as processes: interrupts, signals, pipes, terminals and folders.

An early end gives one sentence and the usual exit code, and earlier files are unchanged.
`tests/test_endings.py` tests the files that a run, a comparison and an experiment leave.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.misuse.sentences import digests, is_one_sentence, short_plan
from tests.processes import paragraphs, run_command, wait_for_output

import recollect as rc

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

from recollect.cli import app as cli

SLOW = pytest.mark.slow
SIZES = ("--width", "16", "--depth", "1", "--heads", "1")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a text and a plan, and a user's files in the folder of results."""
    (tmp_path / "text.txt").write_text(paragraphs(60))
    (tmp_path / "run.toml").write_text(short_plan(steps=2000, log_every=1))
    (tmp_path / "short.toml").write_text(short_plan(steps=2, log_every=1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.md").write_text("mine")
    return tmp_path


def check_unchanged(place: Path, initial: dict[str, str]) -> None:
    """Check that no earlier file is missing or changed."""
    later = digests(place)
    assert {name: later.get(name) for name in initial} == initial


# -- interrupts while the command is imported -----------------------------------------------------

SHADOW = """import time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:
    raise ImportError("broken off in the middle")
"""


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("zoo", signal.SIGINT),
        ("zoo", signal.SIGTERM),
        ("train run.toml", signal.SIGINT),
        ("generate folder", signal.SIGINT),
    ],
)
def test_an_interrupt_while_importing(command: str, number: signal.Signals, place: Path) -> None:
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text(SHADOW)
    initial = digests(place)
    path = os.pathsep.join([str(place), str(Path(rc.__file__).parents[1])])
    environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    with run_command(*command.split(), **environment, place=place) as process:
        wait_for_output(process.stdout, "importing")
        os.killpg(process.pid, number)
        out, stderr = process.communicate()
    assert (process.returncode, out, stderr) == (128 + number, "", "recollect: interrupted\n")
    assert digests(place) == initial


def test_interrupt_handlers_are_restored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import recollect_command

    initial = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["recollect", "--version"])
    with pytest.raises(SystemExit) as caught:
        recollect_command.main()
    assert caught.value.code in (0, None)
    assert capsys.readouterr().out.strip() == f"recollect {rc.__version__}"
    assert signal.getsignal(signal.SIGINT) is initial is signal.default_int_handler


# -- signals while it works -----------------------------------------------------------------------

WORK = {
    "train": (("run.toml",), r"^step \d", "stderr"),
    "compare": (
        (
            *("--models", "linear_attention,delta_net", "--text", "text.txt", *SIZES),
            *("--steps", "100", "--out", "out"),
        ),
        r"text: \w+ [\d.]+ after",
        "stdout",
    ),
    "reproduce": (("ttr-fig2", "--scale", "small", "--out", "out"), r"\[1/\d+\]", "stdout"),
}


@pytest.mark.parametrize(
    ("command", "number"),
    [
        pytest.param("compare", signal.SIGINT, marks=SLOW),
        pytest.param("compare", signal.SIGTERM, marks=SLOW),
        pytest.param("compare", signal.SIGHUP, marks=SLOW),
        pytest.param("reproduce", signal.SIGINT, marks=SLOW),
        pytest.param("reproduce", signal.SIGTERM, marks=SLOW),
        pytest.param("reproduce", signal.SIGHUP, marks=SLOW),
        pytest.param("train", signal.SIGINT, marks=SLOW),  # as in `tests/test_endings.py`
        pytest.param("train", signal.SIGTERM, marks=SLOW),
        pytest.param("train", signal.SIGHUP, marks=SLOW),
    ],
)
def test_signalled_work(command: str, number: signal.Signals, place: Path) -> None:
    arguments, says, folder = WORK[command]
    initial = digests(place)
    with run_command(command, *arguments, place=place) as process:
        wait_for_output(getattr(process, folder), says)
        os.killpg(process.pid, number)
        out, stderr = process.communicate()
    assert process.returncode == 128 + number, (out, stderr)
    assert "Traceback" not in out + stderr
    (last,) = [line for line in (out + stderr).splitlines() if "interrupted" in line.lower()][-1:]
    is_one_sentence(last)
    check_unchanged(place, initial)
    assert not list(place.rglob("*.lock"))
    for path in place.rglob("*.json"):  # no partial files
        json.loads(path.read_text())


@SLOW
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_work_at_once(number: signal.Signals, place: Path) -> None:
    initial = digests(place)
    with run_command("train", "run.toml", place=place) as process:
        wait_for_output(process.stderr, r"^step \d")
        os.killpg(process.pid, number)
        os.killpg(process.pid, number)
        out, stderr = process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in out + stderr
    check_unchanged(place, initial)


# -- pipes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("train", "short.toml"), marks=SLOW),
        ("sizes",),
        pytest.param(("explain", "gla", "--json"), marks=SLOW),
        pytest.param(("reproduce", "ttr-fig2", "--scale", "smoke", "--out", "out"), marks=SLOW),
    ],
    ids=lambda arguments: arguments[0],
)
def test_closed_outputs(arguments: tuple[str, ...], place: Path) -> None:
    """Both outputs are closed before the start: the work is done, without a message."""
    initial = digests(place)
    with run_command(*arguments, place=place) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        assert process.wait() == 0
    check_unchanged(place, initial)
    if arguments[0] == "train":
        assert (place / "out" / "model" / "model.safetensors").exists()


@SLOW
def test_closed_outputs_of_an_error(place: Path) -> None:
    with run_command("explain", "glaa", place=place) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        assert process.wait() == 2


# -- terminals ------------------------------------------------------------------------------------

# One process runs all commands, because each would import torch for seconds.
SEVERAL = """
import os, sys
from recollect.cli.app import build
for columns in {columns}:
    os.environ["COLUMNS"] = str(columns)
    for line in {lines}:
        print(f"\\n<{{columns}}|{{line}}>", flush=True)
        try:
            build()(line.split())
            status = 0
        except SystemExit as leave:
            status = leave.code
        print(f"\\n<status {{status}}>", flush=True)
"""
LINES = {
    "zoo": 0,
    "zoo --family titans": 0,
    "explain titans": 0,
    "explain gla --json": 0,
    "sizes": 0,
    "train --help": 0,
    "explain glaa": 2,
    "train none.toml": 2,
    "compare --models glaa --task mqar": 2,
}


def on_a_terminal(place: Path, code: str, **environment: str) -> tuple[str, int]:
    """Return the output of a program on a terminal, and its exit code."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=place,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # all of its ends are closed
                break
            if not part:
                break
            output += part
        status = process.wait()
    os.close(ours)
    return output.decode(errors="replace").replace("\r\n", "\n"), status


@pytest.mark.parametrize(
    ("columns", "term"),
    [
        # `tests/test_cli.py` has tables of several widths.
        pytest.param((40,), "xterm", marks=SLOW),
        pytest.param((1, 2, 3, 10, 20, 60, 80, 120, 500, 100_000), "xterm", marks=SLOW),
        pytest.param((80,), "dumb", marks=SLOW),
        pytest.param((80,), "", marks=SLOW),
        pytest.param((80,), "nobody-knows-it", marks=SLOW),
    ],
)
def test_terminals_of_any_width(columns: tuple[int, ...], term: str, place: Path) -> None:
    code = SEVERAL.format(columns=columns, lines=list(LINES))
    output, status = on_a_terminal(place, code, TERM=term)
    assert status == 0, output
    assert "Traceback" not in output
    parts = re.findall(r"<(\d+)\|(.*?)>\n(.*?)\n<status (\w+)>", output, flags=re.DOTALL)
    assert [(int(c), line) for c, line, _, _ in parts] == [(c, x) for c in columns for x in LINES]
    for wide, line, shown, remainder in parts:
        assert remainder in (str(LINES[line]), "None"), (line, shown)
        assert shown.strip(), line
        if LINES[line]:
            is_one_sentence(shown.strip())
        elif int(wide) >= 40:  # no rule of a table is wider than the terminal
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
            rules = [len(row) for row in text.splitlines() if "─" in row]
            assert max(rules, default=0) <= int(wide), line


@pytest.mark.parametrize("columns", ["0", "-5", "x", "", "99999999999999999999"])
def test_invalid_columns(columns: str, place: Path) -> None:
    # Only during a command, because pytest would use the width, too.
    runner = CliRunner(env={"COLUMNS": columns, "LINES": columns})
    for line, status in (("zoo --family titans", 0), ("explain titans", 0), ("explain glaa", 2)):
        result = runner.invoke(cli.build(), line.split())
        assert result.exit_code == status, (result.output, result.exception)


# -- folders and files ----------------------------------------------------------------------------

FOLDERS: dict[str, tuple[str, str]] = {
    "a file in the way": ("text.txt", "cannot be written"),
    "below a file": ("text.txt/out", "cannot be written"),
    "the system's": ("/proc/out", "cannot be written"),
    "a name too long": ("x" * 300, "cannot be written"),
}
WRITES = {
    "train": ("train", "short.toml"),
    "compare": ("compare", "--models", "delta_net", "--text", "text.txt", *SIZES, "--steps", "1"),
    "reproduce": ("reproduce", "ttr-fig2", "--scale", "smoke"),
}


@pytest.mark.parametrize("command", WRITES)
@pytest.mark.parametrize("what", FOLDERS)
def test_folders_that_cannot_be_written(
    command: str, what: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    initial = digests(place)
    folder, says = FOLDERS[what]
    result = CliRunner().invoke(cli.build(), [*WRITES[command], "--out", folder])
    assert result.exit_code == 2, (result.output, result.exception)
    message = result.stderr.strip()
    is_one_sentence(message)
    assert says in message and message.startswith(f"recollect {command}: ")
    assert digests(place) == initial


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
@pytest.mark.parametrize("command", WRITES)
def test_folder_of_another_user(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "theirs").mkdir(mode=0o500)
    result = CliRunner().invoke(cli.build(), [*WRITES[command], "--out", "theirs"])
    assert result.exit_code == 2
    is_one_sentence(result.stderr.strip())
    assert "Permission denied" in result.stderr and not list((place / "theirs").iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("line", ["zoo", pytest.param("explain gla --json", marks=SLOW)])
def test_full_output(line: str, place: Path) -> None:
    """The sentence goes to stderr, and no success is reported."""
    code = "import recollect_command; recollect_command.main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *line.split()],
            cwd=place,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    assert done.returncode == 2, done.stderr
    is_one_sentence(done.stderr.strip())
    assert "No space left on device" in done.stderr


def test_a_run_in_a_deleted_working_folder_names_the_missing_file(place: Path) -> None:
    code = (
        "import os, sys\nos.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')\n"
        "import recollect_command\nrecollect_command.main()"
    )
    with run_command("train", "run.toml", code=code, place=place) as process:
        out, stderr = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert stderr == "recollect train: there is no file run.toml\n"
