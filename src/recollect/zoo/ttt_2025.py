"""Test-time training of 2025 and 2026: one update per large chunk, after its tokens have read.

Examples:
    >>> rc.zoo.names("ttt_2025")
    ['lact']
"""

from __future__ import annotations

from recollect.choices.algorithm.muon import Muon
from recollect.choices.bias.losses import DotProduct
from recollect.choices.memory.maps import GatedMLP
from recollect.choices.retention.row_norm import RowNorm
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import Paper

__all__ = ["lact"]


@preset(
    "large-chunk test-time training (LaCT)",
    rule="S = θ̄ S° + Σ_s η_s ∇⟨f(k_s; W°), v_s⟩,  W = rows of W° + NS5(S) at the lengths of W°'s,  "
    "f(x; W) = W_1(silu(W_2 x) ⊙ W_3 x)",
    references=(
        Paper("Zhang et al., Test-time training done right", 2025).at(
            "arXiv 2505.23884, section 3, and its language model's code"
        ),
    ),
    fidelity=reconstruction(
        "the published code of the language model, with Muon and momentum",
        source_equation="g = ∇_W Σ_(i=1)^b η_i L(f_W(k_i), v_i),  L = −f_W(k_i)ᵀ v_i\n"
        "W ← L2-Normalize(W − Muon(g))",
        inner_batches="Chunks have 64 tokens, which read W° and then write; the published language "
        "models have 2,048 or more.",
        link="Rows keep their initial lengths, as in the published code, without its ε of 1e-5.",
        rate="One rate per token serves the three maps; the published code has one per map.",
        step="Newton–Schulz has the coefficients of Muon; the published code has five sets.",
        momentum="θ̄ is the mean of a gate over the chunk, as in the published code.",
        layer="The window attention of the paper's layer is not part of the preset: put it into a "
        "layer before it.\n"
        "Queries and keys have no rotary embedding and no learned scale and offset.",
        common_layer=True,
    ),
)
def lact() -> tuple[Recipe, LayerOptions]:
    """A gated network, written once per chunk by an orthogonalised step on its unit rows."""
    algorithm = Muon(
        batch_size=64, lr_position="inside", update_every="batch", momentum_every="batch"
    )
    recipe = Recipe(
        memory=GatedMLP(expansion=1, residual=False),
        bias=DotProduct(),
        retention=RowNorm(),
        algorithm=algorithm,
    )
    gates = {
        "lr": GateOptions(activation="softplus", init=0.001),
        "momentum": GateOptions(init=0.5),
    }
    return recipe, LayerOptions(gate_options=gates)
