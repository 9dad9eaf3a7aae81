"""Signals that ask a process to end, taken as an interrupt is, so that what is finished is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = ["ENDINGS", "Ended", "answered", "deferred", "received"]

ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""What a scheduler, a shutdown or a terminal that closes sends."""


class Ended(KeyboardInterrupt):
    """A signal asked this process to end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


received: list[int] = []
"""Signals that were answered in here, in order."""


@contextmanager
def answered(
    numbers: tuple[int, ...],
    answer: Callable[[int, FrameType | None], None],
    *,
    default: bool = False,
) -> Iterator[None]:
    """Answer signals inside; elsewhere than in the main thread nothing is changed.

    Args:
        numbers: of the signals. One that is ignored (``nohup``) stays so.
        answer: called with the signal.
        default: also where no Python code answered before.
    """

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        answer(number, frame)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            old = signal.getsignal(number)
            if callable(old) or (default and old == signal.SIG_DFL):
                before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, nothing interrupts; what came is answered at the end, as it would have been."""
    seen: list[int] = []
    numbers = (signal.SIGINT, *ENDINGS)
    before = {number: signal.getsignal(number) for number in numbers}
    with answered(numbers, lambda number, frame: seen.append(number)):
        yield
    for number in dict.fromkeys(seen):
        with suppress(TypeError):  # it was no Python code that answered
            before[number](number, None)  # type: ignore[operator]
