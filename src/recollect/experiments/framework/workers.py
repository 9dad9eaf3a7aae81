"""Worker processes of one thread each, robust to interrupts and to workers that die.

Small models train faster in two processes than in one with two threads. A
`concurrent.futures.ProcessPoolExecutor` would fail all pending items when a worker dies, and passes
neither messages from a worker nor requests to stop. Here each worker has its own pipe.
"""

from __future__ import annotations

import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, TypeVar, cast

import torch

from recollect.plugins import import_modules, imported_modules
from recollect.report.signals import TERMINATION_SIGNALS, handle_signals

__all__ = [
    "POLL_SECONDS",
    "WorkerFailure",
    "run_in_workers",
    "send_to_parent",
    "stop_requested",
]

Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS = 0.1
"""Seconds between two checks for an interrupt."""

_REIMPORTED_MAIN = 97
"""Exit status of a worker that runs a main script without a ``__main__`` guard."""

_SIGNALS = (signal.SIGINT, *TERMINATION_SIGNALS)

# Threads of torch do not survive a fork; a spawned process imports everything again.
_SPAWN = get_context("spawn")


@dataclass(frozen=True)
class WorkerFailure:
    """Reason why an item has no result: it could not be pickled, or its worker died."""

    message: str


def run_in_workers(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    *,
    on_message: Callable[[Any], None] | None = None,
) -> Iterator[tuple[Item, Result | WorkerFailure]]:
    """Yield results as they complete. If a worker dies, only its current item fails.

    Args:
        work: picklable function of one item. Workers first import the modules that
            `import_modules` imported in this process.
        items: inputs of ``work``, in the order in which they start.
        processes: largest number of workers.
        on_message: receives the messages of `send_to_parent`; may raise `KeyboardInterrupt`.
            With it, ``work`` must return early when `stop_requested` is true. Without it, an
            interrupt kills the workers.

    Raises:
        ValueError: the main script has no ``if __name__ == "__main__":``.
        KeyboardInterrupt: after the last result, or at once at the second interrupt.
        Exception: an exception of ``work``; all workers are killed.
    """
    if getattr(current_process(), "_inheriting", False):
        raise SystemExit(_REIMPORTED_MAIN)  # multiprocessing would print a page
    waiting, idle = deque(items), list[_Worker]()
    busy: dict[Connection, tuple[_Worker, Item]] = {}
    interrupted, stop_sent = threading.Event(), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()  # the loop below reads it, so that no result is lost

    with handle_signals(_SIGNALS, interrupt):
        try:
            while busy or (waiting and not interrupted.is_set()):
                while waiting and len(busy) < processes and not interrupted.is_set():
                    item = waiting.popleft()
                    worker = idle.pop() if idle else _Worker(work)
                    if (error := worker.send((item,))) is None:
                        busy[worker.connection] = worker, item
                    else:
                        idle.append(worker)
                        yield item, WorkerFailure(error)
                if interrupted.is_set() and not stop_sent:
                    stop_sent = True
                    for worker, _ in busy.values():
                        worker.process.kill() if on_message is None else worker.send(())
                for connection in cast("list[Connection]", wait(list(busy), POLL_SECONDS)):
                    worker, item = busy[connection]
                    try:
                        kind, content = connection.recv()
                    except (EOFError, OSError):
                        del busy[connection]
                        failure = WorkerFailure(worker.exit_reason())
                        if not interrupted.is_set():
                            yield item, failure
                        continue
                    if kind == "started":
                        worker.started = True
                    elif kind == "error":
                        raise content
                    elif kind == "result":
                        idle.append(busy.pop(connection)[0])
                        yield item, content
                    elif on_message is not None:
                        try:
                            on_message(content)
                        except KeyboardInterrupt:
                            interrupted.set()
        finally:
            for worker in (*idle, *(worker for worker, _ in busy.values())):
                worker.process.kill()  # it writes no files
                worker.process.join()
                worker.connection.close()
    if interrupted.is_set():
        raise KeyboardInterrupt


class _Worker:
    """A process and the parent's end of its pipe."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.started = False
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, work, imported_modules()))
        # A terminal or a scheduler signals all processes at once. Workers inherit a mask that
        # blocks these signals, and stop when the parent requests it.
        mask = getattr(signal, "pthread_sigmask", lambda how, signals: ())  # not on Windows
        previous = mask(getattr(signal, "SIG_BLOCK", 0), _SIGNALS)
        try:
            self.process.start()
        finally:
            mask(getattr(signal, "SIG_SETMASK", 0), previous)
        theirs.close()  # the worker has the only other copy, so its death closes the pipe

    def send(self, message: tuple[()] | tuple[object]) -> str | None:
        """Send an item, or `()` to stop; return the reason if the item cannot be pickled."""
        try:
            self.connection.send(message)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"it cannot be sent to another process ({error}); use one job"
        except OSError:
            pass  # the worker has died, which `recv` reports
        return None

    def exit_reason(self) -> str:
        """Return why the worker exited, as a sentence."""
        self.process.join()
        code = self.process.exitcode
        if code == -9:
            return "its process was killed, most likely for lack of memory: choose smaller sizes"
        if self.started:
            return f"its process died with exit status {code}" if code else "its process died"
        if code == _REIMPORTED_MAIN:
            raise ValueError(
                "several jobs run in worker processes, each of which imports the main script "
                'again: put its code under `if __name__ == "__main__":`, or use one job'
            ) from None
        return "its process could not start, and printed its own message above"


# -- in the worker ---------------------------------------------------------------------------------

_connection: Connection


def _serve(
    connection: Connection, work: Callable[[Any], Any], modules: Sequence[tuple[str, str]]
) -> None:
    """Process items, until the parent closes the pipe or requests a stop."""
    global _connection
    _connection = connection
    torch.set_num_threads(1)
    connection.send(("started", None))
    missing = list(modules)
    with suppress(EOFError, BrokenPipeError):
        while item := connection.recv():
            try:
                while missing:
                    name, folder = missing.pop(0)
                    import_modules([name], folder=folder)
                answer = "result", work(*item)
            except BaseException as error:
                answer = "error", _picklable(error)
            connection.send(answer)


def _picklable(error: BaseException) -> BaseException:
    """Return the error with its traceback as a note, as a RuntimeError if it cannot be pickled."""
    note = f"in a worker process:\n{traceback.format_exc()}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def send_to_parent(message: object) -> None:
    """Send any picklable object to ``on_message`` of `run_in_workers`."""
    _connection.send(("message", message))


def stop_requested() -> bool:
    """Whether the parent was interrupted, so that the work should return early."""
    return _connection.poll()
