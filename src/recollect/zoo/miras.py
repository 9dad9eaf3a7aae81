"""MIRAS's own models: MONETA, YAAD and MEMORA, memories with unusual losses and retention.

Examples:
    >>> rc.zoo.names("miras")
    ['moneta', 'moneta_exact', 'yaad', 'memora', 'memora_per_token']
    >>> print(rc.zoo.get("moneta").rule)
    A_t = α_t A_(t−1) − η_t r_t ρ_t ∇ℓ_p(W_(t−1); k_t, v_t),  W_t = A_t / ‖A_t‖_q^(q−2)
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import Huber, Lp
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.choices.retention.links import Lq, Simplex
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, preset
from recollect.zoo.sources import (
    BEYOND,
    COMMON_LAYER,
    INNER_BATCHES,
    KEY_OVERLAP,
    MIRAS,
    NEARLY_ALL,
    NORMALIZED_STEPS,
    SILENT,
    SLOW,
    UNDER_A_NORM,
    limited_rate,
)

__all__ = ["memora", "memora_per_token", "moneta", "moneta_exact", "yaad"]

# x + LN(W_1 gelu(W_2 x)), and α per value channel of low rank (MIRAS 5.3 and 5.4).
_MEMORY = MLP(norm="layer")
_CHANNELS = Decay(per="value")
_DESCENT = GradientDescent(batch_size=16)
_COMMON = (
    "η_t is one number per head; the paper has one per channel.",
    COMMON_LAYER,
)
_LINK_AT_THE_END = (
    "The link acts at the end of an inner batch, inside which the memory is read without it, as "
    "in section 5.4."
)
_SIMPLEX = (
    "The softmax runs over the inputs of each unit; eq. 20 has one sum over all weights, and "
    "eq. 27 leaves it open.",
    "The softmax is scaled by c = 64, with which weights are near 1; eq. 21 has c and eq. 27 does "
    "not.",
)
_MONETA_EQUATION = (
    "A_t = α_t A_(t−1) − η_t ∇ℓ_p(W_(i−1); k_t, v_t)  and  W_t = A_t / ‖A_t‖_q^(q−2)  "
    "(MIRAS eq. 24)"
)
_MEMORA_EQUATION = "W_t = Softmax(α_t log(W_(t−1)) − η_t ∇ℓ_2(W_(t−1); k_t, v_t))  (MIRAS eq. 27)"


_NORMALISED = GradientDescent(batch_size=16, normalized_steps=True, batch_overlap="measured")
_GATES = {"lr": NEARLY_ALL, "log_decay": SLOW}


@preset(
    "MONETA",
    row=48,
    rule="A_t = α_t A_(t−1) − η_t r_t ρ_t ∇ℓ_p(W_(t−1); k_t, v_t),  W_t = A_t / ‖A_t‖_q^(q−2)",
    references=(MIRAS("eqs. 24–25 and 28–29"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 24 as printed, p = 3 and q = 4",
        source_equation=_MONETA_EQUATION,
        deviations=(
            (
                "The link divides by at least 0.1^(q−2): as A_t vanishes, the printed one "
                "grows without bound."
            ),
            "The initial memory is not zero.",
            NORMALIZED_STEPS,
            KEY_OVERLAP,
            limited_rate(BEYOND),
            _LINK_AT_THE_END,
            INNER_BATCHES,
            *_COMMON,
        ),
    ),
)
def moneta() -> tuple[Recipe, LayerOptions]:
    """Large errors count more (ℓ_3), and large weights hold down the rest (L_4)."""
    retention = Lq(q=4, form="as_published", floor=0.1, decay=_CHANNELS, link_every="batch")
    recipe = Recipe(memory=_MEMORY, bias=Lp(p=3), retention=retention, algorithm=_NORMALISED)
    # Cubes of errors make little of small ones: under a norm steps beyond the limit do not diverge.
    return recipe, LayerOptions(gate_options={**UNDER_A_NORM, "lr": BEYOND})


@preset(
    "MONETA with the exact mirror map",
    row=48,
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ_p(W_(t−1); k_t, v_t),  "
    "W_t = sign(A_t)|A_t|^(q−1) / ‖A_t‖_q^(q−2)",
    references=(MIRAS("section 5.2, variant 4, and eq. 25"),),
    fidelity=Fidelity(
        kind="exact",
        source="the mirror map of ½‖W‖²_(q/(q−1)), of which MIRAS eq. 24 prints a simplification",
        source_equation=_MONETA_EQUATION,
        deviations=(
            (
                "The link is the mirror map of ½‖W‖²_(q/(q−1)), of which eq. 24 prints a "
                "simplification."
            ),
            "The link acts at every token, also inside an inner batch.",
            (
                "η_t is a gate between 0 and 30: keys and values 30 to 100 times too long "
                "can diverge, which rc.diagnose reports."
            ),
            INNER_BATCHES,
            *_COMMON,
        ),
    ),
)
def moneta_exact() -> tuple[Recipe, LayerOptions]:
    """MONETA where W is the minimiser that its retention gate defines."""
    retention = Lq(q=4, decay=_CHANNELS)
    recipe = Recipe(memory=_MEMORY, bias=Lp(p=3), retention=retention, algorithm=_DESCENT)
    steps = {"lr": GateOptions(high=30.0, init=15.0), "log_decay": SLOW}
    return recipe, LayerOptions(gate_options=steps, memory_init_scale=800.0)


@preset(
    "YAAD",
    row=49,
    rule="W_t = α_t W_(t−1) − η_t r_t ρ_t (∇ℓ_2 if ‖M(k_t) − v_t‖ ≤ δ_t else δ_t ∇ℓ_1)",
    references=(MIRAS("eqs. 16 and 26"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 26",
        source_equation=(
            "W_t = α_t W_(t−1) − { η_t ∇ℓ_2(W_(t−1); k_t, v_t)      if ‖M(k_t) − v_t‖ ≤ δ_t,\n"
            "                      η_t δ_t ∇ℓ_1(W_(t−1); k_t, v_t)  otherwise  (MIRAS eq. 26)"
        ),
        deviations=(
            (
                "δ_t is compared with the length of the error, so that it is one number per "
                "head; the paper has one per channel."
            ),
            "δ_t starts at 4 √V, beyond the errors of a layer that is learning.",
            NORMALIZED_STEPS,
            KEY_OVERLAP,
            limited_rate(BEYOND),
            INNER_BATCHES,
            *_COMMON,
        ),
    ),
)
def yaad() -> tuple[Recipe, LayerOptions]:
    """Least squares for ordinary tokens, only the sign of the error for extreme ones."""
    recipe = Recipe(memory=_MEMORY, bias=Huber(), retention=_CHANNELS, algorithm=_NORMALISED)
    gates = {**UNDER_A_NORM, "lr": BEYOND, "threshold": GateOptions(unit="value_rms", init=4.0)}
    return recipe, LayerOptions(gate_options=gates, last_map_init_scale=SILENT)


@preset(
    "MEMORA",
    row=50,
    rule="W_t = c softmax(α_t log W_(t−1) − η_t ∇ℓ_2(W_(t−1); k_t, v_t))",
    references=(MIRAS("eqs. 21, 27 and 30–32"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 27, in inner batches as eq. 30",
        source_equation=_MEMORA_EQUATION,
        deviations=(
            *_SIMPLEX,
            (
                "Gradients are taken at the memory after the first token of an inner batch "
                "of 16 tokens, as in eqs. 30–32."
            ),
            _LINK_AT_THE_END,
            *_COMMON,
        ),
    ),
)
def memora() -> tuple[Recipe, LayerOptions]:
    """Weights are probabilities, moved by multiplication."""
    retention = Simplex(scale=64.0, decay=_CHANNELS, link_every="batch")
    recipe = Recipe(memory=_MEMORY, retention=retention, algorithm=_DESCENT)
    steps = {"lr": GateOptions(high=0.25, init=0.125), "log_decay": SLOW}
    return recipe, LayerOptions(gate_options=steps, memory_init_scale=8.0)


@preset(
    "MEMORA, token by token",
    row=50,
    rule="W_t = c softmax(α_t log W_(t−1) − η_t ρ_t ∇ℓ_2(W_(t−1); k_t, v_t))",
    references=(MIRAS("eqs. 21 and 27"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 27",
        source_equation=_MEMORA_EQUATION,
        deviations=(
            *_SIMPLEX,
            (
                "Every token reads c softmax(A_t); inside an inner batch eqs. 30–32, and "
                "memora, read the memory without the softmax."
            ),
            NORMALIZED_STEPS,
            limited_rate(NEARLY_ALL),
            INNER_BATCHES,
            *_COMMON,
        ),
    ),
)
def memora_per_token() -> tuple[Recipe, LayerOptions]:
    """MEMORA as its equation has it: weights are probabilities at every token."""
    retention = Simplex(scale=64.0, decay=_CHANNELS)
    # Of the batch: what larger steps do through the link at every token was not measured.
    step = GradientDescent(batch_size=16, normalized_steps=True)
    recipe = Recipe(memory=_MEMORY, retention=retention, algorithm=step)
    return recipe, LayerOptions(gate_options=_GATES, memory_init_scale=8.0)
