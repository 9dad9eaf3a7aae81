"""What is known about associative memories, as functions that agree with what is measured.

| module | says |
|---|---|
| `snr` | how noisy a retrieval is (AM 2.1) |
| `capacity` | how many pairs a memory stores (ATLAS 3.1) |
| `norms` | how large an output can be (TTR 13) |
| `recurrence` | S_t = A S B + C and its objective (AM 35, 36) |
| `limits` | what is left of the context after many tokens (AM 2.2.2) |
| `viewpoints` | FTRL and learning–retaining are one (MIRAS 3.2) |
| `exchange` | when exchanged states are followed exactly (AM theorem 1) |
| `conditioning` | how errors of similarities spread (AM 50–52) |
| `findings` | which of these speak of a given recipe |

Examples:
    >>> rc.theory.inverse_snr("linear", others=32, size=64)
    0.5
"""

from recollect.theory.capacity import (
    Capacity,
    capacity,
    capacity_bound,
    feature_rank,
    fit_error,
    stated_bound,
    stream_error,
)
from recollect.theory.conditioning import Conditioning, conditioning
from recollect.theory.exchange import Margin, exchange_margin, wrong_answers
from recollect.theory.findings import findings
from recollect.theory.limits import approach, best_memory, normalized_update_norms
from recollect.theory.norms import linear_attention_growth, output_bound
from recollect.theory.recurrence import GeneralForm, general_form
from recollect.theory.snr import (
    KernelName,
    Sampled,
    averaged_inverse_snr,
    inverse_snr,
    kernel_inverse_snr,
    measured_inverse_snr,
    needed_size,
    recipe_kernel,
    truncation_order,
)
from recollect.theory.viewpoints import (
    Loss,
    ftrl,
    learning_retaining,
    linearized,
    memory_losses,
)

__all__ = [
    "Capacity",
    "Conditioning",
    "GeneralForm",
    "KernelName",
    "Loss",
    "Margin",
    "Sampled",
    "approach",
    "averaged_inverse_snr",
    "best_memory",
    "capacity",
    "capacity_bound",
    "conditioning",
    "exchange_margin",
    "feature_rank",
    "findings",
    "fit_error",
    "ftrl",
    "general_form",
    "inverse_snr",
    "kernel_inverse_snr",
    "learning_retaining",
    "linear_attention_growth",
    "linearized",
    "measured_inverse_snr",
    "memory_losses",
    "needed_size",
    "normalized_update_norms",
    "output_bound",
    "recipe_kernel",
    "stated_bound",
    "stream_error",
    "truncation_order",
    "wrong_answers",
]
