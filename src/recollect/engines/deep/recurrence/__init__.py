"""The recurrence over inner batches as one Triton kernel for each direction.

`kernels` replaces `chain.forward` and `chain.backward` for a chain of two maps, the first widening
and the second narrowing: all inner batches of a group take one launch, with one program per memory.
The end is affine or a layer norm (`chain.ends`), with or without momentum, decay and normalized
steps. Reads remain products of all batches at once (`chain.reads`).

`runner_of` selects it on CUDA for float32 states. Everything else takes `chain.forward` and
`chain.backward`, and so does a device on which the trial of `trial` fails.
"""

from recollect.engines.deep.recurrence.launch import LAUNCHERS, TUNING, runner_of
from recollect.engines.deep.recurrence.runner import RecurrenceRunner
from recollect.engines.deep.recurrence.trial import agrees

__all__ = ["LAUNCHERS", "TUNING", "RecurrenceRunner", "agrees", "runner_of"]
