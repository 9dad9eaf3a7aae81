"""Normalised steps: as shares of an error, of a batch's limit, and of a direction's length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.gradients import HandWritten

if TYPE_CHECKING:
    from recollect.choices.questions import AlgorithmLike, MemberLike, MemoryLike, RecipeLike

__all__ = [
    "EPS",
    "TOGETHER",
    "by_keys",
    "correctable",
    "left",
    "limit_rules",
    "said",
    "search",
    "search_rules",
    "share",
    "share_at",
    "share_rules",
    "together",
]

EPS = 1e-6
"""ε of `share`."""

TOGETHER = 8
"""n of `left`: among how many tokens a batch's limit is shared where their keys have nothing in
common. Chosen by recall over batches of 8, 16 and 32: `docs/design/steps.md`."""


def said(memory: MemoryLike, value: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """What of a value a memory can say: all of it where it is not `Memory.bounded`.

    Args:
        memory: answers `Memory.reachable`.
        value: times `Bias.target`, ``[B, H, N, V]``.
        raw: keys before features ``[B, H, N, K]``. params: the memory's.
    """
    return memory.reachable(value, raw, params) if memory.bounded else value


def correctable(memory: MemoryLike, away: Tensor, error: Tensor) -> Tensor:
    """⟨e, g⟩ ``[...]``, e = the prediction less what the memory can say of the value.

    Polyak's step needs the loss less the least that it can be. A norm bounds what a memory says,
    and an error that it cannot reach would be counted with every step, so that steps overshoot the
    more, the longer values are. It is at least 0 then: nothing is left to correct.

    Args:
        memory: whether it is `Memory.bounded`.
        away: e ``[..., V]``, the prediction less what can be `said` of the value.
        error: g = ∂ℓ/∂prediction.
    """
    above = (away * error).sum(-1)
    return above.clamp_min(0) if memory.bounded else above


def share(above: Tensor, error: Tensor, gain: Tensor) -> Tensor:
    """ρ = ⟨e, g⟩ / (Σ_l ⟨G_l, J_l G_l⟩ + ε|g|²), 0 where that is 0/0; shaped like ``gain``.

    The scale of an association's gradient in a normalised step (`Algorithm.normalizes`): normalised
    least mean squares for an error linear in the prediction, Polyak's step for others, so that a
    rate of 1 corrects the association whatever the size of keys, values and weights. e is the
    prediction less the value (times `Bias.target`), or less what of it can be said (`correctable`),
    g = ∂ℓ/∂prediction, G_l = ∂ℓ/∂W_l of map l and ⟨G_l, J_l G_l⟩ its `Retention.gain`,
    |h_l|²|δ_l|² where there is no link and the map is applied once; all at the weights where
    gradients are taken. ε = 1e-6.

    Args:
        above: ⟨e, g⟩ ``[...]``.
        error: g ``[..., V]``.
        gain: Σ_l ⟨G_l, J_l G_l⟩ ``[...]``.
    """
    below = gain + EPS * error.square().sum(-1)
    zero = below == 0
    return (above / below.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def share_at(
    memory: MemoryLike,
    prediction: Tensor,
    value: Tensor,
    raw: Tensor,
    params: Mapping[str, Tensor],
    *,
    error: Tensor,
    gain: Tensor,
) -> Tensor:
    """`share` of associations at a memory, from what of their values it can say.

    Args:
        memory, value, raw, params: as in `said`.
        prediction: ``[B, H, N, V]``. error, gain: as in `share`.
    """
    above = correctable(memory, prediction - said(memory, value, raw, params), error)
    return share(above, error, gain)


def left(keys: Tensor, n: int) -> Tensor:
    """r_t = max(0, u_t),  u_t = 1 − Σ_(j<t) |cos(k_t, k_j)| u_j / n, over the tokens of a batch.

    What earlier tokens leave of the direction that token t writes in, if each takes the n-th part
    of what is left there for it (`Algorithm.limit`). With keys that are all equal Σ_t r_t / n is
    1 − (1 − 1/n)^b, under 1 for any number b of tokens; with orthogonal ones r_t = 1. A key of
    zeros overlaps with nothing.

    Args:
        keys: of the tokens in order, ``[..., b, K]``.
        n: from 1.
    """
    G: Tensor = _Gram.apply(keys)
    # Added to squares: a key of zeros overlaps with nothing, and second derivatives stay in range.
    least = torch.finfo(keys.dtype).tiny ** (1 / 3)
    per = (G.diagonal(dim1=-2, dim2=-1) * n + least).rsqrt()
    before = (G * per.unsqueeze(-1) * per.unsqueeze(-2)).abs()
    u: Tensor = _Remainders.apply(before)
    return u.clamp_min(0)


class _Gram(HandWritten):
    """k_i·k_j ``[..., b, b]``."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor) -> Tensor:
        ctx.save_for_backward(keys)
        return keys @ keys.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (keys,), (g,) = ctx.saved_tensors, grads
        return (g + g.mT) @ keys


