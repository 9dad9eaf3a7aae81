"""Results about associative memories, as functions that agree with measurements.

| module | content |
|---|---|
| `snr` | noise of a retrieval (AM 2.1) |
| `capacity` | number of pairs that a memory stores (ATLAS 3.1) |
| `norms` | bounds of outputs (TTR 13) |
| `recurrence` | S_t = A S B + C and its objective (AM 35, 36) |
| `limits` | memories after many tokens (AM 2.2.2) |
| `viewpoints` | FTRL and learning–retaining are equivalent (MIRAS 3.2) |
| `exchange` | exact tracking of exchanged states (AM theorem 1) |
| `conditioning` | propagation of errors of similarities (AM 50–52) |
| `findings` | the results that apply to a recipe |

The library uses `snr`, `capacity` and `findings`, and its experiments use `limits`. Only tests and
the documentation use `norms`, `recurrence`, `viewpoints`, `exchange` and `conditioning`.

Examples:
    >>> rc.theory.inverse_snr("linear", num_distractors=32, size=64)
    0.5
"""

from recollect.theory.capacity import (
    Capacity,
    atlas_upper_bound,
    capacity,
    capacity_bound,
    feature_rank,
    fit_error,
    stream_error,
)
from recollect.theory.conditioning import Conditioning, conditioning
from recollect.theory.exchange import Margin, count_errors, exchange_margin
from recollect.theory.findings import findings
from recollect.theory.limits import best_memory, normalized_update_norms, relative_distance
from recollect.theory.norms import linear_attention_growth, output_bound
from recollect.theory.recurrence import GeneralForm, general_form
from recollect.theory.snr import (
    KernelName,
    Sampled,
    averaged_inverse_snr,
    inverse_snr,
    kernel_inverse_snr,
    measured_inverse_snr,
    min_key_dim,
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
    "atlas_upper_bound",
    "averaged_inverse_snr",
    "best_memory",
    "capacity",
    "capacity_bound",
    "conditioning",
    "count_errors",
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
    "min_key_dim",
    "normalized_update_norms",
    "output_bound",
    "recipe_kernel",
    "relative_distance",
    "stream_error",
    "truncation_order",
]
