"""Weights over the features of a kernel in dual form: one row of weights per key.

A map that reads features has W = Σ_i u_i φ(z_i)ᵀ, so W φ(x) = Σ_i u_i κ(z_i, x). The rows u_i and
keys z_i determine it. Momentum and the mass that a normaliser sums are also stored per key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.messages import RecipeError
from recollect.state.tree import TensorTree, align_right, where_rows
from recollect.typing import Weights

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["KernelRows", "append_rows", "initial_kernel_rows"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KernelRows(TensorTree):
    """Keys and their rows of weights, newest last and aligned right."""

    k: Tensor  # keys [B, n, H, K]
    rows: Weights = ()  # u of every map that reads the features, [B, n, H, out] each
    # Term of each key in a normaliser [B, n, H]: 1 times the decays of the memory. The term is 0
    # only if the key has no effect (α was 0, and no later step reached its row).
    mass: Tensor
    mask: Tensor  # [B, n], False at empty slots, whose tensors are 0
    # state of the algorithm by name, shaped like rows
    slots: Mapping[str, Weights] = field(default_factory=dict)

    def reset(self, rows: Tensor, pairs: tuple[Tensor, ...] = ()) -> KernelRows:
        """Restart batch elements if ``rows [B]`` is True, from ``pairs`` of keys and weights."""
        B, _, H = self.mass.shape
        m = pairs[0].shape[-2] if pairs else 0
        num_staying = (self.mask & ~rows[:, None]).sum(1)
        n = max(int(num_staying.max()) if B else 0, m if bool(rows.any()) else 0)
        initial = [u[:, :0] for u in (self.k, *self.rows)]
        if pairs:
            initial = [
                a.to(u.dtype).expand(B, H, m, a.shape[-1]).transpose(1, 2)
                for a, u in zip(pairs, initial, strict=True)
            ]

        def choose(old: Tensor, new: Tensor) -> Tensor:
            return where_rows(rows, align_right(new, n), align_right(old, n))

        k, *u = (choose(a, b) for a, b in zip((self.k, *self.rows), initial, strict=True))
        blank = [torch.zeros_like(x) for x in initial[1:]]
        return KernelRows(
            k=k,
            rows=tuple(u),
            mass=choose(self.mass, self.mass.new_ones(B, m, H)),
            mask=choose(self.mask, self.mask.new_ones(B, m)),
            slots={
                name: tuple(choose(s, zero) for s, zero in zip(slot, blank, strict=True))
                for name, slot in self.slots.items()
            },
        )


def initial_kernel_rows(
    recipe: Recipe,
    # keys [H, m, K], then the rows of every map that reads the features, [H, m, out] each; empty
    # for no rows
    pairs: tuple[Tensor, ...],
    *,
    B: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KernelRows:
    """Return the rows before the first token.

    Raises:
        RecipeError: tensors of the wrong number or shape.
    """
    widths = recipe.row_widths(V)
    if not pairs:
        pairs = tuple(torch.zeros(H, 0, size, dtype=dtype, device=device) for size in (K, *widths))
    m = pairs[0].shape[-2] if pairs[0].dim() > 2 else 0
    for x, size in zip(pairs, (K, *widths), strict=True):
        if tuple(x.shape) not in ((H, m, size), (B, H, m, size)):
            raise RecipeError(
                f"initial_memory of {recipe.memory.title} under {recipe.features.title} must begin "
                f"with keys {[H, m, K]} and rows {', '.join(str([H, m, w]) for w in widths)} for m "
                f"pairs, not {list(x.shape)}"
            )
    keys, *rows = (
        x.to(dtype=dtype, device=device).expand(B, H, m, x.shape[-1]).transpose(1, 2) for x in pairs
    )
    return KernelRows(
        k=keys,
        rows=tuple(rows),
        mass=torch.ones(B, m, H, dtype=dtype, device=device),
        mask=torch.ones(B, m, dtype=torch.bool, device=device),
        slots={name: tuple(torch.zeros_like(u) for u in rows) for name in recipe.algorithm.slots},
    )


def append_rows(old: KernelRows, new: KernelRows, count: Tensor | None) -> KernelRows:
    """Append the first ``count [B]`` rows of ``new`` per batch element (``None``: all rows).

    The rows of ``new`` are aligned left, those of the result right. The mask of ``new`` is ignored.
    The cost is O(n) per call.
    """
    num_old, num_new = old.k.shape[1], new.k.shape[1]
    if count is None:
        mask = torch.cat([old.mask, torch.ones_like(new.mask)], dim=1)
        joined = _map_pairs(old, new, lambda a, b: torch.cat([a, b.to(a.dtype)], dim=1))
        return replace(joined, mask=mask)
    n = int((old.mask.sum(1) + count).max()) if count.numel() else num_old
    index = (num_old + count)[:, None] - n + torch.arange(n, device=count.device)  # [B, n]
    inside = index.clamp(0, max(num_old + num_new - 1, 0))
    mask = index >= 0
    if num_old:
        is_filled = old.mask.gather(1, index.clamp(0, num_old - 1))
        mask &= torch.where(index < num_old, is_filled, True)

    def pick(a: Tensor, b: Tensor) -> Tensor:
        both, ones = torch.cat([a, b.to(a.dtype)], dim=1), (1,) * (a.dim() - 2)
        picked = both.gather(1, inside.view(*inside.shape, *ones).expand(-1, -1, *a.shape[2:]))
        return torch.where(mask.view(*mask.shape, *ones), picked, torch.zeros_like(picked))

    return replace(_map_pairs(old, new, pick), mask=mask)


def _map_pairs(a: KernelRows, b: KernelRows, f: Callable[[Tensor, Tensor], Tensor]) -> KernelRows:
    """Apply ``f`` to every pair of tensors except the masks."""
    pairs = zip(a.flatten()[1], b.flatten()[1], strict=True)
    return a.with_tensors([x if x is a.mask else f(x, y) for x, y in pairs])
