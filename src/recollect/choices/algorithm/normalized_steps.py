"""Scales of normalised steps: Polyak's step, overlap in a batch, and line search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, gram
from recollect.numerics import safe_divide

if TYPE_CHECKING:
    from recollect.choices.algorithm.base import Algorithm
    from recollect.choices.member import Member
    from recollect.choices.memory.base import Memory
    from recollect.recipe.recipe import Recipe

__all__ = [
    "EPS",
    "MAX_OVERLAP",
    "correctable_error",
    "effective_batch_size",
    "line_search_conflicts",
    "line_search_scale",
    "measures_overlap",
    "nearest_output_value",
    "normalized_step_conflicts",
    "overlap_conflicts",
    "overlap_discount",
    "overlap_scale",
    "polyak_scale",
    "polyak_scale_at",
    "signed_discount",
]

EPS = 1e-6
"""ε of `polyak_scale`."""

MAX_OVERLAP = 8
"""Largest n of `overlap_discount`, the number of tokens that divide a batch's stability limit.
Chosen by recall over batches of 8, 16 and 32: `docs/design/steps.md`."""


def nearest_output_value(
    memory: Memory, value: Tensor, raw: Tensor, params: Mapping[str, Tensor]
) -> Tensor:
    """Return the closest output to values ``[B, H, N, V]`` that the memory can produce.

    Values are multiplied by `Bias.target`. The result is the values themselves if the memory is not
    `Memory.bounded`. ``raw`` are the keys before features.
    """
    return memory.nearest_output(value, raw, params) if memory.bounded else value


def correctable_error(memory: Memory, residual: Tensor, error: Tensor) -> Tensor:
    """Return ⟨e, g⟩ ``[...]`` of a residual e and an error g = ∂ℓ/∂prediction.

    e is the prediction minus `nearest_output_value`. Polyak's step uses the loss minus its minimum.
    A norm bounds the output of a memory. If the error that no output can correct were included,
    every step would overshoot, the more so for long values. The result for a bounded memory is at
    least 0.
    """
    product = (residual * error).sum(-1)
    return product.clamp_min(0) if memory.bounded else product


def polyak_scale(numerator: Tensor, error: Tensor, gain: Tensor) -> Tensor:
    """Return ρ = ⟨e, g⟩ / (Σ_l ⟨G_l, J_l G_l⟩ + ε|g|²), shaped like ``gain``; 0/0 is 0.

    ρ scales the gradient of an association in a normalised step
    (`Algorithm.uses_normalized_steps`). It gives normalised least mean squares for an error linear
    in the prediction, and Polyak's step for other errors. A rate of 1 corrects the association for
    any size of keys, values and weights.

    e is the prediction minus the value (times `Bias.target`), or minus the nearest output
    (`correctable_error`). g = ∂ℓ/∂prediction, and G_l = ∂ℓ/∂W_l of map l. The gain ⟨G_l, J_l G_l⟩
    is |h_l|²|δ_l|² without a link if the map is applied once. All are taken at the weights of the
    gradients. ε = 1e-6.
    """
    return safe_divide(numerator, gain + EPS * error.square().sum(-1))


def polyak_scale_at(
    memory: Memory,
    prediction: Tensor,
    value: Tensor,
    raw: Tensor,
    params: Mapping[str, Tensor],
    *,
    error: Tensor,
    gain: Tensor,
) -> Tensor:
    """Return `polyak_scale` of associations, relative to the nearest outputs of the memory."""
    residual = prediction - nearest_output_value(memory, value, raw, params)
    return polyak_scale(correctable_error(memory, residual, error), error, gain)


def overlap_discount(keys: Tensor, n: int) -> Tensor:
    """Return r_t = max(0, u_t) with u_t = 1 − Σ_(j<t) |cos(k_t, k_j)| u_j / n, for a batch.

    r_t is the fraction of token t's step that remains after discounting the overlap of its key with
    earlier keys of the batch ``[..., b, K]`` (`Algorithm.batch_overlap`). n tokens divide the
    stability limit. For b equal keys Σ_t r_t / n is 1 − (1 − 1/n)^b, which is below 1 for any b.
    For orthogonal keys r_t is 1. A key of zeros has no overlap.
    """
    return signed_discount(keys, n).relu()


def signed_discount(keys: Tensor, n: int) -> Tensor:
    """Return u_t ``[..., b]`` of `overlap_discount`, with the same arguments."""
    G = gram(keys.contiguous())
    scale = overlap_scale(G.diagonal(dim1=-2, dim2=-1), n)
    overlap = (G * scale.unsqueeze(-1) * scale.unsqueeze(-2)).abs()
    u: Tensor = _OverlapRecursion.apply(overlap)
    return u


def overlap_scale(squared_norm: Tensor, n: int) -> Tensor:
    """Return 1 / (√n ‖k‖) from ‖k‖². Scaled keys have the products |cos(k_t, k_j)| / n."""
    # Added to squared norms, so that keys of zeros have finite second derivatives.
    return (squared_norm * n + torch.finfo(squared_norm.dtype).tiny ** (1 / 3)).rsqrt()


class _OverlapRecursion(CustomFunction):
    """Solution u of u_t + Σ_(j<t) L_tj u_j = 1, for the strictly lower part of L ``[..., b, b]``.

    Other entries of L are ignored.
    """

    @staticmethod
    def forward(ctx: Any, L: Tensor) -> Tensor:
        ones = torch.ones_like(L[..., :1])
        u = torch.linalg.solve_triangular(L, ones, upper=False, unitriangular=True).squeeze(-1)
        ctx.save_for_backward(L, u)
        return u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (L, u), (g,) = ctx.saved_tensors, grads
        y = torch.linalg.solve_triangular(L.mT, g.unsqueeze(-1), upper=True, unitriangular=True)
        return -(y * u.unsqueeze(-2)).tril(-1)


def measures_overlap(algorithm: Algorithm) -> bool:
    """Whether rates are η_t r_t (`Algorithm.batch_overlap`); False for batches of one token."""
    return algorithm.batch_overlap == "measured" and algorithm.batch_size > 1


def effective_batch_size(algorithm: Algorithm) -> int:
    """Return n, the number of tokens whose rates add up to a batch's limit.

    n is min(b, `MAX_OVERLAP`) with measured overlap, else b.
    """
    b = algorithm.batch_size
    return min(b, MAX_OVERLAP) if measures_overlap(algorithm) else b


def overlap_conflicts(algorithm: Algorithm) -> Iterator[str]:
    """Yield conflicts of ``batch_overlap="measured"``, which needs normalised steps that add up."""
    if algorithm.batch_overlap == "worst_case":
        return
    if not algorithm.uses_normalized_steps:
        yield (
            f"{algorithm.title}(batch_overlap='measured') divides the stability limit of a "
            "batch of normalised steps: set normalized_steps=True, or batch_overlap='worst_case'"
        )
    if algorithm.rate_field is None:
        yield (
            f"{algorithm.title}(batch_overlap='measured') scales the rate of every token, and it "
            "declares none: give it a field lr, or use batch_overlap='worst_case'"
        )
    if algorithm.reduction == "mean":
        yield (
            f"{algorithm.title}(batch_overlap='measured') needs steps that add up, and "
            "reduction='mean' averages them: use batch_overlap='worst_case'"
        )


def line_search_scale(residual: Tensor, change: Tensor, weight: Tensor, size: Tensor) -> Tensor:
    """Return λ = −Σ_i w_i ⟨e_i, J_i D⟩ / Σ_i w_i (|J_i D|² + ε‖D‖²), at least 0; 0/0 is 0.

    λ is the length of a step along a direction D that is not the gradient of a single association
    (`Algorithm.uses_line_search`). It minimises Σ_i w_i |e_i + λ J_i D|². e is the prediction minus
    the value (times `Bias.target`), the change J_i D that of prediction i along D, both
    ``[..., n, V]``. The size ‖D‖² is the sum over all maps, at W°. ε = 1e-6.
    """
    numerator = -((residual * change).sum(-1) * weight).sum(-1)
    denominator = ((change.square().sum(-1) + EPS * size.unsqueeze(-1)) * weight).sum(-1)
    return safe_divide(numerator.clamp_min(0), denominator)


def line_search_conflicts(algorithm: Member, recipe: Recipe) -> Iterator[str]:
    """Yield conflicts of a line search, which needs the effect of its direction on predictions."""
    yield from normalized_step_conflicts(algorithm, recipe)
    if recipe.retention.has_link:
        yield (
            f"{algorithm.title}(normalized_steps=True) needs the effect of its direction on "
            f"predictions, and {recipe.retention.title} puts a link between them: use "
            "retention.Keep() or Decay(), or normalized_steps=False"
        )


def normalized_step_conflicts(algorithm: Member, recipe: Recipe) -> Iterator[str]:
    """Yield conflicts of a normalised step, which needs a gradient's effect on its prediction."""
    title = f"{algorithm.title}(normalized_steps=True)"
    if recipe.bias.target is None:
        yield (
            f"{title} needs the error that a step corrects, and {recipe.bias.title} "
            "declares no target, the minimum of its loss: use bias.L2(), or declare target"
        )
    if recipe.bias.probe is not None:
        yield (
            f"{title} scales erasure and write alike, and {recipe.bias.probe.title} has a rate "
            "for each: use normalized_steps=False"
        )
    if recipe.context.horizon is None:
        yield (
            f"{title} scales the gradients of single associations, and {recipe.context.title} "
            "descends on all of the past at once: use context.Online() or Window()"
        )
    if not recipe.retention.is_additive:
        yield (
            f"{title} needs the effect of a step of A on W, and {recipe.retention.title} "
            "rebuilds A from W: use normalized_steps=False, or retention.Keep(), Decay(), "
            "Simplex() or another link"
        )
    read = recipe.memory.read
    if not recipe.features.finite and read.normalize != "none":
        yield (
            f"{title} needs the effect of a step on the prediction, and memory.{read.brief} "
            "divides by a sum that changes with every key: use memory.Read() or "
            "normalized_steps=False"
        )
