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
from recollect.zoo.fidelity import exact, reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import MIRAS, TTR, Paper

__all__ = ["dfw", "gateloop", "gla", "hgrn2", "lightning_attention", "retnet", "retnet_xpos"]

_RULE = "M_t = α M_(t−1) + v_t k_tᵀ"


def _decaying(decay: Decay) -> Recipe:
    return Recipe(bias=DotProduct(), retention=decay, algorithm=GradientDescent(lr=1.0))


@preset(
    "RetNet",
    rule=_RULE,
    references=(
        Paper("Sun et al., Retentive network", 2023).at("eqs. 5–6 and 8"),
        MIRAS.at("table 1"),
    ),
    fidelity=exact(
        "RetNet eqs. 5–6, α_h = 1 − 2^(−5−h) (eq. 8), rotated queries and keys", common_layer=True
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
    rule="M_t = M_(t−1) Diag(α ζ^(1/512)) + v_t k_tᵀ",
    references=(
        Paper("Sun et al., Retentive network", 2023).at("eqs. 5–6 and 8"),
        Paper("Sun et al., A length-extrapolatable transformer", 2022).at(
            "algorithm 1", introduces=False
        ),
    ),
    fidelity=exact(
        "RetNet with xPos's scaling of queries by ζ^(n/512) and keys by ζ^(−n/512)",
        decay="xPos's scaling is written as a fixed decay per pair of channels, because ζ^(−n) "
        "leaves float32 after some 36,000 tokens.",
        common_layer=True,
    ),
    twin_of="retnet",
)
def retnet_xpos() -> tuple[Recipe, LayerOptions]:
    """RetNet whose fast-turning channels fade a little sooner."""
    fixed = GateOptions(source="constant", init_schedule="xpos")
    recipe = _decaying(Decay(per="key", alpha="learned"))
    return recipe, LayerOptions(rope_theta=10000.0, gate_options={"decay": fixed})


@preset(
    "Lightning Attention",
    rule=_RULE,
    references=(
        Paper("Qin et al., TransNormerLLM", 2023).at("section 3.1"),
        Paper("Qin et al., Lightning Attention-2", 2024).at("algorithm 1"),
        MIRAS.at("table 1"),
    ),
    fidelity=reconstruction(
        "MIRAS table 1",
        decay="The decays are those of the published models, log α_h = −2^(−8(h+1)/H)(1 − l/L); "
        "the paper prints another exponent.",
        layer="The first layer has no positions.",
        common_layer=True,
    ),
)
def lightning_attention() -> tuple[Recipe, LayerOptions]:
    """One fixed decay per head, slower in deeper layers."""
    fixed = GateOptions(source="constant", init_schedule="alibi")
    return _decaying(Decay(alpha="learned")), LayerOptions(gate_options={"decay": fixed})


@preset(
    "decaying fast weights (DFW)",
    rule="M_t = (β_t α_tᵀ) ⊙ M_(t−1) + v_t k_tᵀ",
    references=(
        Paper("Mao, Fine-tuning pre-trained transformers into decaying fast weights", 2022).at(
            "section 3"
        ),
        MIRAS.at("table 1"),
    ),
    fidelity=exact(
        "MIRAS table 1: decays over keys and over values, both from the token", common_layer=True
    ),
)
def dfw() -> tuple[Recipe, LayerOptions]:
    """A decay per key channel and one per value channel."""
    return _decaying(Decay(per="key_value")), LayerOptions()


@preset(
    "gated linear attention (GLA)",
    rule="M_t = M_(t−1) Diag(α_t) + v_t k_tᵀ",
    references=(
        Paper("Yang et al., Gated linear attention transformers", 2023).at("eq. 3"),
        MIRAS.at("table 1"),
    ),
    fidelity=exact(
        "GLA eq. 3, α_t = sigmoid(low-rank linear(x_t))^(1/16)",
        decay="The decay is one of key channels, as in the GLA paper; MIRAS's table 1 prints it "
        "on the left.",
        common_layer=True,
    ),
)
def gla() -> tuple[Recipe, LayerOptions]:
    """A decay per key channel from the token."""
    slow = GateOptions(temperature=16.0, rank=16)
    return _decaying(Decay(per="key")), LayerOptions(gate_options={"log_decay": slow})


@preset(
    "GateLoop",
    rule="M_t = M_(t−1) Diag(α_t e^{iθ_t}) + v_t k_tᵀ",
    references=(Paper("Katsch, GateLoop", 2023).at("section 3"), TTR.at("section 3.1")),
    fidelity=exact(
        "GateLoop's recurrence with complex α_t = σ(·) e^{iθ_t} from the token; the real "
        "part is read",
        layer="The angle θ_t is applied to queries and keys: channels i and i + K/2 are real and "
        "imaginary part.",
        common_layer=True,
    ),
)
def gateloop() -> tuple[Recipe, LayerOptions]:
    """A memory whose channels decay and turn as the token says."""
    return _decaying(Decay(per="key")), LayerOptions(complex_decay="input")


@preset(
    "HGRN2",
    rule="M_t = M_(t−1) Diag(α_t) + v_t (1 − α_t)ᵀ",
    references=(Paper("Qin et al., HGRN2", 2024).at("eq. 5"), MIRAS.at("table 1")),
    fidelity=exact(
        "HGRN2 eq. 5: keys are what the decay leaves room for",
        other_forms="MIRAS's table 1 calls the bias L1; HGRN2 has a dot product with k = 1 − α.",
        decay="Decays have no lower bounds; HGRN2 shares such bounds between layers.",
        no_qk_norm=True,
    ),
)
def hgrn2() -> tuple[Recipe, LayerOptions]:
    """Channels write as much as they forget."""
    tie = Tie(target="k", source="log_decay", rule="complement")
    return _decaying(Decay(per="key")), LayerOptions(qk_norm="none", ties=(tie,))
