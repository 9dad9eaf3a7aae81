"""A pool of worker processes with one thread each, robust to interrupts and crashes.

Small models are measured faster so: two processes get more done than one with two threads.
"""

from __future__ import annotations

import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

__all__ = ["GLANCE", "Link", "Lost", "in_processes"]

Item = TypeVar("Item")
Result = TypeVar("Result")

GLANCE = 0.1
"""Seconds between two looks at what the processes say."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What this process and those of one pool have in common.

    Attributes:
        initializer, initargs: called as ``initializer(*initargs)`` when a process begins.
        poll: called here every `GLANCE` seconds or oftener, to hand on what the processes said; it
            may raise `KeyboardInterrupt`.
        stop: a flag of shared memory, which is set when somebody interrupts; work that heeds it
            ends early with what it has. Without one an interrupt ends the processes.
    """

    initializer: Callable[..., None] | None = None
    initargs: tuple[Any, ...] = ()
    poll: Callable[[], None] | None = None
    stop: Any = None


def _nothing(context: SpawnContext) -> Link:
    return Link()


@dataclass(frozen=True)
class Lost:
    """Why an item has no result: it could not be sent, or its process died when it was alone."""

    reason: str


def in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    *,
    link: Callable[[SpawnContext], Link] = _nothing,
) -> Iterator[tuple[Item, Result | Lost]]:
    """Results as they are done.

    A process that dies takes its pool with it: the items that were on their way are done again,
    each alone, and the others go on in a new pool.

    Args:
        work: of one item, in a process of its own with one thread; a function of a module.
        items: taken in their order.
        processes: at most so many.
        link: made anew for every pool, since a process that dies may hold a lock.

    Raises:
        KeyboardInterrupt: when all there is has been given.
        Exception: whatever ``work`` raises; the other processes are ended.
    """
    todo: deque[Item] = deque()
    for item in items:
        reason = _unsendable(item)
        if reason is None:
            todo.append(item)
        else:
            yield item, Lost(reason)
    while todo:
        suspects, _ = yield from _Pool(work, link).results(todo, processes)
        for item in suspects:
            died, reason = yield from _Pool(work, link).results(deque([item]), 1)
            if died:
                yield item, Lost(reason)


def _unsendable(item: object) -> str | None:
    try:
        pickle.dumps(item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"it cannot be sent to another process ({error}); with one job it need not be"
    return None


def _begin(begun: Any, initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    """Several processes with one thread each use the cores better than one with many."""
    begun.value = 1
    torch.set_num_threads(1)
    if initializer is not None:
        initializer(*initargs)


class _Recording(SpawnContext):
    """A context that remembers the processes it made, apart from all other children."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        process = SpawnProcess(*args, **kwargs)
        self.made.append(process)
        return process


class _Pool(Generic[Item, Result]):
    """One pool, from its first process to its last.

    No more items are handed over than there are processes, so that those which a death takes along
    are those on their way.
    """

    def __init__(
        self, work: Callable[[Item], Result], link: Callable[[SpawnContext], Link]
    ) -> None:
        # Threads of torch do not survive a fork; a fresh process imports everything again.
        self.context = _Recording()
        self.work, self.link = work, link(self.context)
        self.begun = self.context.Value("b", 0, lock=False)
        self.own = self.context.made

    def results(
        self, todo: deque[Item], processes: int
    ) -> Generator[tuple[Item, Result], None, tuple[list[Item], str]]:
        """Take items and give results until a process dies.

        Returns:
            The items that were on their way then, and how it died.
        """
        pool = ProcessPoolExecutor(
            processes,
            self.context,
            initializer=_begin,
            initargs=(self.begun, self.link.initializer, self.link.initargs),
        )
        waiting: dict[Future[Result], Item] = {}
        lost: list[Item] = []
        with _interrupts(self.terminate) as interrupted:
            try:
                while waiting or (todo and not (lost or interrupted.is_set())):
                    while todo and len(waiting) < processes and not (lost or interrupted.is_set()):
                        item = todo.popleft()
                        try:
                            with _sheltered():  # a process may be started for it
                                waiting[pool.submit(self.work, item)] = item
                        except BrokenProcessPool:
                            lost.append(item)
                    done, _ = wait(waiting, GLANCE, FIRST_COMPLETED)
                    try:
                        if self.link.poll is not None:
                            self.link.poll()
                    except KeyboardInterrupt:
                        interrupted.set()
                    if interrupted.is_set():
                        self.end()
                    if self.died():
                        # The executor may not look at a process that it started last.
                        self.terminate()
                    for future in [future for future in waiting if future in done]:
                        item = waiting.pop(future)
                        try:
                            result = future.result()
                        except BrokenProcessPool:
                            lost.append(item)
                            continue
                        yield item, result
            finally:
                if waiting:
                    self.end()
                pool.shutdown()
        if interrupted.is_set():
            raise KeyboardInterrupt
        return lost, self.how_it_died()

    def died(self) -> bool:
        """Whether a worker has exited; workers never exit normally before shutdown."""
        return any(process.exitcode is not None for process in self.own)

    def end(self) -> None:
        """Ask the processes to end, or end them where they do not listen."""
        if self.link.stop is not None:
            self.link.stop.value = 1
        else:
            self.terminate()

    def terminate(self) -> None:
        """End the processes of this pool, and no others."""
        for process in self.own:
            process.terminate()

    def how_it_died(self) -> str:
        """A sentence on a process of a pool that broke."""
        codes = {process.exitcode for process in self.own} - {None, 0, -signal.SIGTERM}
        if codes & {-9}:
            return "its process was killed, most likely for want of memory: take smaller sizes"
        if codes and not self.begun.value:
            return (
                "its process could not begin, and its own message stands above; a script calls "
                'this under `if __name__ == "__main__":`, because each process imports it again'
            )
        if codes:
            return f"its process died with exit status {next(iter(codes))}"
        return "its process died"


@contextmanager
def _sheltered() -> Iterator[None]:
    """Processes that start in here never see the terminal's interrupt; `_Pool.end` reaches them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupts(terminate: Callable[[], None]) -> Iterator[threading.Event]:
    """The first interrupt sets the event, to be looked at where nothing can be lost.

    The second ends the processes and is raised.
    """
    seen = threading.Event()
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield seen
        return

    def note(number: int, frame: FrameType | None) -> None:
        if seen.is_set():
            terminate()
            raise KeyboardInterrupt
        seen.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
