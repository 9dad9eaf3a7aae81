"""Test-time training of 2025 and 2026: one update per large chunk, after its tokens have read.

Examples:
    >>> rc.zoo.names("ttt_2025")
    ['lact', 'in_place_ttt']
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.algorithm.muon import Muon
from recollect.choices.bias.losses import DotProduct
from recollect.choices.features.learned import GatedUnits
from recollect.choices.memory.maps import MLP, GatedMLP
from recollect.choices.retention.row_norm import RowNorm
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import Paper

__all__ = ["in_place_ttt", "lact"]


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


@preset(
    "in-place test-time training",
    rule="W = W° + η Σ_s v_s z_(s−1)ᵀ,  y_t = W° z_t,  z = silu(G x) ⊙ U x",
    references=(
        Paper("Feng et al., In-place test-time training", 2026).at(
            "arXiv 2604.06169, the update per chunk, and its inference code"
        ),
    ),
    fidelity=reconstruction(
        "the update per chunk of the published inference code",
        source_equation="W_(i+1) = W_(i) + η V̂_[i]ᵀ Z_[i],  O_[i] = Z_[i] W_(i)ᵀ,  "
        "V̂ = Conv1D(X_0) W_target",
        inner_batches="Chunks have 64 tokens, which read W° and then write; the paper finds chunks "
        "of 512 to 1,024 best.",
        initial_memory="W starts at the output map of the MLP, which is learned.",
        loss="The target of a token contains the next one: a key is written with the value of the "
        "token after it.\n"
        "The paper pads its convolution with zeros at chunk borders; here the last key of a chunk "
        "is written in the next.",
        rate="η is learned and starts at 0.001; the paper has a constant.",
        layer="Queries and keys are projections; those of the paper are the input of the MLP, as "
        "with rc.lm.replace_mlp.\n"
        "Values are projections of the token with a short convolution; those of the paper come "
        "from token embeddings.\n"
        "Queries and keys have length √K.",
    ),
)
def in_place_ttt() -> tuple[Recipe, LayerOptions]:
    """A gated MLP whose output map learns the next token's value, once per chunk."""
    recipe = Recipe(
        memory=MLP(depth=1, residual=False),
        features=GatedUnits(),
        bias=DotProduct(),
        algorithm=GradientDescent(batch_size=64, lr="learned", update_every="batch"),
    )
    return recipe, LayerOptions(
        qk_norm="rms",
        ties=(Tie(target="k", source="k", rule="previous"),),
        gate_options={"lr": GateOptions(activation="softplus", init=0.001)},
    )
