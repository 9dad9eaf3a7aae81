"""Linear attention that forgets: fixed decays per head, and decays per channel from the token.

Examples:
    >>> for name in rc.zoo.names("decay"):
    ...     print(f"{name:<28} {rc.zoo.get(name).rule}")
    retnet                       M_t = α M_(t−1) + v_t k_tᵀ
    retnet_xpos                  M_t = M_(t−1) Diag(α ζ^(1/512)) + v_t k_tᵀ
    lightning_attention          M_t = α M_(t−1) + v_t k_tᵀ
    dfw                          M_t = (β_t α_tᵀ) ⊙ M_(t−1) + v_t k_tᵀ
    gla                          M_t = M_(t−1) Diag(α_t) + v_t k_tᵀ
    gateloop                     M_t = M_(t−1) Diag(α_t e^{iθ_t}) + v_t k_tᵀ
    hgrn2                        M_t = M_(t−1) Diag(α_t) + v_t (1 − α_t)ᵀ
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import COMMON_LAYER, FREE_LENGTHS, MIRAS, TTR

__all__ = ["dfw", "gateloop", "gla", "hgrn2", "lightning_attention", "retnet", "retnet_xpos"]

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
        deviations=(COMMON_LAYER,),
    ),
)
def retnet() -> tuple[Recipe, LayerOptions]:
    """One fixed decay per head, and rotary positions."""
    fixed = GateOptions(source="constant", init_schedule="dyadic")
    return _decaying(Decay(alpha="learned")), LayerOptions(
        rope_theta=10000.0, gate_options={"decay": fixed}
    )


@preset(
    "RetNet with xPos",
    row=22,
    rule="M_t = M_(t−1) Diag(α ζ^(1/512)) + v_t k_tᵀ",
    references=(
        Reference(paper="Sun et al., Retentive network", year=2023, where="eqs. 5–6 and 8"),
        Reference(
            paper="Sun et al., A length-extrapolatable transformer", year=2022, where="algorithm 1"
        ),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="RetNet with xPos's scaling of queries by ζ^(n/512) and keys by ζ^(−n/512)",
        deviations=(
            (
                "xPos's scaling is written as a fixed decay per pair of channels, because "
                "ζ^(−n) leaves float32 after some 36,000 tokens."
            ),
            COMMON_LAYER,
        ),
    ),
)
def retnet_xpos() -> tuple[Recipe, LayerOptions]:
    """RetNet whose fast-turning channels fade a little sooner."""
    fixed = GateOptions(source="constant", init_schedule="xpos")
    recipe = _decaying(Decay(per="key", alpha="learned"))
    return recipe, LayerOptions(rope_theta=10000.0, gate_options={"decay": fixed})


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
        deviations=(
            (
                "The decays are those of the published models, log α_h = −2^(−8(h+1)/H)(1 − "
                "l/L); the paper prints another exponent."
            ),
            "The first layer has no positions.",
            COMMON_LAYER,
        ),
    ),
)
def lightning_attention() -> tuple[Recipe, LayerOptions]:
    """One fixed decay per head, slower in deeper layers."""
    fixed = GateOptions(source="constant", init_schedule="alibi")
    return _decaying(Decay(alpha="learned")), LayerOptions(gate_options={"decay": fixed})


@preset(
    "decaying fast weights (DFW)",
    row=24,
    rule="M_t = (β_t α_tᵀ) ⊙ M_(t−1) + v_t k_tᵀ",
    references=(
        Reference(
            paper="Mao, Fine-tuning pre-trained transformers into decaying fast weights",
            year=2022,
            where="section 3",
        ),
        MIRAS("table 1"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS table 1: decays over keys and over values, both from the token",
        deviations=(COMMON_LAYER,),
    ),
)
def dfw() -> tuple[Recipe, LayerOptions]:
    """A decay per key channel and one per value channel."""
    return _decaying(Decay(per="key_value")), LayerOptions()


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
        deviations=(
            (
                "The decay is one of key channels, as in the GLA paper; MIRAS's table 1 "
                "prints it on the left."
            ),
            COMMON_LAYER,
        ),
    ),
)
def gla() -> tuple[Recipe, LayerOptions]:
    """A decay per key channel from the token."""
    slow = GateOptions(temperature=16.0, rank=16)
    return _decaying(Decay(per="key")), LayerOptions(gate_options={"log_decay": slow})


@preset(
    "GateLoop",
    row=26,
    rule="M_t = M_(t−1) Diag(α_t e^{iθ_t}) + v_t k_tᵀ",
    references=(
        Reference(paper="Katsch, GateLoop", year=2023, where="section 3"),
        TTR("section 3.1"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="GateLoop's recurrence with complex α_t = σ(·) e^{iθ_t} from the token; the real "
        "part is read",
        deviations=(
            (
                "The angle θ_t is applied to queries and keys: channels i and i + K/2 are "
                "real and imaginary part."
            ),
            COMMON_LAYER,
        ),
    ),
)
def gateloop() -> tuple[Recipe, LayerOptions]:
    """A memory whose channels decay and turn as the token says."""
    return _decaying(Decay(per="key")), LayerOptions(complex_decay="input")


@preset(
    "HGRN2",
    row=27,
    rule="M_t = M_(t−1) Diag(α_t) + v_t (1 − α_t)ᵀ",
    references=(
        Reference(paper="Qin et al., HGRN2", year=2024, where="eq. 5"),
        MIRAS("table 1"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="HGRN2 eq. 5: keys are what the decay leaves room for",
        deviations=(
            "MIRAS's table 1 calls the bias L1; it is a dot product with k = 1 − α.",
            "Decays have no lower bounds; HGRN2 shares such bounds between layers.",
            FREE_LENGTHS,
        ),
    ),
)
def hgrn2() -> tuple[Recipe, LayerOptions]:
    """Channels write as much as they forget."""
    tie = Tie(target="k", source="log_decay", rule="complement")
    return _decaying(Decay(per="key")), LayerOptions(qk_norm="none", ties=(tie,))
