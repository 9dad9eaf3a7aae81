"""Linear attention that forgets: fixed decays per head, and decays per channel from the token."""

from __future__ import annotations

from recollect.choices.algorithm import GradientDescent
from recollect.choices.bias import DotProduct
from recollect.choices.retention import Decay
from recollect.options import GateOptions, LayerOptions
from recollect.recipe import Recipe
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import COMMON, MIRAS

__all__ = ["gla", "lightning_attention", "retnet"]

_RULE = "M_t = α M_(t−1) + v_t k_tᵀ"


def _decaying(decay: Decay) -> Recipe:
    return Recipe(bias=DotProduct(), retention=decay, algorithm=GradientDescent(lr=1.0))


@preset(
    "RetNet",
    row=22,
    rule=_RULE,
    references=(
        Reference(paper="Sun et al., Retentive network", year=2023, where="eqs. 5–6 and 8"),
        MIRAS("table 1"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="RetNet eqs. 5–6, α_h = 1 − 2^(−5−h) (eq. 8), rotated queries and keys",
        note=COMMON,
    ),
)
def retnet() -> tuple[Recipe, LayerOptions]:
    """One fixed decay per head, and rotary positions."""
    fixed = GateOptions(source="fixed", schedule="dyadic")
    return _decaying(Decay(rate="static")), LayerOptions(rope=10000.0, gates={"decay": fixed})


@preset(
    "Lightning Attention",
    row=23,
    rule=_RULE,
    references=(
        Reference(paper="Qin et al., TransNormerLLM", year=2023, where="section 3.1"),
        Reference(paper="Qin et al., Lightning Attention-2", year=2024, where="algorithm 1"),
        MIRAS("table 1"),
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS table 1",
        note="the decays are those of the published models, ALiBi's slopes shrinking with the "
        "layer, log α_h = −2^(−8(h+1)/H)(1 − l/L); the paper prints another exponent. Positions in "
        f"the first layer are left out; {COMMON}",
    ),
)
def lightning_attention() -> tuple[Recipe, LayerOptions]:
    """One fixed decay per head, slower in deeper layers."""
    fixed = GateOptions(source="fixed", schedule="alibi")
    return _decaying(Decay(rate="static")), LayerOptions(gates={"decay": fixed})


@preset(
    "gated linear attention (GLA)",
    row=25,
    rule="M_t = M_(t−1) Diag(α_t) + v_t k_tᵀ",
    references=(
        Reference(
            paper="Yang et al., Gated linear attention transformers", year=2023, where="eq. 3"
        ),
        MIRAS("table 1"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="GLA eq. 3, α_t = sigmoid(low-rank linear(x_t))^(1/16)",
        note=f"MIRAS prints the decay on the left, the paper has it over keys; {COMMON}",
    ),
)
def gla() -> tuple[Recipe, LayerOptions]:
    """A decay per key channel from the token."""
    slow = GateOptions(temperature=16.0, rank=16)
    return _decaying(Decay(per="key")), LayerOptions(gates={"log_decay": slow})
