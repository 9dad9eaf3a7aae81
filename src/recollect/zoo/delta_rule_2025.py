"""The delta rule of 2025 and 2026: decays per channel, separate erasures, and exact flows.

Examples:
    >>> for name in rc.zoo.names("delta_rule_2025"):
    ...     print(f"{name:<31} {rc.zoo.get(name).title}")
    kimi_delta_attention            Kimi Delta Attention
    comba                           Comba
    efla                            error-free linear attention
    gated_delta_net_2               Gated DeltaNet-2
    q_delta                         Q-Delta
    preconditioned_gated_delta_net  preconditioned Gated DeltaNet
    preconditioned_kda              preconditioned Kimi Delta Attention
    erase_then_delta                Erase-then-Delta attention
    momentum_delta_rule             Momentum DeltaNet
    oja                             gated Oja's rule
"""

from __future__ import annotations

import math
from dataclasses import replace

from recollect.choices.algorithm.descent import Flow, GradientDescent, Momentum
from recollect.choices.bias.base import Probe
from recollect.choices.bias.losses import L2
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import Paper

__all__ = [
    "comba",
    "efla",
    "erase_then_delta",
    "gated_delta_net_2",
    "kimi_delta_attention",
    "momentum_delta_rule",
    "oja",
    "preconditioned_gated_delta_net",
    "preconditioned_kda",
    "q_delta",
]

_HEAD, _CHANNELS = Decay(when="before"), Decay(per="key", when="before")
_OWN_PROBE = L2(probe=Probe(at="token"))
_SIGMOID_GATE = LayerOptions(output_gate="sigmoid", output_gate_rank=128)
_ONE_RATE = Tie(target="erase", source="lr", rule="copy")
_PRECONDITIONED = LayerOptions(
    ties=(
        Tie(target="probe", source="k", rule="copy"),
        Tie(target="k", source="k", rule="precondition", constant=1.5),
        _ONE_RATE,
    ),
)
_PRECONDITIONED_PAPER = Paper(
    "Preconditioned DeltaNet: curvature-aware sequence modeling for linear recurrences", 2026
).at("arXiv 2604.21100, diagonal approximation")
_PRECONDITIONED_FIDELITY = exact(
    "the diagonal preconditioner in the form of flash-linear-attention, x = 1.5",
    logsigmoid_decay=True,
    decay="The second moment decays by logsigmoid(linear(x)), as the memory does.",
    common_layer=True,
)


@preset(
    "Kimi Delta Attention",
    rule="M_t = M_(t−1) Diag(α_t)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(
        Paper("Kimi Team, Kimi Linear: an expressive, efficient attention architecture", 2025).at(
            "arXiv 2510.26692, eq. 1"
        ),
    ),
    fidelity=exact(
        "Kimi Delta Attention's recurrence, α_t per key channel and low-rank in the token",
        logsigmoid_decay=True,
        sizes="The output gate has rank 128, the head size of Kimi Linear.",
        common_layer=True,
    ),
)
def kimi_delta_attention() -> tuple[Recipe, LayerOptions]:
    """The delta rule on a memory whose key channels decay at rates of their own."""
    return Recipe(retention=_CHANNELS), _SIGMOID_GATE


@preset(
    "Comba",
    rule="M_t = α_t M_(t−1) − β_t (d α_t M_(t−1) k_t − v_t) k_tᵀ,  y_t = M_t (q_t − D k_t)",
    references=(
        Paper("Hu et al., Comba: improving bilinear RNNs with closed-loop control", 2025).at(
            "arXiv 2506.02475"
        ),
    ),
    fidelity=exact(
        "Comba's recurrence with a feedback factor d = sigmoid(·) and D per head",
        logsigmoid_decay=True,
        query_key_norm="The query is corrected after queries and keys have unit length.",
        common_layer=True,
    ),
)
def comba() -> tuple[Recipe, LayerOptions]:
    """The erasure is weaker than the write, and the query loses its part along the key."""
    return Recipe(bias=L2(probe=Probe(at="key")), retention=_HEAD), LayerOptions(
        # The erasure is c β_t/β_0 with β_0 = 1/2, so d = 2 c, initially sigmoid(1).
        gate_options={"erase": GateOptions(low=0.0, high=0.5, init=0.5 / (1 + math.exp(-1.0)))},
        ties=(
            Tie(target="erase", source="lr", rule="rate"),
            Tie(target="q", source="k", rule="difference"),
        ),
    )


