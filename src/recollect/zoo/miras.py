"""MIRAS's own models: MONETA, YAAD and MEMORA, memories with unusual losses and retention.

Examples:
    >>> rc.zoo.names("miras")
    ['moneta', 'moneta_exact', 'yaad', 'memora', 'memora_per_token']
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import Huber, Lp
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.choices.retention.links import Lq, Simplex
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact, reconstruction
from recollect.zoo.preset import decay_from, limit_multiple, preset
from recollect.zoo.references import MIRAS

__all__ = ["memora", "memora_per_token", "moneta", "moneta_exact", "yaad"]

# x + LN(W_1 gelu(W_2 x)), and α per value channel of low rank (MIRAS 5.3 and 5.4).
_MEMORY = MLP(norm="layer")
_CHANNELS = Decay(per="value")
_DESCENT = GradientDescent(batch_size=16)
_LINK_AT_THE_END = (
    "The link acts at the end of an inner batch, inside which the memory is read without it, as "
    "in section 5.4."
)
_SIMPLEX = (
    "The softmax runs over the inputs of each unit; eq. 20 has one sum over all weights, and "
    "eq. 27 leaves it open.\n"
    "The softmax is scaled by c = 64, with which weights are near 1; eq. 21 has c and eq. 27 does "
    "not.\n"
)
_MONETA_EQUATION = (
    "A_t = α_t A_(t−1) − η_t ∇ℓ_p(W_(i−1); k_t, v_t)  and  W_t = A_t / ‖A_t‖_q^(q−2)  "
    "(MIRAS eq. 24)"
)
_MEMORA_EQUATION = "W_t = Softmax(α_t log(W_(t−1)) − η_t ∇ℓ_2(W_(t−1); k_t, v_t))  (MIRAS eq. 27)"
_NORMALIZED_DESCENT = GradientDescent(
    batch_size=16, normalized_steps=True, batch_overlap="measured"
)


@preset(
    "MONETA",
    rule="A_t = α_t A_(t−1) − η_t r_t ρ_t ∇ℓ_p(W_(t−1); k_t, v_t),  W_t = A_t / ‖A_t‖_q^(q−2)",
    references=(MIRAS.at("eqs. 24–25 and 28–29"),),
    fidelity=reconstruction(
        "MIRAS eq. 24 as printed, p = 3 and q = 4",
        source_equation=_MONETA_EQUATION,
        link="The link divides by at least 0.1^(q−2): as A_t vanishes, the printed one grows "
        f"without bound.\n{_LINK_AT_THE_END}",
        initial_memory="The initial memory is not zero.",
        normalized_step=True,
        key_overlap=True,
        inner_batches=16,
        rate_per_head=True,
        common_layer=True,
    ),
)
def moneta() -> tuple[Recipe, LayerOptions]:
    """Large errors count more (ℓ_3), and large weights shrink all weights (L_4)."""
    retention = Lq(q=4, form="as_published", floor=0.1, decay=_CHANNELS, link_every="batch")
    recipe = Recipe(
        memory=_MEMORY, bias=Lp(p=3), retention=retention, algorithm=_NORMALIZED_DESCENT
    )
    # Cubes make small errors smaller. The inner norm bounds outputs, so that rates above the
    # stability limit cannot diverge.
    gates = {
        "lr": limit_multiple(1.5, low=0.2, high=2.0),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=0.7),
    }
    return recipe, LayerOptions(gate_options=gates)


@preset(
    "MONETA with the exact mirror map",
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ_p(W_(t−1); k_t, v_t),  "
    "W_t = sign(A_t)|A_t|^(q−1) / ‖A_t‖_q^(q−2)",
    references=(MIRAS.at("section 5.2, variant 4, and eq. 25"),),
    fidelity=exact(
        "the mirror map of ½‖W‖²_(q/(q−1)), of which MIRAS eq. 24 prints a simplification",
        source_equation=_MONETA_EQUATION,
        link="The link is the mirror map of ½‖W‖²_(q/(q−1)), of which eq. 24 prints a "
        "simplification.\n"
        "The link acts at every token, also inside an inner batch.",
        rate="η_t is a gate between 0 and 30: keys and values 30 to 100 times too long can "
        "diverge, which rc.diagnose reports.",
        inner_batches=16,
        rate_per_head=True,
        common_layer=True,
    ),
    twin_of="moneta",
)
def moneta_exact() -> tuple[Recipe, LayerOptions]:
    """MONETA whose weights minimise the problem of its retention gate."""
    retention = Lq(q=4, decay=_CHANNELS)
    recipe = Recipe(memory=_MEMORY, bias=Lp(p=3), retention=retention, algorithm=_DESCENT)
    gates = {"lr": GateOptions(high=30.0, init=15.0), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates, memory_init_scale=800.0)


@preset(
    "YAAD",
    rule="W_t = α_t W_(t−1) − η_t r_t ρ_t (∇ℓ_2 if ‖M(k_t) − v_t‖ ≤ δ_t else δ_t ∇ℓ_1)",
    references=(MIRAS.at("eqs. 16 and 26"),),
    fidelity=reconstruction(
        "MIRAS eq. 26",
        source_equation="W_t = α_t W_(t−1) − { η_t ∇ℓ_2(W_(t−1); k_t, v_t)      "
        "if ‖M(k_t) − v_t‖ ≤ δ_t,\n"
        "                      η_t δ_t ∇ℓ_1(W_(t−1); k_t, v_t)  otherwise  (MIRAS eq. 26)",
        gates="δ_t is compared with the length of the error, so that it is one number per head; "
        "the paper has one per channel.\n"
        "δ_t starts at 4 √V, beyond the errors of a layer that is learning.",
        normalized_step=True,
        key_overlap=True,
        inner_batches=16,
        rate_per_head=True,
        common_layer=True,
    ),
)
def yaad() -> tuple[Recipe, LayerOptions]:
    """Least squares for ordinary tokens, only the sign of the error for extreme ones."""
    recipe = Recipe(
        memory=_MEMORY, bias=Huber(), retention=_CHANNELS, algorithm=_NORMALIZED_DESCENT
    )
    gates = {
        "lr": limit_multiple(1.5, low=0.2, high=2.0),
        "threshold": GateOptions(unit="value_rms", init=4.0),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=0.7),
    }
    return recipe, LayerOptions(gate_options=gates, last_map_init_scale=0.01)


@preset(
    "MEMORA",
    rule="W_t = c softmax(α_t log W_(t−1) − η_t ∇ℓ_2(W_(t−1); k_t, v_t))",
    references=(MIRAS.at("eqs. 21, 27 and 30–32"),),
    fidelity=reconstruction(
        "MIRAS eq. 27, in inner batches as eq. 30",
        source_equation=_MEMORA_EQUATION,
        link=_SIMPLEX + _LINK_AT_THE_END,
        inner_batches="Gradients are taken at the memory after the first token of an inner batch "
        "of 16 tokens, as in eqs. 30–32.",
        rate_per_head=True,
        common_layer=True,
    ),
)
def memora() -> tuple[Recipe, LayerOptions]:
    """Weights are probabilities, moved by multiplication."""
    retention = Simplex(scale=64.0, decay=_CHANNELS, link_every="batch")
    recipe = Recipe(memory=_MEMORY, retention=retention, algorithm=_DESCENT)
    gates = {"lr": GateOptions(high=0.25, init=0.125), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates, memory_init_scale=8.0)


@preset(
    "MEMORA, token by token",
    rule="W_t = c softmax(α_t log W_(t−1) − η_t ρ_t ∇ℓ_2(W_(t−1); k_t, v_t))",
    references=(MIRAS.at("eqs. 21 and 27"),),
    fidelity=reconstruction(
        "MIRAS eq. 27",
        source_equation=_MEMORA_EQUATION,
        link=f"{_SIMPLEX}Every token reads c softmax(A_t); inside an inner batch eqs. 30–32, and "
        "memora, read the memory without the softmax.",
        normalized_step=True,
        inner_batches=16,
        rate_per_head=True,
        common_layer=True,
    ),
    twin_of="memora",
)
def memora_per_token() -> tuple[Recipe, LayerOptions]:
    """MEMORA whose weights are probabilities at every token, as in its equation."""
    retention = Simplex(scale=64.0, decay=_CHANNELS)
    # batch_overlap="measured" is not measured with a link at every token.
    algorithm = GradientDescent(batch_size=16, normalized_steps=True)
    recipe = Recipe(memory=_MEMORY, retention=retention, algorithm=algorithm)
    gates = {"lr": limit_multiple(0.9), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates, memory_init_scale=8.0)
