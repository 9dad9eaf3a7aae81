"""Work in processes: results, processes that die, interrupts, and other children left alone."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any

import pytest

from recollect.experiments.framework.processes import Link, Lost, in_processes


class Fatal:
    """Ends the process that unpacks it."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (self.status,)


def test_a_process_that_dies_loses_only_its_own_item() -> None:
    fatal, unsendable = Fatal(7), lambda: None
    items: list[Any] = [4.0, fatal, unsendable, 9.0, 16.0, 25.0]
    found = dict(in_processes(math.sqrt, items, 2))
    assert [found[x] for x in (4.0, 9.0, 16.0, 25.0)] == [2.0, 3.0, 4.0, 5.0]
    assert found[fatal] == Lost("its process died with exit status 7")
    assert "cannot be sent to another process" in found[unsendable].reason


def test_what_has_not_begun_goes_on_in_one_pool() -> None:
    """Those on their way with the fatal one are done alone; the others do not pay for it."""
    pools = []

    def link(context: SpawnContext) -> Link:
        pools.append(context)
        return Link()

    items: list[Any] = [Fatal(7), *map(float, range(10))]
    found = [result for _, result in in_processes(math.sqrt, items, 2, link=link)]
    assert sum(isinstance(result, Lost) for result in found) == 1
    assert len(found) == 11
    assert len(pools) <= 4


def test_a_death_is_seen_while_others_are_busy() -> None:
    """Not when they are done: the other would sleep for days."""
    pools = []

    def poll() -> None:
        if len(pools) > 1:
            raise KeyboardInterrupt

    def link(context: SpawnContext) -> Link:
        pools.append(context)
        return Link(poll=poll)

    items: list[Any] = [1e6, Fatal(7)]
    with pytest.raises(KeyboardInterrupt):
        list(in_processes(time.sleep, items, 2, link=link))


def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="math domain error"):
        list(in_processes(math.sqrt, [-1.0, 4.0], 2))


def by_a_watcher() -> None:
    raise KeyboardInterrupt


def by_a_signal() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("presses", "listens"),
    [([by_a_watcher], False), ([by_a_signal], False), ([by_a_signal, by_a_signal], True)],
    ids=["watcher", "signal", "second signal"],
)
def test_an_interrupt_ends_what_would_sleep_for_days(
    presses: list[Callable[[], None]], listens: bool
) -> None:
    """Work that is given a flag and ignores it ends at the second; other children go on."""
    before = set(multiprocessing.active_children())
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1e6,))
    other.start()
    given: list[float] = []
    left = iter(presses)

    def link(context: SpawnContext) -> Link:
        def poll() -> None:
            if given and (press := next(left, None)) is not None:
                press()

        return Link(poll=poll, stop=context.Value("b", 0, lock=False) if listens else None)

    items = [0.0, 1e6, 1e6, 1e6, 1e6, 1e6]
    try:
        with pytest.raises(KeyboardInterrupt):
            given.extend(x for x, _ in in_processes(time.sleep, items, 2, link=link))
        assert given == [0.0]
        assert next(left, None) is None
        assert other.is_alive()
        assert set(multiprocessing.active_children()) - before == {other}
    finally:
        other.terminate()
        other.join()


def test_an_interrupt_that_the_shell_ignores_stays_ignored() -> None:
    presses = iter([by_a_signal])

    def poll() -> None:
        if (press := next(presses, None)) is not None:
            press()

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = dict(in_processes(math.sqrt, [4.0, 9.0], 1, link=lambda _: Link(poll=poll)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == {4.0: 2.0, 9.0: 3.0}
    assert next(presses, None) is None
