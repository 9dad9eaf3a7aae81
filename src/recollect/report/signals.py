"""Signals that request the end of a process, handled like an interrupt from the keyboard."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = [
    "TERMINATION_SIGNALS",
    "TerminationRequested",
    "defer_signals",
    "handle_signals",
    "received_signals",
]

TERMINATION_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that a scheduler, a shutdown or a closing terminal sends."""

received_signals: list[int] = []
"""Signals that `handle_signals` handled, in order."""


class TerminationRequested(KeyboardInterrupt):
    """A signal requested the end of this process.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def handle_signals(
    numbers: tuple[int, ...],
    handler: Callable[[int, FrameType | None], None],
    *,
    default: bool = False,
) -> Iterator[None]:
    """Handle signals inside the block. Threads other than the main thread change no handler.

    An ignored signal (``nohup``) stays ignored. If ``default``, the handler also replaces the
    system's default action.
    """

    def record(number: int, frame: FrameType | None) -> None:
        received_signals.append(number)
        handler(number, frame)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            old = signal.getsignal(number)
            if callable(old) or (default and old == signal.SIG_DFL):
                previous[number] = signal.signal(number, record)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Delay interrupts and termination signals until the end of the block."""
    pending: list[int] = []
    numbers = (signal.SIGINT, *TERMINATION_SIGNALS)
    previous = {number: signal.getsignal(number) for number in numbers}
    with handle_signals(numbers, lambda number, frame: pending.append(number)):
        yield
    for number in dict.fromkeys(pending):
        with suppress(TypeError):  # the handler was not a Python function
            previous[number](number, None)  # type: ignore[operator]
