"""Restrictions of `KernelWeighted` by which each token moves the keys of all earlier tokens."""

from __future__ import annotations

import torch
from torch.nn import functional

from recollect.choices.context.base import MIN_LOG_DECAY, Context
from recollect.choices.context.weights import ContextWeights, KeyTransition, VisibleAssociations
from recollect.choices.equation_terms import format_number
from recollect.choices.member import member
from recollect.fields import Gate, quantity

__all__ = ["KeyDecay", "KeyReflection"]


class _KeyTransition(Context):
    """Base of restrictions that move keys and weigh no association."""

    is_restriction = True

    horizon = None  # type: ignore[assignment]

    factor = ""  # type: ignore[assignment]


@member
class KeyDecay(_KeyTransition):
    """Keys whose channels decay with each later token (Wall attention).

    The query at t compares with k_i^(t) = Π_(i<j≤t) Diag(α_j) k_i, so that ⟨q_t, k_i^(t)⟩ =
    Σ_n q_tn k_in exp(Σ_(i<j≤t) log α_jn). ``Prefix(decay=...)`` decays the weight of an
    association instead, with one α per head. The state stores α next to each key.
    Source: Tilde Research 2026 (Wall Attention).

    Args:
        alpha: α in (0, 1]: a constant, the gate ``"log_key_decay" [B, T, H, K]``, or a param.

    Examples:
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalConstant(),
        ...     context=rc.context.KernelWeighted(restrictions=(rc.context.KeyDecay(),)),
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 2, 8)
        >>> gates = {"log_key_decay": torch.zeros(1, 5, 2, 8)}  # α = 1: softmax attention
        >>> y, _ = rc.recall(recipe, q, k, v, gates)
        >>> plain = recipe.replace(context=rc.context.KernelWeighted())
        >>> torch.allclose(y, rc.recall(plain, q, k, v)[0], atol=1e-6)
        True
    """

    alpha: float | str = quantity(
        "input",
        name="key_decay",
        above=0,
        at_most=1,
        init=0.98,
        axes=("K",),
        log=True,
        letter="α",
        role="decay",
    )

    key_transition = "decay"

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        log_decay = visible.rates["log_key_decay"].to(visible.k.dtype)
        if log_decay.dim() == 3:  # a constant
            log_decay = log_decay.unsqueeze(-1).expand_as(visible.k)
        log_decay = log_decay.clamp_min(MIN_LOG_DECAY)
        log_decay = torch.where(visible.valid[..., None, None], log_decay, 0.0)
        return ContextWeights(transition=KeyTransition(log_decay=log_decay))

    def notes(self) -> tuple[str, ...]:
        alpha = self.symbol("alpha", "j")
        alpha = f"Diag({alpha})" if isinstance(alpha, str) else format_number(alpha)
        return (f"k_i^(t) = Π_(i<j≤t) {alpha} k_i",)


@member
class KeyReflection(_KeyTransition):
    """Keys that each later token reflects along a direction of its own (PaTH).

    The query at t compares with k_i^(t) = H_t … H_(i+1) k_i, where H_j = I − β_j w_j w_jᵀ and w_j
    is the gate ``"reflection" [B, T, H, K]`` of token j, scaled to length 1. H_j is a Householder
    reflection for β = 2, a projection for β = 1, and the identity for w = 0. The state stores w and
    β next to each key.
    Source: Yang et al. 2025 (PaTH attention), definition of the logits.

    Args:
        beta: β in [0, 2]: a constant, the gate ``"reflection_rate"``, or a param.

    Examples:
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalConstant(),
        ...     context=rc.context.KernelWeighted(
        ...         restrictions=(rc.context.KeyReflection(beta=1.0),)
        ...     ),
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
        >>> w = torch.zeros(1, 5, 1, 4)
        >>> w[:, 3] = k[:, 0]  # token 3 removes the direction of key 0 from all earlier keys
        >>> y, _ = rc.recall(recipe, q, k, v, {"reflection": w})
        >>> y.shape
        torch.Size([1, 5, 1, 4])
    """

    beta: float | str = quantity(
        "input", name="reflection_rate", at_least=0, at_most=2, init=1.0, letter="β", role="rate"
    )

    key_transition = "reflection"

    def gates(self) -> tuple[Gate, ...]:
        return (
            *super().gates(),
            Gate(name="reflection", owner=self.title, axes=("K",), role="key"),
        )

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        valid, dtype = visible.valid[..., None], visible.k.dtype
        w = functional.normalize(visible.rates["reflection"].to(dtype), dim=-1)
        direction = torch.where(valid.unsqueeze(-1), w, 0.0)
        rate = torch.where(valid, visible.rates["reflection_rate"].to(dtype), 0.0)
        return ContextWeights(transition=KeyTransition(direction=direction, rate=rate))

    def notes(self) -> tuple[str, ...]:
        beta = self.symbol("beta", "j")
        scale = f"{beta} " if isinstance(beta, str) else f"{format_number(beta)} "
        return (f"k_i^(t) = H_t … H_(i+1) k_i, H_j = I − {scale}w_j w_jᵀ, ‖w_j‖ = 1",)
