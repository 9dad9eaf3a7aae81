"""`train`: a language model from a plan, on `transformers.Trainer` and Accelerate."""

from recollect.lm.training.train import Progress, Trained, Watch, train

__all__ = ["Progress", "Trained", "Watch", "train"]
