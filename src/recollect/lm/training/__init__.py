"""`train`: a language model from a plan, on `transformers.Trainer` and Accelerate.

The Trainer does what it does well: the loop, AdamW and its schedule, clipping, bf16, gradient
accumulation, many devices, logs, and going on from a checkpoint. Ours are only the rows, the
weights that decay, checkpoints that are whole, and a measurement weighted by tokens.
"""

from recollect.lm.training.train import Header, Progress, Trained, Watch, train

__all__ = ["Header", "Progress", "Trained", "Watch", "train"]
