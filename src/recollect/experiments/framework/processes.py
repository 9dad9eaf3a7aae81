"""Work in processes of one thread each, robust to interrupts and to processes that die.

Small models are measured faster so: two processes get more done than one with two threads. A
process does one item after another, for it takes seconds to begin and many an item takes none; each
has a pipe of its own, so that a death tells which item it took along and leaves no lock behind.
"""

from __future__ import annotations

import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, TypeVar, cast

import torch

from recollect.plugins import import_modules, imported_modules
from recollect.report.signals import TERMINATION_SIGNALS, handle_signals

__all__ = ["GLANCE", "Lost", "in_processes", "stopped", "tell"]

Item = TypeVar("Item")
Result = TypeVar("Result")

GLANCE = 0.1
"""Seconds between two looks at whether somebody interrupts."""

_AGAIN = 97
"""Exit status of a process that imported its script and came here before it had begun."""

# Threads of torch do not survive a fork; a fresh process imports everything again.
_SPAWN = get_context("spawn")


@dataclass(frozen=True)
class Lost:
    """Why an item has no result: it could not be sent, or its process died."""

    reason: str


def in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    *,
    hear: Callable[[Any], None] | None = None,
) -> Iterator[tuple[Item, Result | Lost]]:
    """Results as they are done; a process that dies loses its item alone.

    Args:
        work: of one item, in a process with one thread; something that can be pickled, which is
            sent to each process once. Modules that `import_modules` imported here are there too.
        items: taken in their order.
        processes: at most so many.
        hear: given what ``work`` says by `tell`; it may raise `KeyboardInterrupt`. Such work looks
            at `stopped` and, when somebody interrupts, ends early with what it has. Without
            ``hear`` an interrupt ends the processes.

    Raises:
        ValueError: a script that calls this outside of ``if __name__ == "__main__":``.
        KeyboardInterrupt: when all there is has been given; at a second interrupt at once.
        Exception: whatever ``work`` raises; the other processes are ended.
    """
    if getattr(current_process(), "_inheriting", False):
        raise SystemExit(_AGAIN)  # multiprocessing would print a page; the caller says it in a line
    todo = deque(items)
    free: list[_Worker] = []
    busy: dict[Connection, tuple[_Worker, Item]] = {}

    def end() -> None:
        for worker, _ in busy.values():
            worker.process.kill()  # it is sheltered from gentler signals, and writes nothing

    with _interrupts(end) as interrupted:
        try:
            asked = False  # to end
            while busy or (todo and not interrupted.is_set()):
                while todo and len(busy) < processes and not interrupted.is_set():
                    item = todo.popleft()
                    worker = free.pop() if free else _Worker(work)
                    busy[worker.line] = worker, item
                    reason = worker.give(item)
                    if reason is not None:
                        free.append(busy.pop(worker.line)[0])
                        yield item, Lost(reason)
                if interrupted.is_set() and not asked:
                    asked = True
                    end() if hear is None else [worker.stop() for worker, _ in busy.values()]
                for line in cast("list[Connection]", wait(list(busy), GLANCE)):
                    worker, item = busy[line]
                    try:
                        kind, said = line.recv()
                    except (EOFError, OSError):
                        del busy[line]
                        if worker.came_here_again():
                            raise ValueError(
                                "several jobs run in processes of their own, each of which imports "
                                "the calling script again: put what the script does under `if "
                                '__name__ == "__main__":`, or ask for one job'
                            ) from None
                        if not interrupted.is_set():
                            yield item, Lost(worker.how_it_died())
                        continue
                    if kind == "begun":
                        worker.begun = True
                    elif kind == "raised":
                        raise said
                    elif kind == "done":
                        free.append(busy.pop(line)[0])
                        yield item, said
                    elif hear is not None:
                        try:
                            hear(said)
                        except KeyboardInterrupt:
                            interrupted.set()
        finally:
            end()
            for worker in (*free, *(worker for worker, _ in busy.values())):
                worker.line.close()
                worker.process.join()
    if interrupted.is_set():
        raise KeyboardInterrupt


class _Worker:
    """A process, seen from here."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.line, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs, work, imported_modules()))
        self.begun = False
        with _sheltered():
            self.process.start()
        theirs.close()  # its end is heard when no other holds it

    def give(self, item: object) -> str | None:
        """Hand an item over, or say why that cannot be."""
        try:
            self.line.send((item,))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"it cannot be sent to another process ({error}); with one job it need not be"
        except OSError:
            pass  # it has died, which the line tells when it is read
        return None

    def stop(self) -> None:
        """Ask it to end; see `stopped`."""
        with suppress(OSError):
            self.line.send(())

    def came_here_again(self) -> bool:
        """Whether it ended because its script would have begun processes of its own."""
        self.process.join()
        return not self.begun and self.process.exitcode == _AGAIN

    def how_it_died(self) -> str:
        """A sentence."""
        self.process.join()
        code = self.process.exitcode
        if code == -9:
            return "its process was killed, most likely for want of memory: take smaller sizes"
        if not self.begun:
            return "its process could not begin, and its own message stands above"
        return f"its process died with exit status {code}" if code else "its process died"


# -- in a process of its own -----------------------------------------------------------------------

_line: Connection


def _serve(
    line: Connection, work: Callable[[Any], Any], modules: Sequence[tuple[str, str]]
) -> None:
    """Do one item after another, with one thread, until there is none."""
    global _line
    _line = line
    torch.set_num_threads(1)
    line.send(("begun", None))
    try:
        for name, folder in modules:
            import_modules([name], folder=folder)
    except ValueError as error:
        line.send(("raised", error))
    try:
        while message := line.recv():
            try:
                answer = "done", work(*message)
            except BaseException as error:
                answer = "raised", _sendable(error)
            line.send(answer)
    except (EOFError, BrokenPipeError):
        pass


def _sendable(error: BaseException) -> BaseException:
    """The error with its traceback as a note; in plain words where it would not arrive."""
    note = f"in a process of its own:\n{traceback.format_exc()}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def tell(message: object) -> None:
    """Say something to the process that handed the work over."""
    _line.send(("told", message))


def stopped() -> bool:
    """Whether work is asked to end early: somebody interrupts."""
    return _line.poll()


# -- interrupts ------------------------------------------------------------------------------------


@contextmanager
def _sheltered() -> Iterator[None]:
    """Processes that start in here see no signal that asks to end; `_Worker.stop` does it.

    A terminal or a scheduler sends it to all processes at once.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *TERMINATION_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupts(end: Callable[[], None]) -> Iterator[threading.Event]:
    """The first interrupt sets the event, to be looked at where nothing can be lost.

    So does a signal that ends a process, where Python code answers it. The second ends the
    processes and is raised.
    """
    seen = threading.Event()
    numbers = (signal.SIGINT, *TERMINATION_SIGNALS)

    def note(number: int, frame: FrameType | None) -> None:
        if seen.is_set():
            end()
            raise KeyboardInterrupt
        seen.set()

    with handle_signals(numbers, note):
        yield seen
