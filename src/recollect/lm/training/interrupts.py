"""Interrupts of a run: the step is finished, a checkpoint is written, and only then it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from recollect.lm.training.atomic_checkpoints import AtomicTrainer
from recollect.report.signals import ENDINGS, Ended, answered

__all__ = ["Interrupted", "finish_step"]


_COPIED = 5.0
"""Seconds within which a launcher hands on the interrupt that a terminal gave to all."""


class Interrupted(KeyboardInterrupt):
    """A run was asked to end, and has written a checkpoint to go on from.

    Attributes:
        checkpoint: its folder.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(
            f"interrupted: {checkpoint} is whole, and --resume (resume=True) goes on from it"
        )
        self.checkpoint = checkpoint


class _Stopper(TrainerCallback):
    """Ends training after the step in which somebody asked, with a checkpoint."""

    def __init__(self, trainer: AtomicTrainer) -> None:
        self.trainer, self.asked, self.since = trainer, False, 0.0

    def ask(self) -> None:
        """Somebody wants the run to end."""
        if not self.asked:
            self.asked, self.since = True, time.monotonic()

    def repeated(self) -> bool:
        """Whether a signal is a second wish, and not the first one's copy from a launcher."""
        several = self.trainer.args.world_size > 1
        return self.asked and not (several and time.monotonic() - self.since < _COPIED)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = self.asked
        if args.world_size > 1:  # all processes end after the same step
            own = [float(asked), float(self.trainer.saving_failed)]
            accelerator: Any = self.trainer.accelerator
            told = accelerator.reduce(torch.tensor(own, device=args.device)).tolist()
            asked = bool(told[0])
            if told[1]:  # in a moment all of them know why
                self.trainer.finish_saving()
        if asked and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            self.ask()


@contextmanager
def finish_step(trainer: AtomicTrainer) -> Iterator[None]:
    """Inside, a first interrupt (or SIGTERM, SIGHUP) waits for the step, and a second does not.

    Raises:
        Interrupted: at the end, when the run was cut short so.
        KeyboardInterrupt: at the second interrupt.
    """
    stopper = _Stopper(trainer)
    trainer.add_callback(stopper)

    def note(number: int, frame: FrameType | None) -> None:
        if stopper.repeated():
            raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)
        stopper.ask()

    with answered((signal.SIGINT,), note), answered(ENDINGS, note, default=True):
        yield
    state = trainer.state
    if stopper.asked and state.global_step < state.max_steps:
        folder = Path(str(trainer.args.output_dir))
        raise Interrupted(folder / f"checkpoint-{state.global_step}")