@preset(
    "error-free linear attention",
    rule="M_t = M_(t−1)(I − ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ,  ε_t = (1 − exp(−β_t‖k_t‖²))/‖k_t‖²",
    references=(
        Paper(
            "Lei et al., Error-free linear attention is a free lunch: exact solution from "
            "continuous-time dynamics",
            2025,
        ).at("arXiv 2512.12602"),
    ),
    fidelity=exact(
        "the exact solution of dM/ds = −(M k_t − v_t) k_tᵀ over a time β_t in (0, 1)",
        query_key_norm="Queries have no norm: the RMS norm of the output removes their length.",
        gates="The authors' layer adds 1e-6 to ‖k_t‖²; here ε_t is β_t at a key of 0.",
        common_layer=True,
    ),
)
def efla() -> tuple[Recipe, LayerOptions]:
    """The flow of the delta rule's gradient over a time, without a discretisation error."""
    return Recipe(algorithm=Flow()), LayerOptions(
        qk_norm="none", gate_options={"lr": GateOptions(low=0.0, high=1.0)}
    )


@preset(
    "Gated DeltaNet-2",
    rule="M_t = M_(t−1) Diag(α_t)(I − (b_t ⊙ k_t) k_tᵀ) + (w_t ⊙ v_t) k_tᵀ",
    references=(
        Paper(
            "Hatamizadeh et al., Gated DeltaNet-2: decoupling erase and write in linear attention",
            2026,
        ).at("arXiv 2605.22791"),
    ),
    fidelity=exact(
        "the gated delta rule 2: b_t per key channel and w_t per value channel in (0, 1)",
        logsigmoid_decay=True,
        sizes="The output gate has rank 128; in flash-linear-attention it has the size of a head.",
        common_layer=True,
    ),
)
def gated_delta_net_2() -> tuple[Recipe, LayerOptions]:
    """One gate per key channel scales the erasure, and one per value channel the write."""
    recipe = Recipe(
        bias=L2(probe=Probe(at="token", rate=1.0)),
        retention=_CHANNELS,
        algorithm=GradientDescent(per="value"),
    )
    gate = GateOptions(activation="sigmoid", low=0.0, high=1.0, init=0.5, rank=0)
    return recipe, replace(
        _SIGMOID_GATE,
        gate_options={"probe": gate, "lr": gate},
        ties=(Tie(target="probe", source="k", rule="product"),),
    )


@preset(
    "Q-Delta",
    rule="M_t = α_t M_(t−1) − β_t (α_t M_(t−1)(k_t + λ_t q_t) − v_t) k_tᵀ",
    references=(
        Paper("Park et al., Q-Delta: beyond key–value associative state evolution", 2026).at(
            "arXiv 2606.08804"
        ),
    ),
    fidelity=exact(
        "Q-Delta's recurrence, λ_t = sigmoid(linear(x_t) − 0.9) as in the authors' layer",
        logsigmoid_decay=True,
        common_layer=True,
    ),
)
def q_delta() -> tuple[Recipe, LayerOptions]:
    """The prediction that is corrected is read at the key and at the query."""
    feedback = GateOptions(activation="sigmoid", low=0.0, high=1.0, init=1 / (1 + math.exp(0.9)))
    return Recipe(bias=_OWN_PROBE, retention=_HEAD), LayerOptions(
        gate_options={"probe": feedback},
        ties=(Tie(target="probe", source="q", rule="sum"), _ONE_RATE),
    )


@preset(
    "preconditioned Gated DeltaNet",
    rule="M_t = α_t M_(t−1) − β_t (α_t M_(t−1) k_t − v_t)(P_t ⊙ k_t)ᵀ,  "
    "P_t = x^(−r/(1 + |r|)),  r = log A_t − c,  A_t = a_t A_(t−1) + b_t k_t²",
    references=(_PRECONDITIONED_PAPER,),
    fidelity=_PRECONDITIONED_FIDELITY,
)
def preconditioned_gated_delta_net() -> tuple[Recipe, LayerOptions]:
    """Key channels that were long in the past are written with shorter steps."""
    return Recipe(bias=_OWN_PROBE, retention=_HEAD), _PRECONDITIONED


