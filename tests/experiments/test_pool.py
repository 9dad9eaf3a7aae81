"""Work in processes: results, processes that die, interrupts, and other children left alone."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from multiprocessing.context import SpawnContext
from typing import Any

import pytest

from recollect.experiments.pool import Link, Lost, in_processes


class Fatal:
    """Ends the process that unpacks it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_a_process_that_dies_loses_only_its_own_item() -> None:
    fatal, unsendable = Fatal(), lambda: None
    found = dict(in_processes(math.sqrt, [4.0, fatal, unsendable, 9.0], 2))  # type: ignore[list-item]
    assert (found.pop(4.0), found.pop(9.0)) == (2.0, 3.0)
    assert isinstance(found[fatal], Lost)
    assert "its process died" in found[fatal].reason
    assert "cannot be sent to another process" in found[unsendable].reason


def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="math domain error"):
        list(in_processes(math.sqrt, [-1.0, 4.0], 2))


def test_an_interrupt_ends_work_that_listens_to_nothing() -> None:
    """It would sleep for days; a child of somebody else's goes on sleeping."""
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1e6,))
    other.start()
    given: list[float] = []

    def link(context: SpawnContext) -> Link:
        def glance() -> None:
            if given:
                raise KeyboardInterrupt

        return Link(glance=glance)

    try:
        with pytest.raises(KeyboardInterrupt):
            given.extend(x for x, _ in in_processes(time.sleep, [0.0, 1e6, 1e6], 2, link=link))
        assert given == [0.0]
        assert multiprocessing.active_children() == [other]
    finally:
        other.terminate()
        other.join()
