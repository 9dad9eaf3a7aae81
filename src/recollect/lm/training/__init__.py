"""Training of language models from a plan."""

from recollect.lm.training.progress import Progress, Trained, TrainObserver
from recollect.lm.training.train import train

__all__ = ["Progress", "TrainObserver", "Trained", "train"]