@preset(
    "preconditioned Kimi Delta Attention",
    rule="M_t = M_(t−1) Diag(α_t) − β_t (M_(t−1) Diag(α_t) k_t − v_t)(P_t ⊙ k_t)ᵀ,  "
    "P_t as in preconditioned Gated DeltaNet",
    references=(_PRECONDITIONED_PAPER,),
    fidelity=_PRECONDITIONED_FIDELITY,
)
def preconditioned_kda() -> tuple[Recipe, LayerOptions]:
    """Kimi Delta Attention whose long key channels are written with shorter steps."""
    return Recipe(bias=_OWN_PROBE, retention=_CHANNELS), _PRECONDITIONED


@preset(
    "Erase-then-Delta attention",
    rule="M_(t,1) = α_t M_(t−1)(I − a_t u_t u_tᵀ),  M_t = M_(t,1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(
        Paper(
            "Li et al., Erase-then-Delta attention: decoupling erase and write addresses in "
            "delta-rule linear attention",
            2026,
        ).at("arXiv 2606.26560"),
    ),
    fidelity=exact(
        "the erasure along u_t, then the delta rule along k_t",
        logsigmoid_decay=True,
        common_layer=True,
    ),
)
def erase_then_delta() -> tuple[Recipe, LayerOptions]:
    """One direction is erased before the delta rule writes along another."""
    recipe = Recipe(algorithm=GradientDescent(updates_per_token=2), retention=_HEAD)
    return recipe, LayerOptions(zero_values=1)


@preset(
    "Momentum DeltaNet",
    rule="S_t = μ_t S_(t−1) − η_t (α_t M_(t−1) k_t − v_t) k_tᵀ,  M_t = α_t M_(t−1) + β_t S_t,  "
    "y_t = M_t (q_t − D k_t)",
    references=(
        Paper(
            "Huang et al., MDN: parallelizing stepwise momentum for delta linear attention", 2026
        ).at("arXiv 2605.05838"),
    ),
    fidelity=exact(
        "the stepwise momentum rule in the form of flash-linear-attention's layer",
        logsigmoid_decay=True,
        gates="The gates are η_t in (0, 2) and β_t/(1 − μ_t) in (0, 1): S_t enters as a mean.\n"
        "The published layer scales β_t by sin²θ_t and α_t by cos²θ_t, tan θ_t = ξ η_t.",
        query_key_norm="The query is corrected after queries and keys have unit length.",
        common_layer=True,
    ),
)
def momentum_delta_rule() -> tuple[Recipe, LayerOptions]:
    """Gradients of the delta rule accumulate, and the sum enters the memory at a second rate."""
    recipe = Recipe(retention=_HEAD, algorithm=Momentum(outer_lr="input"))
    return recipe, LayerOptions(
        gate_options={"lr": GateOptions(low=0.0, high=2.0, init=1.0)},
        ties=(
            Tie(target="outer_lr", source="momentum", rule="remainder"),
            Tie(target="q", source="k", rule="difference"),
        ),
    )


@preset(
    "gated Oja's rule",
    rule="M_t = M_(t−1) Diag(α_t) − β_t (M_(t−1) Diag(α_t) k_t − v_t) k_tᵀ,  y_t = M_tᵀ q_t",
    references=(
        Paper("Hu, gated_oja_rule of flash-linear-attention", 2026).at("pull request 730"),
        Paper("Oja, Neural networks, principal components, and subspaces", 1989).at(
            "the subspace rule", introduces=False
        ),
    ),
    fidelity=exact(
        "the recurrence of flash-linear-attention's gated_oja_rule with one β_t per head",
        source_equation="S_t = S_(t−1) Diag(α_t) + β_t (k_t − S_(t−1) Diag(α_t) v_t) v_tᵀ,  "
        "o_t = S_tᵀ q_t  (gated_oja_rule)",
        sign="The source names inputs k and their codes v; here codes are keys and inputs are "
        "values.",
        decay="The decay is log α = logsigmoid(linear(x)) per channel of the code.",
        unpublished="The source has a kernel of this rule and no layer.",
        common_layer=True,
    ),
)
def oja() -> tuple[Recipe, LayerOptions]:
    """The delta rule from codes to inputs, read in the other direction: the code of a query."""
    memory = Matrix(read=Read(transposed=True))
    return Recipe(memory=memory, retention=_CHANNELS), LayerOptions()
