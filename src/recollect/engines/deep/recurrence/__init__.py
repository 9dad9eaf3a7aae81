"""The recurrence over inner batches as one Triton kernel for each direction.

The `kernels` replace `chain.forward` and `chain.backward` for a chain of two maps, the first
widening and the second narrowing. One launch runs all inner batches of a group, with one program
per memory. The output head is affine or a layer norm (`chain.chain.OutputHead`), with or without
momentum, decay and normalized steps. Reads remain products of all batches (`chain.forward`).

`select_runner` selects the kernels on CUDA for float32 states, if the `trial` on the device
succeeds. All other calls use `chain.forward` and `chain.backward`.
"""

from recollect.engines.deep.recurrence.launch import LAUNCHERS, TUNING, select_runner
from recollect.engines.deep.recurrence.runner import RecurrenceRunner
from recollect.engines.deep.recurrence.trial import agrees

__all__ = ["LAUNCHERS", "TUNING", "RecurrenceRunner", "agrees", "select_runner"]
