"""Work done in processes of one thread each, which may be interrupted and may die.

Small models are measured faster so: two processes get more done than one with two threads.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
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
        enter, told: called as ``enter(*told)`` when a process begins.
        glance: called here now and then, to hand on what the processes said; it may raise
            `KeyboardInterrupt`.
        stop: a flag of shared memory, which is set when somebody interrupts; work that heeds it
            ends early with what it has. Without one an interrupt ends the processes.
    """

    enter: Callable[..., None] | None = None
    told: tuple[Any, ...] = ()
    glance: Callable[[], None] | None = None
    stop: Any = None


def _nothing(context: SpawnContext) -> Link:
    return Link()


@dataclass(frozen=True)
class Lost:
    """Why an item has no result: it could not be sent, or its process died twice."""

    reason: str


def in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    *,
    link: Callable[[SpawnContext], Link] = _nothing,
) -> Iterator[tuple[Item, Result | Lost]]:
    """Results as they are done. A keyboard interrupt is raised when all there is has been given.

    A process that dies takes its pool with it: what was lost is done again, each item alone.

    Args:
        work: of one item, in a process of its own with one thread; a function of a module.
        items: taken in their order.
        processes: at most so many.
        link: made anew for every pool, since a process that dies may hold a lock.

    Raises:
        Exception: whatever ``work`` raises; the other processes are ended.
    """
    sendable: list[Item] = []
    for item in items:
        reason = _unsendable(item)
        if reason is None:
            sendable.append(item)
        else:
            yield item, Lost(reason)
    lost = yield from _Pool(work, min(processes, len(sendable)), link).results(sendable)
    for item in lost:
        if (yield from _Pool(work, 1, link).results([item])):
            yield (
                item,
                Lost("its process died, most likely for want of memory; try smaller sizes"),
            )


def _unsendable(item: object) -> str | None:
    try:
        pickle.dumps(item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"it cannot be sent to another process ({error}); without --jobs it need not be"
    return None


def _begin(enter: Callable[..., None] | None, told: tuple[Any, ...]) -> None:
    """Several processes with one thread each use the cores better than one with many."""
    torch.set_num_threads(1)
    if enter is not None:
        enter(*told)


class _Pool(Generic[Item, Result]):
    """One pool, from its first process to its last."""

    def __init__(
        self,
        work: Callable[[Item], Result],
        processes: int,
        link: Callable[[SpawnContext], Link],
    ) -> None:
        self.work, self.processes, self.link = work, processes, link
        self.others = set(multiprocessing.active_children())

    def results(self, items: Sequence[Item]) -> Generator[tuple[Item, Result], None, list[Item]]:
        """Give results; return the items that were lost because one of the processes died."""
        if not items:
            return []
        # Threads of torch do not survive a fork; a fresh process imports everything again.
        context = multiprocessing.get_context("spawn")
        link = self.link(context)
        pool = ProcessPoolExecutor(
            self.processes, context, initializer=_begin, initargs=(link.enter, link.told)
        )
        waiting: dict[Future[Result], Item] = {}
        lost: list[Item] = []
        ended = False
        with _interrupts(self.terminate) as interrupted:
            try:
                with _sheltered():
                    for item in items:
                        waiting[pool.submit(self.work, item)] = item
                while waiting:
                    done, _ = wait(waiting, GLANCE, FIRST_COMPLETED)
                    try:
                        if link.glance is not None:
                            link.glance()
                    except KeyboardInterrupt:
                        interrupted.set()
                    if interrupted.is_set() and not ended:
                        ended = True
                        for future in [future for future in waiting if future.cancel()]:
                            del waiting[future]
                        self.end(link)
                    for future in done & waiting.keys():
                        item = waiting.pop(future)
                        try:
                            result = future.result()
                        except BrokenProcessPool:
                            lost.append(item)
                            continue
                        yield item, result
            finally:
                if waiting:
                    self.end(link)
                pool.shutdown(cancel_futures=True)
            if interrupted.is_set():
                raise KeyboardInterrupt
        return lost

    def end(self, link: Link) -> None:
        """Ask the processes to end, or end them where they do not listen."""
        if link.stop is not None:
            link.stop.value = 1
        else:
            self.terminate()

    def terminate(self) -> None:
        """End the processes of this pool, and no others."""
        for process in set(multiprocessing.active_children()) - self.others:
            process.terminate()


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
