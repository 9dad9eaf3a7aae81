"""RWKV: decays per channel from the token, token shifts, and a bonus for the current token.

Examples:
    >>> rc.zoo.names("rwkv")
    ['rwkv6', 'rwkv7']
    >>> print(rc.zoo.get("rwkv6").rule)
    M_t = M_(t−1) Diag(w_t) + v_t k_tᵀ,  y_t = (M_(t−1) + v_t (u ⊙ k_t)ᵀ) q_t
"""

from __future__ import annotations

import math
from dataclasses import replace

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.base import Probe
from recollect.choices.bias.losses import L2, DotProduct
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import ATLAS, MIRAS, TTR

__all__ = ["rwkv6", "rwkv7"]

_DIRECTION = Tie(target="probe", source="k", rule="direction")
_BLEND = Tie(target="k", source="erase", rule="blend")
_BARE = LayerOptions(conv_size=0, conv_activation="none", qk_norm="none")


@preset(
    "RWKV-6 (Finch)",
    row=31,
    rule="M_t = M_(t−1) Diag(w_t) + v_t k_tᵀ,  y_t = (M_(t−1) + v_t (u ⊙ k_t)ᵀ) q_t",
    references=(
        Reference(paper="Peng et al., Eagle and Finch", year=2024, where="eqs. 16–19"),
        TTR("section 3.1"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Finch's time mixing: w = exp(−exp(·)) low-rank, bonus u, shifts from the token",
        deviations=(
            "The shift of each gate has a low-rank map of its own.",
            "The output norm is RMS per head; the authors have a group norm.",
        ),
    ),
)
def rwkv6() -> tuple[Recipe, LayerOptions]:
    """The memory is read before it is written, and the current token gets a bonus."""
    return Recipe(
        memory=Matrix(read=Read(when="before", bonus="learned")),
        bias=DotProduct(),
        retention=Decay(per="key"),
        algorithm=GradientDescent(lr=1.0),
    ), replace(
        _BARE,
        token_shift="input",
        gate_options={"log_decay": GateOptions(activation="exp", rank=64)},
    )


@preset(
    "RWKV-7 (Goose)",
    row=42,
    rule="M_t = M_(t−1)(Diag(w_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v_t k̃_tᵀ",
    references=(
        Reference(paper="Peng et al., RWKV-7 Goose", year=2025, where="eqs. 3–22"),
        MIRAS("table 1"),
        ATLAS("table 1"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="the official recurrence: erase −κ̂, a ⊙ κ̂; w = exp(−e^(−1/2) σ(·)), k̃ and κ̂ of k",
        deviations=(
            "MIRAS and ATLAS print two other forms; MIRAS's is this one at κ̂ = k and a = β α.",
            "Values are not mixed with those of the first layer.",
            "The output norm is RMS per head and its gate SiLU; the authors have a group norm.",
        ),
    ),
)
def rwkv7() -> tuple[Recipe, LayerOptions]:
    """What is erased has a direction and a rate of its own, on a memory that decays by channel."""
    slow = GateOptions(activation="sigmoid", low=-math.exp(-0.5), high=0.0, rank=64)
    return Recipe(
        memory=Matrix(read=Read(bonus="learned")),
        bias=L2(probe=Probe(at="token", write="probe", per="key")),
        retention=Decay(per="key"),
        algorithm=GradientDescent(lr=1.0),
    ), replace(
        _BARE,
        token_shift="learned",
        gate_options={"log_decay": slow, "erase": GateOptions(rank=64)},
        ties=(_DIRECTION, _BLEND),
    )
