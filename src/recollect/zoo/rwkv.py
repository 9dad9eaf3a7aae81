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
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import ATLAS, MIRAS, TTR, Paper

__all__ = ["rwkv6", "rwkv7"]

_PROBE_FROM_KEY = Tie(target="probe", source="k", rule="direction")
_KEY_BLENDED_WITH_ERASE = Tie(target="k", source="erase", rule="blend")
_PLAIN_LAYER = LayerOptions(conv_size=0, conv_activation="none", qk_norm="none")


@preset(
    "RWKV-6 (Finch)",
    rule="M_t = M_(t−1) Diag(w_t) + v_t k_tᵀ,  y_t = (M_(t−1) + v_t (u ⊙ k_t)ᵀ) q_t",
    references=(
        Paper("Peng et al., Eagle and Finch", 2024).at("eqs. 16–19"),
        TTR.at("section 3.1"),
    ),
    fidelity=exact(
        "Finch's time mixing: w = exp(−exp(·)) low-rank, bonus u, shifts from the token",
        layer="The shift of each gate has its own low-rank map.\n"
        "The output norm is RMS per head; the authors have a group norm.",
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
        _PLAIN_LAYER,
        token_shift="input",
        gate_options={"log_decay": GateOptions(activation="exp", rank=64)},
    )


@preset(
    "RWKV-7 (Goose)",
    rule="M_t = M_(t−1)(Diag(w_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v_t k̃_tᵀ",
    references=(
        Paper("Peng et al., RWKV-7 Goose", 2025).at("eqs. 3–22"),
        MIRAS.at("table 1"),
        ATLAS.at("table 1"),
    ),
    fidelity=exact(
        "the official recurrence: erase −κ̂, a ⊙ κ̂; w = exp(−e^(−1/2) σ(·)), k̃ and κ̂ of k",
        other_forms="MIRAS and ATLAS print two other forms; MIRAS's is this one at κ̂ = k and a "
        "= β α.",
        layer="Values are not mixed with those of the first layer.\n"
        "The output norm is RMS per head and its gate SiLU; the authors have a group norm.",
    ),
)
def rwkv7() -> tuple[Recipe, LayerOptions]:
    """The erasure has its own direction and rate, on a memory that decays by channel."""
    slow = GateOptions(activation="sigmoid", low=-math.exp(-0.5), high=0.0, rank=64)
    return Recipe(
        memory=Matrix(read=Read(bonus="learned")),
        bias=L2(probe=Probe(at="token", write="probe", per="key")),
        retention=Decay(per="key"),
        algorithm=GradientDescent(lr=1.0),
    ), replace(
        _PLAIN_LAYER,
        token_shift="learned",
        gate_options={"log_decay": slow, "erase": GateOptions(rank=64)},
        ties=(_PROBE_FROM_KEY, _KEY_BLENDED_WITH_ERASE),
    )
