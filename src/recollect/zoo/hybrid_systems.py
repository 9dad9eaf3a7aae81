"""Hybrids: a memory and an attention that work together.

In a layer, as data of `recollect.blocks`, or as layers that alternate over the depth. Every layer
of a model is followed by an MLP.

Examples:
    >>> for name in rc.zoo.hybrids():
    ...     print(f"{name:<22} {rc.zoo.find(name).title}")
    samba                  Samba
    titans_mac             Titans, memory as context (MAC)
    titans_mag             Titans, memory as gate (MAG)
    titans_mal             Titans, memory as layer (MAL)
    atlas_mac              Atlas, memory as context (MAC)
    atlas_mag              Atlas, memory as gate (MAG)
    atlas_mal              Atlas, memory as layer (MAL)
    gated_delta_net_h1     Gated DeltaNet-H1
    gated_delta_net_h2     Gated DeltaNet-H2
    moneta_h               MONETA-H
    yaad_h                 YAAD-H
    memora_h               MEMORA-H
    residual_delta_net     Residual Delta Net (RDN)
    mixture_of_memories    Mixture of memories (MoM)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recollect.blocks.compositions import (
    MemoryAsContext,
    MemoryAsGate,
    MixtureOfMemories,
    ResidualMemory,
    Sequential,
)
from recollect.blocks.mixers import Mixer
from recollect.choices.algorithm.closed_form import Analytic
from recollect.choices.context.restrictions import SinkWindow
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.memory.local import LocalConstant
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.atlas import atlas
from recollect.zoo.attention import BARE, sliding_window_attention, softmax_attention
from recollect.zoo.delta_rule import gated_delta_net
from recollect.zoo.miras import memora, moneta, yaad
from recollect.zoo.preset import Fidelity, Reference, hybrid
from recollect.zoo.sources import ATLAS, LOGSIGMOID_DECAY, MIRAS, TITANS
from recollect.zoo.state_space import mamba, mamba2
from recollect.zoo.titans import titans

__all__ = [
    "FAMILY",
    "atlas_mac",
    "atlas_mag",
    "atlas_mal",
    "gated_delta_net_h1",
    "gated_delta_net_h2",
    "memora_h",
    "mixture_of_memories",
    "moneta_h",
    "residual_delta_net",
    "samba",
    "titans_mac",
    "titans_mag",
    "titans_mal",
    "yaad_h",
]

FAMILY = "hybrid_systems"
SEGMENT, WINDOW, PERSISTENT = 128, 128, 8
_OPEN = (
    f"Segments and windows hold {SEGMENT} tokens, with {PERSISTENT} persistent tokens; the papers "
    "print no sizes.",
    "The attention has rotary positions.",
)
_MAC = (
    "M_(t−1) is read through the memory layer's own queries (with their convolution), norm and "
    "gate.",
    "M*_t(y) is read token by token, each after its own write, as a causal model must.",
    "⊗ is the gate that the paper states for MAG.",
    *_OPEN,
)
_MAG = (
    "The gate's σ is the sigmoid, after an RMS norm with a learned weight on either side.",
    *_OPEN,
)
_SAMBA = Reference(
    paper="Ren et al., Samba: simple hybrid state space models for efficient unlimited context "
    "language modeling",
    year=2024,
    where="section 2.1",
)
_GATED = Reference(
    paper="Yang et al., Gated delta networks: improving Mamba2 with delta rule",
    year=2024,
    where="section 3.4",
)
_WINDOWED = (
    f"The window holds {WINDOW} tokens.",
    "The layer around each memory is that of the memory's own preset.",
)


def _attention() -> tuple[Recipe, LayerOptions]:
    """Sliding-window attention that never loses the persistent tokens."""
    context = KernelWeighted(restrictions=(SinkWindow(size=WINDOW, num_sinks=PERSISTENT),))
    return Recipe(memory=LocalConstant(), context=context, algorithm=Analytic()), BARE


def _alternating(**memories: Any) -> Mapping[str, Any]:
    """Samba's order: memories, then sliding-window attention."""
    return {**memories, "sliding_window_attention": sliding_window_attention()}


