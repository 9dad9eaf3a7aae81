"""Work in processes: results, processes that die, interrupts, and other child processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recollect.experiments.framework import workers
from recollect.experiments.framework.workers import (
    WorkerFailure,
    run_in_workers,
    send_to_parent,
)


class Fatal:
    """Ends the process that unpickles it."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (self.status,)


def test_process_that_dies_loses_only_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one process starts at a time, and one replaces the one that died."""
    started = []

    class Counted(workers._Worker):
        def __init__(self, work: Any) -> None:
            started.append(work)
            super().__init__(work)

    monkeypatch.setattr(workers, "_Worker", Counted)
    fatal, unsendable = Fatal(7), lambda: None
    numbers = [float(n * n) for n in range(10)]
    items: list[Any] = [fatal, *numbers[:3], unsendable, *numbers[3:]]
    results: dict[Any, Any] = dict(run_in_workers(math.sqrt, items, 1))
    assert len(results) == len(items) and len(started) == 2
    assert [results[x] for x in numbers] == [float(n) for n in range(10)]
    assert results[fatal] == WorkerFailure("its process died with exit status 7")
    assert "cannot be sent to another process" in results[unsendable].message


@pytest.mark.slow
def test_death_is_reported_while_others_are_busy() -> None:
    """Before the other ends, which would sleep for days."""
    fatal = Fatal(7)
    items: list[Any] = [1e6, fatal]
    results = run_in_workers(time.sleep, items, 2)
    assert next(results) == (fatal, WorkerFailure("its process died with exit status 7"))
    results.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_process_that_cannot_start_differs_from_one_that_dies() -> None:
    work: Any = Fatal(3)
    ((_, error),) = run_in_workers(work, [1.0], 1)
    assert isinstance(error, WorkerFailure)
    assert "could not start" in error.message


@pytest.mark.slow
def test_script_without_a_guard_gives_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import math\n"
        "from recollect.experiments.framework.workers import run_in_workers\n"
        "print('begun')\n"
        "try:\n    list(run_in_workers(math.sqrt, [1.0, 4.0], 2))\n"
        "except ValueError as error:\n    print('told:', error)\n"
    )
    finished = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert finished.returncode == 0 and "Traceback" not in finished.stderr, finished.stderr
    messages = [line for line in finished.stdout.splitlines() if line.startswith("told:")]
    assert len(messages) == 1 and 'under `if __name__ == "__main__":`' in messages[0]


@pytest.mark.slow
def test_errors_of_work_are_raised() -> None:
    with pytest.raises(ValueError, match="math domain error"):
        list(run_in_workers(math.sqrt, [-1.0, 4.0], 2))


class Unsendable(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def unsendable(reason: str) -> None:
    raise Unsendable(reason=reason)


@pytest.mark.slow
def test_unpicklable_error_arrives_as_text() -> None:
    with pytest.raises(RuntimeError, match="Unsendable: too deep"):
        list(run_in_workers(unsendable, ["too deep"], 1))


@pytest.mark.slow
def test_messages_arrive_in_order_before_the_result() -> None:
    heard: list[str] = []
    results = run_in_workers(send_to_parent, ["a", "b", "c"], 1, on_message=heard.append)
    counts = [len(heard) for _ in results]
    assert heard == ["a", "b", "c"]
    assert counts == [1, 2, 3]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def only_new_processes_end() -> Iterator[None]:
    """Check that other children continue."""
    initial = set(multiprocessing.active_children())
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1e6,))
    other.start()
    try:
        yield
        assert other.is_alive()
        assert set(multiprocessing.active_children()) - initial == {other}
    finally:
        other.terminate()
        other.join()


def interrupted(press: Callable[[], None], **options: Any) -> list[float]:
    """Return results after an interrupt that follows the first result."""
    results: list[float] = []

    def all_results() -> None:
        for item, _ in run_in_workers(time.sleep, [0.0, 1e6, 1e6, 1e6, 1e6, 1e6], 2, **options):
            results.append(item)
            press()

    with only_new_processes_end(), pytest.raises(KeyboardInterrupt):
        all_results()
    return results


@pytest.mark.slow
def test_interrupt_ends_sleeping_processes() -> None:
    assert interrupted(interrupt) == [0.0]


@pytest.mark.slow
def test_second_interrupt_ends_work_that_ignores_the_first() -> None:
    second = threading.Timer(1.0, interrupt)

    def press() -> None:
        interrupt()
        second.start()

    assert interrupted(press, on_message=print) == [0.0]
    second.join()


@pytest.mark.slow
def test_callback_may_interrupt_and_started_work_is_returned() -> None:
    def on_message(message: str) -> None:
        raise KeyboardInterrupt

    results: list[str] = []

    def run() -> None:
        for item, _ in run_in_workers(send_to_parent, ["a", "b", "c"], 1, on_message=on_message):
            results.append(item)

    with only_new_processes_end():
        with pytest.raises(KeyboardInterrupt):
            run()
        assert results == ["a"]


@pytest.mark.slow
def test_ignored_interrupts_stay_ignored() -> None:
    initial = signal.signal(signal.SIGINT, signal.SIG_IGN)
    actual = {}
    try:
        for item, result in run_in_workers(math.sqrt, [4.0, 9.0], 1):
            actual[item] = result
            interrupt()
    finally:
        signal.signal(signal.SIGINT, initial)
    assert actual == {4.0: 2.0, 9.0: 3.0}
