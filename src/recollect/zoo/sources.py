"""Papers that several presets cite, and what all recurrent presets share."""

from __future__ import annotations

import math
from dataclasses import replace

from recollect.layer.options import GateOptions
from recollect.zoo.preset import Reference

__all__ = [
    "AM",
    "ATLAS",
    "COMMON",
    "FORGETFUL",
    "HALF",
    "MIRAS",
    "MODERATE",
    "NEARLY_ALL",
    "NORMALISED",
    "SLOW",
    "TITANS",
    "TTR",
    "TTT",
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


HALF = "our loss is half of the printed one, which is a factor of the step"
COMMON = (
    "the layer around the memory is the common one (short convolution, unit queries and keys, "
    "output norm and gate), so that recipes are compared and not their surroundings"
)
SLOW = GateOptions(init=math.log(0.999), spread=4.0)
"""Decays of deep memories start slow: 250 to 4000 tokens.

Every map of a perceptron decays, so what it says fades as a power of α; and under a layer norm,
which undoes any scale, maps that have faded have steep gradients: an inner step then overshoots.
"""

MODERATE = replace(SLOW, temperature=16.0)
"""Decays of perceptrons without an inner norm start as slow and stay moderate: log α is a sixteenth
of a log sigmoid, so that an inner batch of 16 tokens keeps the geometric mean of 16 sigmoids.

A step that is to correct an error in maps that have faded between two gradients overshoots: to
first order they move nothing, and what they are given at once multiplies (`docs/design/steps.md`).
A norm would bound what they say.
"""

FORGETFUL = replace(SLOW, init=math.log(0.98))
"""Decays of memories beside a base, 12 to 200 tokens: nothing fades with them but what was written.
"""

NEARLY_ALL = GateOptions(unit="share", init=0.9)
"""Rates of deep memories without momentum or a window: at the start each token is written once and
alone, and a smaller share of its error stays under the noise of the initial memory. The others
begin at one half, where every share of the stability limit begins (`docs/design/steps.md`)."""

NORMALISED = (
    "the gradient of every association is scaled by ρ, so that a rate of 1 corrects it (normalised "
    "least mean squares through the network; Polyak's step where the loss is another), and η_t is "
    "a share of the limit beyond which a repeated association diverges, one half at the start "
    "unless told: how η_t is made is left to the layer, and none of its numbers is of a width; "
    "r_t, where it stands, is what earlier keys of the inner batch leave of a rate"
)