@hybrid(
    "Samba",
    row=66,
    rule="x ← x + Mamba(x),  x + MLP(x),  x + SWA(x),  x + MLP(x)",
    references=(_SAMBA,),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Ren et al. section 2.1",
        deviations=_WINDOWED,
    ),
)
def samba() -> Mapping[str, Any]:
    """Mamba and sliding-window attention in turns."""
    return _alternating(mamba=mamba())


@hybrid(
    "Titans, memory as context (MAC)",
    row=67,
    rule="h = M_(t−1)(q),  y = attention([p, h, S]),  M_t = M_(t−1)(y),  o = y ⊗ M_t(y)",
    references=(TITANS("eqs. 21–25"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Titans eqs. 21–25",
        deviations=_MAC,
    ),
)
def titans_mac() -> Mixer:
    """What a memory recalls is context of an attention, whose answers the memory learns."""
    return MemoryAsContext(titans(), softmax_attention(), segment=SEGMENT, persistent=PERSISTENT)


@hybrid(
    "Titans, memory as gate (MAG)",
    row=68,
    rule="y = SWA([p, x]),  o = y ⊗ M([p, x])",
    references=(TITANS("eqs. 26–28"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Titans eqs. 26–28",
        deviations=_MAG,
    ),
)
def titans_mag() -> Mixer:
    """A memory of all of the past gates the attention to the last tokens."""
    return MemoryAsGate(titans(), _attention(), persistent=PERSISTENT)


@hybrid(
    "Titans, memory as layer (MAL)",
    row=69,
    rule="y = M([p, x]),  o = SWA(y)",
    references=(TITANS("eqs. 29–31"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Titans eqs. 29–31",
        deviations=_OPEN,
    ),
)
def titans_mal() -> Mixer:
    """Attention to the last tokens of what a memory says."""
    return Sequential(titans(), _attention(), persistent=PERSISTENT)


@hybrid(
    "Atlas, memory as context (MAC)",
    row=70,
    rule="h = M_(t−1)(q),  y = attention([p, h, S]),  M_t = M_(t−1)(y),  o = y ⊗ M_t(y)",
    references=(
        ATLAS("section 5.1"),
        TITANS("eqs. 21–25"),
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Titans eqs. 21–25",
        deviations=(
            "There are no persistent tokens, as in ATLAS section 6.3.",
            *_MAC,
        ),
    ),
)
def atlas_mac() -> Mixer:
    """What a memory recalls is context of an attention, whose answers the memory learns."""
    return MemoryAsContext(atlas(), softmax_attention(), segment=SEGMENT)


@hybrid(
    "Atlas, memory as gate (MAG)",
    row=71,
    rule="y = SWA([p, x]),  o = y ⊗ M([p, x])",
    references=(
        ATLAS("section 5.1"),
        TITANS("eqs. 26–28"),
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Titans eqs. 26–28",
        deviations=_MAG,
    ),
)
def atlas_mag() -> Mixer:
    """A memory of all of the past gates the attention to the last tokens."""
    return MemoryAsGate(atlas(), _attention(), persistent=PERSISTENT)


@hybrid(
    "Atlas, memory as layer (MAL)",
    row=72,
    rule="y = M([p, x]),  o = SWA(y)",
    references=(
        ATLAS("section 5.1"),
        TITANS("eqs. 29–31"),
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Titans eqs. 29–31",
        deviations=_OPEN,
    ),
)
def atlas_mal() -> Mixer:
    """Attention to the last tokens of what a memory says."""
    return Sequential(atlas(), _attention(), persistent=PERSISTENT)


@hybrid(
    "Gated DeltaNet-H1",
    row=73,
    rule="x ← x + GatedDeltaNet(x),  x + MLP(x),  x + SWA(x),  x + MLP(x)",
    references=(_GATED,),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Yang et al. section 3.4",
        deviations=_WINDOWED,
    ),
)
def gated_delta_net_h1() -> Mapping[str, Any]:
    """Gated DeltaNet and sliding-window attention in turns."""
    return _alternating(gated_delta_net=gated_delta_net())


@hybrid(
    "Gated DeltaNet-H2",
    row=74,
    rule="x ← x + Mamba2(x),  x + MLP(x),  x + GatedDeltaNet(x),  x + MLP(x),  x + SWA(x),  "
    "x + MLP(x)",
    references=(_GATED,),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Yang et al. section 3.4",
        deviations=_WINDOWED,
    ),
)
def gated_delta_net_h2() -> Mapping[str, Any]:
    """Mamba-2, Gated DeltaNet and sliding-window attention in turns."""
    return _alternating(mamba2=mamba2(), gated_delta_net=gated_delta_net())


@hybrid(
    "MONETA-H",
    row=75,
    rule="x ← x + MONETA(x),  x + MLP(x),  x + SWA(x),  x + MLP(x)",
    references=(
        MIRAS("section 5.4 and figure 2"),
        _SAMBA,
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS section 5.4",
        deviations=_WINDOWED,
    ),
)
def moneta_h() -> Mapping[str, Any]:
    """MONETA and sliding-window attention in turns."""
    return _alternating(moneta=moneta())


@hybrid(
    "YAAD-H",
    row=76,
    rule="x ← x + YAAD(x),  x + MLP(x),  x + SWA(x),  x + MLP(x)",
    references=(
        MIRAS("section 5.4 and figure 2"),
        _SAMBA,
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS section 5.4",
        deviations=_WINDOWED,
    ),
)
def yaad_h() -> Mapping[str, Any]:
    """YAAD and sliding-window attention in turns."""
    return _alternating(yaad=yaad())


@hybrid(
    "MEMORA-H",
    row=77,
    rule="x ← x + MEMORA(x),  x + MLP(x),  x + SWA(x),  x + MLP(x)",
    references=(
        MIRAS("section 5.4 and figure 2"),
        _SAMBA,
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="MIRAS section 5.4",
        deviations=_WINDOWED,
    ),
)
def memora_h() -> Mapping[str, Any]:
    """MEMORA and sliding-window attention in turns."""
    return _alternating(memora=memora())


@hybrid(
    "Residual Delta Net (RDN)",
    row=78,
    rule="r_t = clip(v_t − M_(t−1) k_t, ±1),  M, R delta rules of v and r,  "
    "y_t = α_t M_(t−1) q_t + γ_t R_t q_t",
    references=(
        Reference(
            paper="Lai et al., Enhancing linear attention with residual learning",
            year=2025,
            where="arXiv 2509.25223, section 3",
        ),
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="Lai et al., Residual Delta Net: α for both memories, β for M, γ for R",
        deviations=(
            "The layers around the memories are those of gated_delta_net.",
            LOGSIGMOID_DECAY,
        ),
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


@hybrid(
    "Mixture of memories (MoM)",
    row=79,
    rule="p = softmax(W x),  S = top 2 of 4,  y = Σ_(j ∈ S) p_j M_j(x) / Σ_(j ∈ S) p_j + M_0(x)",
    references=(
        Reference(
            paper="Du et al., MoM: linear sequence modeling with mixture-of-memories",
            year=2025,
            where="arXiv 2502.13685, section 3.2",
        ),
    ),
    fidelity=Fidelity(
        kind="approximation",
        source="Du et al. section 3.2, with Gated DeltaNet as the memories",
        deviations=(
            (
                "Every memory is a layer with its own queries, convolution, norm, gate and "
                "output map; the paper shares these."
            ),
            "The outputs of the layers are summed; the paper sums the reads and norms the sum.",
        ),
    ),
)
def mixture_of_memories() -> Mixer:
    """Each token is written to and read from two of four memories, and one that sees all."""
    return MixtureOfMemories([gated_delta_net()] * 4, top=2, shared=gated_delta_net())
