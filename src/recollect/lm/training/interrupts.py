"""Interrupts of a run: the step is finished and a checkpoint is written before the run ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from recollect.lm.training.trainer import RecollectTrainer
from recollect.report.signals import TERMINATION_SIGNALS, TerminationRequested, handle_signals

__all__ = ["TrainingInterrupted", "stop_after_step"]

_DUPLICATE_SIGNAL_SECONDS = 5.0
"""Time in which a launcher repeats an interrupt that the terminal sent to all processes."""


class TrainingInterrupted(KeyboardInterrupt):
    """A run has been interrupted, and has written the checkpoint in the folder ``checkpoint``."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(
            f"interrupted: {checkpoint} is complete, and --resume (resume=True) continues from it"
        )
        self.checkpoint = checkpoint


class _StopCallback(TrainerCallback):
    """Saves a checkpoint and ends training after the step in which a stop is requested."""

    def __init__(self, trainer: RecollectTrainer) -> None:
        self.trainer, self.stop_requested, self.requested_at = trainer, False, 0.0

    def request_stop(self) -> None:
        """Request the end of the run after this step."""
        if not self.stop_requested:
            self.stop_requested, self.requested_at = True, time.monotonic()
            self.trainer.request_stop()

    def is_second_request(self) -> bool:
        """Whether a signal is a second request, and not a copy of the first from a launcher."""
        is_recent = time.monotonic() - self.requested_at < _DUPLICATE_SIGNAL_SECONDS
        return self.stop_requested and not (self.trainer.args.world_size > 1 and is_recent)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.should_stop and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            self.request_stop()


@contextmanager
def stop_after_step(trainer: RecollectTrainer) -> Iterator[None]:
    """Finish the step after a first interrupt, SIGTERM or SIGHUP; end at once after a second one.

    Raises TrainingInterrupted if the run has ended before its last step, with a checkpoint.
    """
    callback = _StopCallback(trainer)
    trainer.add_callback(callback)

    def handle_signal(number: int, frame: FrameType | None) -> None:
        if callback.is_second_request():
            raise KeyboardInterrupt if number == signal.SIGINT else TerminationRequested(number)
        callback.request_stop()

    with (
        handle_signals((signal.SIGINT,), handle_signal),
        handle_signals(TERMINATION_SIGNALS, handle_signal, default=True),
    ):
        yield
    state = trainer.state
    if callback.stop_requested and state.global_step < state.max_steps:
        folder = Path(str(trainer.args.output_dir))
        raise TrainingInterrupted(folder / f"checkpoint-{state.global_step}")
