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
    COMMON,
    MIRAS,
    NEARLY_ALL,
    NORMALISED,
    SILENT,
    SLOW,
    UNDER_A_NORM,
)

__all__ = ["memora", "memora_per_token", "moneta", "moneta_exact", "yaad"]

# x + LN(W_1 gelu(W_2 x)), and α per value channel of low rank (MIRAS 5.3 and 5.4).
_MEMORY = MLP(norm="layer")
_CHANNELS = Decay(per="value")
_DESCENT = GradientDescent(batch=16)
_HEADS = "η is one number per head, where the paper has one per channel; "
_CHUNKS = (
    "gradients are taken at the start of inner batches of 16 tokens, inside which the memory is "
    f"read linearly. {_HEADS}"
)


_NORMALISED = GradientDescent(batch=16, normalize=True, limit="keys")
_GATES = {"lr": NEARLY_ALL, "log_decay": SLOW}


@preset(
    "MONETA",
    row=48,
    rule="A_t = α_t A_(t−1) − η_t r_t ρ_t ∇ℓ_p(W_(t−1); k_t, v_t),  W_t = A_t / ‖A_t‖_q^(q−2)",
    references=(MIRAS("eqs. 24–25 and 28–29"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 24 as printed, p = 3 and q = 4",
        note=f"{NORMALISED}; the printed link is of degree 3 − q and no mirror map: as A vanishes "
        "W would grow without bound, so ‖A‖_q is at least 0.1 and the memory starts away from 0; "
        f"moneta_exact has the mirror map. {_CHUNKS}{COMMON}",
    ),
)
def moneta() -> tuple[Recipe, LayerOptions]:
    """Large errors count more (ℓ_3), and large weights hold down the rest (L_4)."""
    retention = Lq(q=4, form="printed", floor=0.1, decay=_CHANNELS, every="batch")
    recipe = Recipe(memory=_MEMORY, bias=Lp(p=3), retention=retention, algorithm=_NORMALISED)
    # Cubes of errors make little of small ones: under a norm steps beyond the limit do not diverge.
    return recipe, LayerOptions(gates={**UNDER_A_NORM, "lr": BEYOND})


@preset(
    "MONETA with the exact mirror map",
    row=48,
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ_p(W_(t−1); k_t, v_t),  "
    "W_t = sign(A_t)|A_t|^(q−1) / ‖A_t‖_q^(q−2)",
    references=(MIRAS("section 5.2, variant 4, and eq. 25"),),
    fidelity=Fidelity(
        kind="exact",
        source="the mirror map of ½‖W‖²_(q/(q−1)), of which MIRAS eq. 24 prints a simplification",
        note="the link acts at every token: it holds small weights down so much (W is some hundred "
        "times smaller than A) that a step of A added to W would drown it. Its steps are not "
        "measured by the errors that they correct, and errors count by their cubes: inputs some "
        "thirty to a hundred times too long can diverge, which a forward pass does not look for "
        "and rc.diagnose says; moneta measures its steps. Gradients are taken at "
        f"the start of inner batches of 16 tokens. {_HEADS}{COMMON}",
    ),
)
def moneta_exact() -> tuple[Recipe, LayerOptions]:
    """MONETA where W is the minimiser that its retention gate defines."""
    retention = Lq(q=4, decay=_CHANNELS)
    recipe = Recipe(memory=_MEMORY, bias=Lp(p=3), retention=retention, algorithm=_DESCENT)
    steps = {"lr": GateOptions(high=30.0, init=15.0), "log_decay": SLOW}
    return recipe, LayerOptions(gates=steps, memory_scale=800.0)


@preset(
    "YAAD",
    row=49,
    rule="W_t = α_t W_(t−1) − η_t r_t ρ_t (∇ℓ_2 if ‖M(k_t) − v_t‖ ≤ δ_t else δ_t ∇ℓ_1)",
    references=(MIRAS("eqs. 16 and 26"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 26",
        note=f"{NORMALISED}; δ is compared with the length of the whole error, so it is one number "
        "per head where the paper speaks of one per channel, and it starts at 4 √V, beyond the "
        "errors that a layer makes while it learns: outside of it no gradient reaches the values; "
        f"{_CHUNKS}{COMMON}",
    ),
)
def yaad() -> tuple[Recipe, LayerOptions]:
    """Least squares for ordinary tokens, only the sign of the error for extreme ones."""
    recipe = Recipe(memory=_MEMORY, bias=Huber(), retention=_CHANNELS, algorithm=_NORMALISED)
    gates = {**UNDER_A_NORM, "lr": BEYOND, "threshold": GateOptions(unit="rms", init=4.0)}
    return recipe, LayerOptions(gates=gates, last_map=SILENT)


@preset(
    "MEMORA",
    row=50,
    rule="W_t = c softmax(α_t log W_(t−1) − η_t ∇ℓ_2(W_(t−1); k_t, v_t))",
    references=(MIRAS("eqs. 21, 27 and 30–32"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 27, in inner batches as eq. 30",
        note="left open: the softmax runs over the inputs of each unit, as the paper allows "
        "(eq. 20 shares one sum among all weights of a map, axis='all'; eq. 27 does not say), and "
        "c = 64, with which weights are near 1, so that inside an inner batch a step of W is to "
        "first order one of log W; eq. 27 drops c. Inside an inner batch the memory is read off "
        "the simplex, and its first token's memory is where gradients are taken (eq. 30). "
        f"{_CHUNKS}{COMMON}",
    ),
)
def memora() -> tuple[Recipe, LayerOptions]:
    """Weights are probabilities, moved by multiplication."""
    retention = Simplex(scale=64.0, decay=_CHANNELS, every="batch")
    recipe = Recipe(memory=_MEMORY, retention=retention, algorithm=_DESCENT)
    steps = {"lr": GateOptions(high=0.25, init=0.125), "log_decay": SLOW}
    return recipe, LayerOptions(gates=steps, memory_scale=8.0)


@preset(
    "MEMORA, token by token",
    row=50,
    rule="W_t = c softmax(α_t log W_(t−1) − η_t ρ_t ∇ℓ_2(W_(t−1); k_t, v_t))",
    references=(MIRAS("eqs. 21 and 27"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS eq. 27",
        note=f"{NORMALISED}; every token reads c softmax(A_t). MIRAS eq. 30, which memora has, "
        "adds steps of log W to W inside an inner batch: there a step moves what all keys share, "
        "which on the simplex the sum of each row holds, and what 16 tokens write alike drowns "
        "what was memorised before. The softmax runs over the inputs of each "
        "unit, and c = 64, as in memora. Gradients are taken at the start of inner batches of 16 "
        f"tokens. {_HEADS}{COMMON}",
    ),
)
def memora_per_token() -> tuple[Recipe, LayerOptions]:
    """MEMORA as its equation has it: weights are probabilities at every token."""
    retention = Simplex(scale=64.0, decay=_CHANNELS)
    # Of the batch: what larger steps do through the link at every token was not measured.
    step = GradientDescent(batch=16, normalize=True)
    recipe = Recipe(memory=_MEMORY, retention=retention, algorithm=step)
    return recipe, LayerOptions(gates=_GATES, memory_scale=8.0)
