"""Papers that several presets cite, and what all recurrent presets share."""

from __future__ import annotations

import math
from dataclasses import replace

from recollect.layer.options import GateOptions
from recollect.zoo.preset import Reference

__all__ = [
    "AM",
    "ATLAS",
    "BEYOND",
    "COMMON_LAYER",
    "FORGETFUL",
    "FREE_LENGTHS",
    "HALF_LOSS",
    "INNER_BATCHES",
    "KEY_OVERLAP",
    "LOGSIGMOID_DECAY",
    "MIRAS",
    "NEARLY_ALL",
    "NORMALIZED_STEPS",
    "REPEATED",
    "SILENT",
    "SLOW",
    "TITANS",
    "TTR",
    "TTT",
    "UNDER_A_NORM",
    "limited_rate",
]


def TTR(where: str) -> Reference:
    """Wang et al., Test-time regression."""
    return Reference(
        paper="Wang et al., Test-time regression: a unifying framework for designing sequence "
        "models with associative memory",
        year=2025,
        where=where,
    )


def MIRAS(where: str) -> Reference:
    """Behrouz et al., It's All Connected."""
    return Reference(
        paper="Behrouz et al., It's All Connected: a journey through test-time memorization, "
        "attentional bias, retention, and online optimization",
        year=2025,
        where=where,
    )


def AM(where: str) -> Reference:
    """Zhong et al., Understanding Transformer from the perspective of associative memory."""
    return Reference(
        paper="Zhong et al., Understanding Transformer from the perspective of associative memory",
        year=2025,
        where=where,
    )


def ATLAS(where: str) -> Reference:
    """Behrouz et al., Atlas."""
    return Reference(
        paper="Behrouz et al., Atlas: learning to optimally memorize the context at test time",
        year=2025,
        where=where,
    )


def TITANS(where: str) -> Reference:
    """Behrouz et al., Titans."""
    return Reference(
        paper="Behrouz et al., Titans: learning to memorize at test time", year=2024, where=where
    )


def TTT(where: str) -> Reference:
    """Sun et al., Learning to (learn at test time)."""
    return Reference(
        paper="Sun et al., Learning to (learn at test time): RNNs with expressive hidden states",
        year=2024,
        where=where,
    )


# Deviations that several presets share: one sentence each.
HALF_LOSS = "The loss has a factor ½ that the source does not print."
COMMON_LAYER = (
    "The layer around the memory is the common one: short convolution, unit queries and keys, "
    "output norm and gate."
)
FREE_LENGTHS = "The layer is the common one, without unit queries and keys."
LOGSIGMOID_DECAY = "The decay is log α = logsigmoid(linear(x)) in place of −a softplus(linear(x))."
INNER_BATCHES = "Gradients are taken at the start of inner batches of 16 tokens."
NORMALIZED_STEPS = (
    "Each gradient is scaled by ρ, so that η_t = 1 corrects the error of its association "
    "(Polyak's step where the loss is not squared)."
)
KEY_OVERLAP = "r_t reduces η_t by the overlap of the key with earlier keys of the inner batch."


def limited_rate(rate: GateOptions) -> str:
    """Return the deviation that a rate in units of the stability limit is.

    Args:
        rate: options of the gate, in the unit ``"stability_limit"``.
    """
    low = 0.0 if rate.low is None else rate.low
    high = 1.0 if rate.high is None else rate.high
    init = 0.5 if rate.init is None else rate.init
    return (
        f"η_t is the stability limit times a gate between {low:g} and {high:g} that starts at "
        f"{init:g}."
    )


SLOW = GateOptions(init=math.log(0.999), head_spread=4.0)
"""Decays of deep memories start slow: 250 to 4000 tokens.

Every map of a perceptron decays, so what it says fades as a power of α; and under a layer norm,
which undoes any scale, maps that have faded have steep gradients: an inner step then overshoots.
"""

FORGETFUL = replace(SLOW, init=math.log(0.98))
"""Decays of memories beside a base, 12 to 200 tokens: nothing fades with them but what was written.
"""

NEARLY_ALL = GateOptions(unit="stability_limit", init=0.9)
"""Rates of deep memories without momentum or a window: at the start each token is written once and
alone, and a smaller share of its error stays under the noise of the initial memory. The others
begin at one half, where every share of the stability limit begins (`docs/design/steps.md`)."""

BEYOND = GateOptions(unit="stability_limit", init=1.5, low=0.2, high=2.0)
"""Rates of memories under a norm, which lets nothing diverge beyond the limit: what is written then
stands out of the noise of the initial memory and of what was written before, and a rate of 1 turns
what a norm says half of the way to a long value. A share that closed would not open again, so it
stays above a fifth of the limit."""

REPEATED = GateOptions(unit="stability_limit", init=0.5, low=0.2)
"""Rates under a norm where a window writes a token again; the rest is as `BEYOND`."""

UNDER_A_NORM = {"log_decay": SLOW, "norm_weight": GateOptions(init=0.7)}
"""An inner norm bounds what a memory says. It begins as long as a layer's values are, so that their
errors can be corrected at all."""

SILENT = 0.01
"""`LayerOptions.last_map_init_scale` under a norm, which makes whatever the last map says as long
as a value. From a hundredth the norm's ε halves that until something is written; where larger
starts help and where they do not: `docs/design/steps.md`."""
