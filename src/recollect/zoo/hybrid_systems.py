"""Hybrids: several memories, or a memory and an attention, that work together.

In a layer, as a mixer of `recollect.blocks`, or in layers that alternate over the depth. A model
has an MLP after every layer.

Examples:
    >>> rc.zoo.names("hybrid_systems")
    ['samba', 'titans_mac', 'titans_mag', 'titans_mal', 'atlas_mac', 'atlas_mag', 'atlas_mal',
     'gated_delta_net_h1', 'gated_delta_net_h2', 'moneta_h', 'yaad_h', 'memora_h',
     'residual_delta_net', 'mixture_of_memories', 'gated_slot_attention', 'abc', 'raven',
     'memory_caching', 'tnt', 'log_linear_attention', 'log_linear_gated_delta_net', 'hope',
     'hope_attention']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from recollect.blocks.cached import CachedMemory
from recollect.blocks.compositions import (
    MemoryAsContext,
    MemoryAsGate,
    MixtureOfMemories,
    ResidualMemory,
    Sequential,
)
from recollect.blocks.levels import Levels
from recollect.blocks.local import LocalMemories
from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.blocks.self_modifying import SelfModifyingMemory
from recollect.blocks.slots import SlotMemory
from recollect.choices.algorithm.closed_form import Analytic
from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.restrictions import SinkWindow
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.memory.local import LocalConstant
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.atlas import atlas
from recollect.zoo.attention import (
    PLAIN_ATTENTION_LAYER,
    sliding_window_attention,
    softmax_attention,
)
from recollect.zoo.delta_rule import gated_delta_net
from recollect.zoo.fidelity import approximation, exact, reconstruction
from recollect.zoo.miras import memora, moneta, yaad
from recollect.zoo.preset import Factory, decay_from, limit_multiple, preset
from recollect.zoo.references import ATLAS, MIRAS, TITANS, Paper, Reference
from recollect.zoo.state_space import mamba, mamba2
from recollect.zoo.titans import titans

__all__ = [
    "FAMILY",
    "abc",
    "atlas_mac",
    "atlas_mag",
    "atlas_mal",
    "gated_delta_net_h1",
    "gated_delta_net_h2",
    "gated_slot_attention",
    "hope",
    "hope_attention",
    "log_linear_attention",
    "log_linear_gated_delta_net",
    "memora_h",
    "memory_caching",
    "mixture_of_memories",
    "moneta_h",
    "raven",
    "residual_delta_net",
    "samba",
    "titans_mac",
    "titans_mag",
    "titans_mal",
    "tnt",
    "yaad_h",
]

FAMILY = "hybrid_systems"
SEGMENT, WINDOW, PERSISTENT = 128, 128, 8
_SIZES = (
    "Segments and windows hold 128 tokens, with 8 persistent tokens; the papers print no sizes."
)
_ROTARY = "The attention has rotary positions."
_SAMBA = Paper(
    "Ren et al., Samba: simple hybrid state space models for efficient unlimited context "
    "language modeling",
    2024,
).at("section 2.1")
_GATED = Paper("Yang et al., Gated delta networks: improving Mamba2 with delta rule", 2024).at(
    "section 3.4"
)
_MIRAS_HYBRIDS = (
    MIRAS.at("section 5.4 and figure 2"),
    replace(_SAMBA, introduces=False),
)


def _sink_attention() -> tuple[Recipe, LayerOptions]:
    """Return sliding-window attention that always reads the persistent tokens."""
    context = KernelWeighted(restrictions=(SinkWindow(size=WINDOW, num_sinks=PERSISTENT),))
    recipe = Recipe(memory=LocalConstant(), context=context, algorithm=Analytic())
    return recipe, PLAIN_ATTENTION_LAYER


def _in_turns(
    title: str, *memories: str, references: tuple[Reference, ...], source: str
) -> Callable[[Factory], Factory]:
    """Decorate a hybrid whose layers are memories, then sliding-window attention."""
    layers = ",  x + MLP(x),  x + ".join(f"{name}(x)" for name in (*memories, "SWA"))
    fidelity = reconstruction(
        source,
        window="The window holds 128 tokens.",
        layer="The layer around each memory is that of the memory's own preset.",
    )
    rule = f"x ← x + {layers},  x + MLP(x)"
    return preset(title, rule=rule, references=references, fidelity=fidelity)


def _as_context(
    title: str, *references: Reference, sizes: str = _SIZES
) -> Callable[[Factory], Factory]:
    """Decorate a hybrid whose memory adds its outputs to the context of an attention."""
    fidelity = reconstruction(
        "Titans eqs. 21–25",
        layer="M_(t−1) is read through the memory layer's own queries (with their convolution), "
        "norm and gate.\n"
        "M*_t(y) is read token by token, each after its own write, as a causal model must.\n"
        f"⊗ is the gate that the paper states for MAG.\n{_ROTARY}",
        sizes=sizes,
    )
    rule = "h = M_(t−1)(q),  y = attention([p, h, S]),  M_t = M_(t−1)(y),  o = y ⊗ M_t(y)"
    references = (*references, TITANS.at("eqs. 21–25", introduces=not references))
    return preset(title, rule=rule, references=references, fidelity=fidelity)


def _as_gate(title: str, *references: Reference) -> Callable[[Factory], Factory]:
    """Decorate a hybrid whose memory gates an attention."""
    fidelity = reconstruction(
        "Titans eqs. 26–28",
        gates="The gate's σ is the sigmoid, after an RMS norm with a learned weight on either "
        "side.",
        sizes=_SIZES,
        layer=_ROTARY,
    )
    references = (*references, TITANS.at("eqs. 26–28", introduces=not references))
    rule = "y = SWA([p, x]),  o = y ⊗ M([p, x])"
    return preset(title, rule=rule, references=references, fidelity=fidelity)


def _as_layer(title: str, *references: Reference) -> Callable[[Factory], Factory]:
    """Decorate a hybrid whose memory is the layer before an attention."""
    fidelity = reconstruction("Titans eqs. 29–31", sizes=_SIZES, layer=_ROTARY)
    references = (*references, TITANS.at("eqs. 29–31", introduces=not references))
    rule = "y = M([p, x]),  o = SWA(y)"
    return preset(title, rule=rule, references=references, fidelity=fidelity)


@_in_turns("Samba", "Mamba", references=(_SAMBA,), source="Ren et al. section 2.1")
def samba() -> Mapping[str, Any]:
    """Mamba and sliding-window attention in turns."""
    return {"mamba": mamba(), "sliding_window_attention": sliding_window_attention()}


@_as_context("Titans, memory as context (MAC)")
def titans_mac() -> Mixer:
    """Outputs of a memory are context of an attention, and the memory learns its outputs."""
    return MemoryAsContext(titans(), softmax_attention(), segment=SEGMENT, persistent=PERSISTENT)


@_as_gate("Titans, memory as gate (MAG)")
def titans_mag() -> Mixer:
    """A memory of all past tokens gates the attention to the last tokens."""
    return MemoryAsGate(titans(), _sink_attention(), persistent=PERSISTENT)


@_as_layer("Titans, memory as layer (MAL)")
def titans_mal() -> Mixer:
    """Attention to the last outputs of a memory."""
    return Sequential(titans(), _sink_attention(), persistent=PERSISTENT)


@_as_context(
    "Atlas, memory as context (MAC)",
    ATLAS.at("section 5.1"),
    sizes=f"There are no persistent tokens, as in ATLAS section 6.3.\n{_SIZES}",
)
def atlas_mac() -> Mixer:
    """Outputs of a memory are context of an attention, and the memory learns its outputs."""
    return MemoryAsContext(atlas(), softmax_attention(), segment=SEGMENT)


@_as_gate("Atlas, memory as gate (MAG)", ATLAS.at("section 5.1"))
def atlas_mag() -> Mixer:
    """A memory of all past tokens gates the attention to the last tokens."""
    return MemoryAsGate(atlas(), _sink_attention(), persistent=PERSISTENT)


@_as_layer("Atlas, memory as layer (MAL)", ATLAS.at("section 5.1"))
def atlas_mal() -> Mixer:
    """Attention to the last outputs of a memory."""
    return Sequential(atlas(), _sink_attention(), persistent=PERSISTENT)


@_in_turns(
    "Gated DeltaNet-H1", "GatedDeltaNet", references=(_GATED,), source="Yang et al. section 3.4"
)
def gated_delta_net_h1() -> Mapping[str, Any]:
    """Gated DeltaNet and sliding-window attention in turns."""
    attention = sliding_window_attention()
    return {"gated_delta_net": gated_delta_net(), "sliding_window_attention": attention}


@_in_turns(
    "Gated DeltaNet-H2",
    *("Mamba2", "GatedDeltaNet"),
    references=(_GATED,),
    source="Yang et al. section 3.4",
)
def gated_delta_net_h2() -> Mapping[str, Any]:
    """Mamba-2, Gated DeltaNet and sliding-window attention in turns."""
    return {
        "mamba2": mamba2(),
        "gated_delta_net": gated_delta_net(),
        "sliding_window_attention": sliding_window_attention(),
    }


@_in_turns("MONETA-H", "MONETA", references=_MIRAS_HYBRIDS, source="MIRAS section 5.4")
def moneta_h() -> Mapping[str, Any]:
    """MONETA and sliding-window attention in turns."""
    return {"moneta": moneta(), "sliding_window_attention": sliding_window_attention()}


@_in_turns("YAAD-H", "YAAD", references=_MIRAS_HYBRIDS, source="MIRAS section 5.4")
def yaad_h() -> Mapping[str, Any]:
    """YAAD and sliding-window attention in turns."""
    return {"yaad": yaad(), "sliding_window_attention": sliding_window_attention()}


@_in_turns("MEMORA-H", "MEMORA", references=_MIRAS_HYBRIDS, source="MIRAS section 5.4")
def memora_h() -> Mapping[str, Any]:
    """MEMORA and sliding-window attention in turns."""
    return {"memora": memora(), "sliding_window_attention": sliding_window_attention()}


@preset(
    "Residual Delta Net (RDN)",
    rule="r_t = clip(v_t − M_(t−1) k_t, ±1),  M, R delta rules of v and r,  "
    "y_t = α_t M_(t−1) q_t + γ_t R_t q_t",
    references=(
        Paper("Lai et al., Enhancing linear attention with residual learning", 2025).at(
            "arXiv 2509.25223, section 3"
        ),
    ),
    fidelity=reconstruction(
        "Lai et al., Residual Delta Net: α for both memories, β for M, γ for R",
        layer="The layers around the memories are those of gated_delta_net.",
        logsigmoid_decay=True,
    ),
)
def residual_delta_net() -> Mixer:
    """A second delta rule learns what the first one gets wrong."""
    return ResidualMemory(
        gated_delta_net(),
        gated_delta_net(),
        clip=1.0,
        read="before",
        share=("log_decay",),
        weigh_first="log_decay",
        weigh_second="lr",
    )


@preset(
    "Mixture of memories (MoM)",
    rule="p = softmax(W x),  S = top 2 of 4,  y = Σ_(j ∈ S) p_j M_j(x) / Σ_(j ∈ S) p_j + M_0(x)",
    references=(
        Paper("Du et al., MoM: linear sequence modeling with mixture-of-memories", 2025).at(
            "arXiv 2502.13685, section 3.2"
        ),
    ),
    fidelity=approximation(
        "Du et al. section 3.2, with Gated DeltaNet as the memories",
        layer="Every memory is a layer with its own queries, convolution, norm, gate and output "
        "map; the paper shares these.\n"
        "The outputs of the layers are summed; the paper normalises the sum of the reads.",
    ),
)
def mixture_of_memories() -> Mixer:
    """Each token is written to and read from two of four memories, and one that sees all."""
    return MixtureOfMemories([gated_delta_net()] * 4, top=2, shared=gated_delta_net())


def _hebbian(decay_per: str) -> Recipe:
    """Return linear attention with a decay per key or value channel."""
    return Recipe(
        bias=DotProduct(), retention=Decay(per=decay_per), algorithm=GradientDescent(lr=1.0)
    )


@preset(
    "gated slot attention (GSA)",
    rule="K̃_t = Diag(α_t) K̃_(t−1) + (1 − α_t) k_tᵀ,  Ṽ_t = Diag(α_t) Ṽ_(t−1) + (1 − α_t) v_tᵀ,  "
    "y_t = Ṽ_tᵀ softmax(K̃_t q_t)",
    references=(
        Paper(
            "Zhang et al., Gated slot attention for efficient linear-time sequence modeling", 2024
        ).at("arXiv 2409.07146, section 3"),
    ),
    fidelity=exact(
        "Zhang et al. section 3, α_t = sigmoid(linear(x_t))^(1/8)",
        sizes="There are as many slots as key channels.",
        layer="The output norm is one per head, without a SiLU before it.",
    ),
)
def gated_slot_attention() -> Mixer:
    """Attention to a fixed number of slots, each a gated average of keys and of values."""
    gate = GateOptions(temperature=8.0, rank=0)
    options = LayerOptions(
        conv_size=0, qk_norm="none", output_gate="none", gate_options={"log_decay": gate}
    )
    return SlotMemory(
        (_hebbian("value"), options),
        _hebbian("key"),
        write="complement",
        share=("log_decay",),
    )


@preset(
    "attention with bounded-memory control (ABC)",
    rule="φ_t = exp(W x_t)/Σ_(s ≤ t) exp(W x_s),  K̃ = Σ φ k_tᵀ,  Ṽ = Σ φ v_tᵀ,  "
    "y_t = Ṽ_tᵀ softmax(K̃_t q_t)",
    references=(
        Paper("Peng et al., ABC: attention with bounded-memory control", 2021).at(
            "arXiv 2110.02488, section 4"
        ),
    ),
    fidelity=exact(
        "Peng et al. section 4, ABC_MLP over the tokens so far",
        sizes="There are as many slots as key channels.",
        gates="W x is limited to ±32, as in flash-linear-attention.",
        layer="There are no positions.",
    ),
)
def abc() -> Mixer:
    """Attention to a fixed number of slots, each a weighted mean of all keys and of all values."""
    options = LayerOptions(
        conv_size=0,
        conv_activation="none",
        qk_norm="scaled",
        output_norm="none",
        output_gate="none",
    )
    return SlotMemory(
        (_hebbian("value"), options),
        _hebbian("key"),
        write="running_softmax",
        share=("log_decay",),
    )


@preset(
    "Raven",
    rule="r_t = the 32 largest of σ(W x_t), divided by their sum,  "
    "a_t = α_t^(r_t),  K̃_t = Diag(a_t) K̃_(t−1) + (1 − a_t) k_tᵀ,  "
    "Ṽ_t = Diag(a_t) Ṽ_(t−1) + (1 − a_t) v_tᵀ,  y_t = Ṽ_tᵀ softmax(K̃_t q_t)",
    references=(
        Paper("Afzal and Bick, Raven: memory as a set of slots", 2026).at(
            "github.com/goombalab/raven, and flash-linear-attention's layer"
        ),
    ),
    fidelity=reconstruction(
        "the layer of flash-linear-attention with decay_type GLA, α_t = sigmoid(linear(x_t))^(1/8)",
        sizes="There are as many slots as key channels, and a token writes at most 32.",
        gates="The router has no noise in training.",
        layer="Queries and keys have root mean square 1, without learned weights.\n"
        "The output norm is one per head, without a SiLU before it.",
    ),
)
def raven() -> Mixer:
    """Gated slot attention whose tokens write to the slots that a router chooses."""
    options = LayerOptions(
        conv_size=0,
        qk_norm="rms",
        output_gate="none",
        gate_options={"log_decay": GateOptions(temperature=8.0, rank=0)},
    )
    return SlotMemory(
        (_hebbian("value"), options),
        _hebbian("key"),
        write="complement",
        top_k=32,
        share=("log_decay",),
    )


@preset(
    "Memory Caching (MC)",
    rule="y_t = γ_(t,s) M_t(q_t) + Σ_(i < s) γ_(t,i) M^i(q_t),  "
    "γ_t = softmax_i ⟨W x_t, mean of segment i⟩",
    references=(
        Paper("Behrouz et al., Memory caching: RNNs with growing memory", 2026).at(
            "arXiv 2602.24281, eqs. 9–10"
        ),
    ),
    fidelity=reconstruction(
        "Behrouz et al. eqs. 9–10, gated residual memory over Titans",
        memory="Every segment starts with the initial memory (independent compressors); the paper "
        "also prints memories that continue.",
        gates="The mean of the open segment is that of its tokens up to t, as a causal model must.",
        sizes="Segments have 256 tokens.",
        layer="The layer around the memory is that of titans.",
    ),
)
def memory_caching() -> Mixer:
    """A memory that starts again every 256 tokens, and its earlier states, weighted by gates."""
    return CachedMemory(titans(), segment=256)


@preset(
    "TNT",
    rule="y_t = V_t(q_t) + Σ_i W^i_t(P^i_t q_t),  P^i_t = Σ k kᵀ/‖k‖² of the open inner batch,  "
    "W^i restarts every 2048 tokens",
    references=(
        Paper("Li et al., TNT: improving chunkwise training for test-time memorization", 2025).at(
            "arXiv 2511.07343, eqs. 5–7"
        ),
    ),
    fidelity=reconstruction(
        "Li et al. eqs. 5–7, over Titans, before the second stage of training",
        memory="V is read after the write of every token; the paper reads it as of the start of "
        "its inner batch.",
        inner_batches="V has inner batches of 2048 tokens, and the two W of 8 and 16.",
        sizes="Segments have 2048 tokens.",
        layer="The layer around the memories is that of titans.",
    ),
)
def tnt() -> Mixer:
    """A memory with large inner batches, and memories with small ones that restart."""

    def with_batches(size: int) -> RecipeMixer:
        leaf = as_mixer(titans())
        assert isinstance(leaf, RecipeMixer) and isinstance(leaf.recipe.algorithm, Momentum)
        algorithm = replace(leaf.recipe.algorithm, batch_size=size)
        return replace(leaf, recipe=leaf.recipe.replace(algorithm=algorithm))

    return LocalMemories(with_batches(2048), [with_batches(8), with_batches(16)], segment=2048)


def _at_levels(title: str, *, memory: str, rule: str) -> Callable[[Factory], Factory]:
    """Decorate a memory at the levels of a Fenwick tree."""
    fidelity = reconstruction(
        f"Guo et al. section 3, with {memory} as the memory",
        gates="λ_t is the softplus of a linear map of the token, per head and level, and starts at "
        "1 on every level.",
        sizes="There are 16 levels.\n"
        "The last level stores all tokens that are in no level of 2^13 tokens or fewer.",
        layer=f"The layer around the memory is that of {memory}.",
    )
    paper = Paper("Guo et al., Log-linear attention", 2025)
    references = (paper.at("arXiv 2506.04761, section 3"),)
    return preset(title, rule=rule, references=references, fidelity=fidelity)


@_at_levels(
    "log-linear attention (Mamba-2)",
    memory="mamba2",
    rule="S_t^ℓ = Σ_(s ∈ B_t^ℓ) (Π_(s < r ≤ t) α_r) v_s k_sᵀ,  y_t = Σ_ℓ λ_t^ℓ S_t^ℓ q_t",
)
def log_linear_attention() -> Mixer:
    """One decaying memory for each part of the past, of 1, 2, 4, 8, … tokens."""
    return Levels(mamba2())


@_at_levels(
    "log-linear Gated DeltaNet",
    memory="gated_delta_net",
    rule="S_t^ℓ = Σ_(s ∈ B_t^ℓ) β_s v_s k_sᵀ Π_(s < r ≤ t) α_r (I − β_r k_r k_rᵀ),  "
    "y_t = Σ_ℓ λ_t^ℓ S_t^ℓ q_t",
)
def log_linear_gated_delta_net() -> Mixer:
    """One memory under the gated delta rule for each part of the past, of 1, 2, 4, 8, … tokens."""
    return Levels(gated_delta_net())


_LEVELS = (64, 256, 1024)
_CHAIN = (
    "y_t = M_1024(M_256(M_64(o_t))),  M_C ← M_C − Σ_s η_s r_s ρ_s ∇ℓ(M_C; k_s, v_s) every C tokens"
)
_CHAIN_AS_PRINTED = (
    "y_t = MLP^(f_k)(MLP^(f_(k−1))(… MLP^(f_1)(x_t)))  (eq. 70)\n"
    "θ^(f_ℓ)_(i+1) = θ^(f_ℓ)_i − Σ_(t=i−C)^i η_t f(θ^(f_ℓ)_t; x_t) if i ≡ 0 (mod C)  (eq. 71)"
)


def _level(size: int) -> tuple[Recipe, LayerOptions]:
    """Return a perceptron that learns once per inner batch, after its tokens have read it."""
    algorithm = GradientDescent(
        batch_size=size, update_every="batch", normalized_steps=True, batch_overlap="measured"
    )
    options = LayerOptions(
        conv_size=0,
        output_norm="none",
        output_gate="none",
        gate_options={"lr": limit_multiple(0.5)},
        last_map_init_scale=0.1,
    )
    return Recipe(memory=MLP(), algorithm=algorithm), options


def _nested(
    title: str, equations: str, *, rule: str, printed: str = "", **deviations: str | bool
) -> Callable[[Factory], Factory]:
    """Decorate a mixer whose last parts are memories that learn after 64, 256 and 1024 tokens."""
    paper = Paper(
        "Behrouz et al., Nested learning: the illusion of deep learning architectures", 2025
    )
    fidelity = reconstruction(
        f"Behrouz et al. {equations}, in transcriptions of the paper",
        source_equation=printed + _CHAIN_AS_PRINTED,
        loss="Levels learn values of their own; eq. 71 leaves the error f open.",
        half_loss=True,
        normalized_step=True,
        key_overlap=True,
        sizes="Three levels learn after 64, 256 and 1,024 tokens; the paper has more tokens.",
        layer="Every level has projections of queries, keys, values and outputs, which eq. 70 does "
        "not have.\n"
        "In a model, an MLP follows each layer; the levels of the paper take its place.",
        **deviations,
    )
    references = (paper.at(f"arXiv 2512.24695, {equations}"),)
    return preset(title, rule=f"{rule},  {_CHAIN}", references=references, fidelity=fidelity)


@_nested(
    "Hope",
    "eqs. 70–71 and 83–97",
    rule="o_t = M(q_t),  k_t = M_k(x_t),  v_t = M_v(x_t),  η_t = M_η(x_t),  α_t = M_α(x_t),  "
    "M_□ ← (Π_s α_s) M_□ − Σ_s η_s (∇ℓ(M_□; k_s, M_□(v_s)) + W h_s h_sᵀ)",
    printed="o_t = M_(memory,t−1)(q_t),  v̂_(□,t) = M_(□,t−1)(v_t),  k_t = M_(k,t−1)(x_t),  "
    "v_t = M_(v,t−1)(x_t),  η_t = M_(η,t−1)(x_t)  (eq. 94)\n"
    "M_(□,t) = M_(□,t−1)(α_t I − η_t k_t k_tᵀ) − η_t ∇L(M_(□,t−1); k_t, v̂_(□,t))  (eq. 95)\n",
    inner_batches="The memories of the first part have inner batches of 16 tokens; those of the "
    "paper have two sizes.\n"
    "Decays and erasures act on the memory at the start of the batch; eq. 91 has them inside it.",
    step="Every linear map of a memory erases at its own input h; eq. 95 prints k_t.",
    gates="M_k reads W_k x_t, and M_v, M_η and M_α read W_v x_t; those of the paper read x_t.\n"
    "η_t and α_t are per head, from a learned map of the outputs of M_η and M_α.",
    query_key_norm="Values at which memories are read have length 1 too; the text names q and k.",
    rate="η_t is below 0.05 and starts at 0.01.",
)
def hope() -> Mixer:
    """A memory that determines its own keys, values and rates, before memories of three speeds."""
    algorithm = GradientDescent(batch_size=16, update_every="batch", erasure=1.0)
    recipe = Recipe(memory=MLP(), retention=Decay(), algorithm=algorithm)
    gates = {
        "lr": GateOptions(activation="sigmoid", high=0.05, init=0.01),
        "log_decay": decay_from(0.999),
    }
    options = LayerOptions(gate_options=gates, last_map_init_scale=0.1)
    return Sequential(SelfModifyingMemory((recipe, options)), *map(_level, _LEVELS))


@_nested("Hope-Attention", "eqs. 70–71 and section 8.3", rule="o = attention(x)")
def hope_attention() -> Mixer:
    """Attention before memories of three speeds."""
    return Sequential(softmax_attention(), *map(_level, _LEVELS))