class _Remainders(HandWritten):
    """u with u_t + Σ_(j<t) L_tj u_j = 1, of ``L [..., b, b]``, whose other entries go unread."""

    @staticmethod
    def forward(ctx: Any, L: Tensor) -> Tensor:
        ones = torch.ones_like(L[..., :1])
        u = torch.linalg.solve_triangular(L, ones, upper=False, unitriangular=True).squeeze(-1)
        ctx.save_for_backward(L, u)
        return u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (L, u), (g,) = ctx.saved_tensors, grads
        back = g.unsqueeze(-1)
        y = torch.linalg.solve_triangular(L.mT, back, upper=True, unitriangular=True)
        return -(y * u.unsqueeze(-2)).tril(-1)


def by_keys(algorithm: AlgorithmLike) -> bool:
    """Whether rates are η_t r_t: where a batch has one token r is 1.

    Args:
        algorithm: whose `Algorithm.limit`.
    """
    return algorithm.limit == "keys" and algorithm.batch > 1


def together(algorithm: AlgorithmLike) -> int:
    """n: tokens whose rates add up to the limit of an inner batch, b or that of `left`.

    Args:
        algorithm: whose batch.
    """
    return min(algorithm.batch, TOGETHER) if by_keys(algorithm) else algorithm.batch


def limit_rules(algorithm: AlgorithmLike) -> Iterator[str]:
    """What ``limit="keys"`` divides is the limit of normalised steps that add up."""
    if algorithm.limit == "batch":
        return
    if not algorithm.normalizes:
        yield (
            f"{algorithm.title}(limit='keys') measures how far the steps of a batch add up, as "
            "shares of its limit: set normalize=True, or limit='batch'"
        )
    if algorithm.eta is None:
        yield (
            f"{algorithm.title}(limit='keys') scales the rate of every token, and it declares "
            "none: give it a field lr, or use limit='batch'"
        )
    if algorithm.reduce == "mean":
        yield (
            f"{algorithm.title}(limit='keys') measures how far the steps of a batch add up, and "
            "reduce='mean' averages them: use limit='batch'"
        )


def search(along: Tensor, moved: Tensor, weight: Tensor, size: Tensor) -> Tensor:
    """λ = −Σ_i w_i ⟨e_i, J_i D⟩ / Σ_i w_i (|J_i D|² + ε‖D‖²), at least 0, and 0 where that is 0/0.

    How far a step goes along a direction D that is no single association's gradient
    (`Algorithm.searches`): to the least of Σ_i w_i |e_i + λ J_i D|², the errors of what the step is
    for as D moves them to first order. J_i D is what D does to prediction i, ‖D‖² the sum over all
    maps, and everything is taken at W°. ε = 1e-6.

    Args:
        along: e, the prediction less the value (times `Bias.target`), ``[..., n, V]``.
        moved: J D ``[..., n, V]``. weight: w ``[..., n]``, at least 0.
        size: ‖D‖² ``[...]``.
    """
    above = -((along * moved).sum(-1) * weight).sum(-1)
    below = ((moved.square().sum(-1) + EPS * size.unsqueeze(-1)) * weight).sum(-1)
    zero = below == 0
    return (above.clamp_min(0) / below.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def search_rules(algorithm: MemberLike, recipe: RecipeLike) -> Iterator[str]:
    """A searched step asks what its direction does to predictions."""
    yield from share_rules(algorithm, recipe)
    if recipe.retention.linked:
        yield (
            f"{algorithm.title}(normalize=True) asks what its direction does to predictions, and "
            f"{recipe.retention.title} puts a link between them: use retention.Keep() or Decay(), "
            "or normalize=False"
        )


def share_rules(algorithm: MemberLike, recipe: RecipeLike) -> Iterator[str]:
    """A normalised step measures what one association's gradient does to its prediction."""
    what = f"{algorithm.title}(normalize=True)"
    if recipe.bias.target is None:
        yield (
            f"{what} compares a step with the error it is to correct, and {recipe.bias.title} "
            "states no target that its loss is least at: use bias.L2(), or declare target"
        )
    if recipe.bias.probe is not None:
        yield (
            f"{what} scales erasure and write alike, and {recipe.bias.probe.title} has a rate "
            "for each: use normalize=False"
        )
    if recipe.context.horizon is None:
        yield (
            f"{what} scales the gradients of single associations, and {recipe.context.title} "
            "descends on all of the past at once: use context.Online() or Window()"
        )
    if not recipe.retention.additive:
        yield (
            f"{what} asks what a step added to A does to W, and {recipe.retention.title} "
            "rebuilds A from W: use normalize=False, or retention.Keep(), Decay(), Simplex() "
            "or another link"
        )
    read = recipe.memory.read
    if not recipe.features.finite and read.normalize != "none":
        yield (
            f"{what} asks what a step does to the prediction, and memory.{read.brief} divides that "
            "by a sum that moves with every key: use memory.Read() or normalize=False"
        )
