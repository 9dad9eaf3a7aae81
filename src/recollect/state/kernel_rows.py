"""Weights over a kernel's features in dual form: the keys, and one row of weights per key.

A map that reads features has W = Σ_i u_i φ(z_i)ᵀ, so W φ(x) = Σ_i u_i κ(z_i, x): one row u_i per
key z_i is all there is to know. What is written next to it (momentum, the mass that a normaliser
sums) is kept per key as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.state.flat import numbered
from recollect.typing import Weights

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["KernelRows", "initial_rows", "join_rows"]


@dataclass(frozen=True, kw_only=True)
class KernelRows:
    """Rows by key, newest last and aligned right.

    Attributes:
        k: keys ``[B, n, H, K]``.
        rows: u of every map that reads the features, ``[B, n, H, out]`` each.
        slots: the algorithm's state by name, shaped like ``rows``.
        mass: what each key adds to a normaliser ``[B, n, H]``: 1, decayed like the memory, but 0
            only where nothing of the key is left (α was 0, and no step has reached its row since).
        mask: ``[B, n]``, False where a slot holds nothing (its numbers are then 0).
    """

    k: Tensor
    rows: Weights
    mass: Tensor
    mask: Tensor
    slots: Mapping[str, Weights] = field(default_factory=dict)

    def map(self, f: Callable[[Tensor], Tensor]) -> KernelRows:
        """Apply ``f`` to every tensor."""
        return KernelRows(
            k=f(self.k),
            rows=tuple(f(u) for u in self.rows),
            mass=f(self.mass),
            mask=f(self.mask),
            slots={name: tuple(f(u) for u in slot) for name, slot in self.slots.items()},
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor, in the order in which `map` meets them."""
        slots = [u for slot in self.slots.values() for u in slot]
        return [self.k, *self.rows, self.mass, self.mask, *slots]

    def reset(self, rows: Tensor, given: tuple[Tensor, ...] = ()) -> KernelRows:
        """Rows where ``rows [B]`` is True start anew from the pairs ``given`` (none if omitted)."""
        B, _, H = self.mass.shape
        m = given[0].shape[-2] if given else 0
        staying = self.mask & ~rows[:, None]
        size = max(int(staying.sum(1).max()) if B else 0, m if bool(rows.any()) else 0)
        fresh = [u[:, :0] for u in (self.k, *self.rows)]
        if given:
            fresh = [
                a.to(u.dtype).expand(B, H, m, a.shape[-1]).transpose(1, 2)
                for a, u in zip(given, fresh, strict=True)
            ]

        def fit(x: Tensor) -> Tensor:  # aligned right in ``size`` slots
            missing = size - x.shape[1]
            if missing <= 0:
                return x[:, x.shape[1] - size :]
            return torch.cat([x.new_zeros(B, missing, *x.shape[2:]), x], dim=1)

        def choose(old: Tensor, new: Tensor) -> Tensor:
            shaped = rows.view(-1, *(1,) * (old.dim() - 1))
            return torch.where(shaped, fit(new), fit(old))

        k, *u = (choose(a, b) for a, b in zip((self.k, *self.rows), fresh, strict=True))
        ones = self.mass.new_ones(B, m, H)
        slots = {
            name: tuple(
                choose(s, torch.zeros_like(f)) for s, f in zip(slot, fresh[1:], strict=True)
            )
            for name, slot in self.slots.items()
        }
        return KernelRows(
            k=k,
            rows=tuple(u),
            mass=choose(self.mass, ones),
            mask=choose(self.mask, self.mask.new_ones(B, m)),
            slots=slots,
        )

    def to_dict(self) -> dict[str, Tensor]:
        """Flat names to plain tensors."""
        flat = {"dual.k": self.k, "dual.mass": self.mass, "dual.mask": self.mask}
        flat.update({f"dual.rows.{i}": u for i, u in enumerate(self.rows)})
        for name, slot in self.slots.items():
            flat.update({f"dual.slots.{name}.{i}": u for i, u in enumerate(slot)})
        return flat

    @classmethod
    def from_dict(cls, flat: Mapping[str, Tensor]) -> KernelRows | None:
        """What `to_dict` wrote; ``None`` when nothing of it is there."""
        if "dual.k" not in flat:
            return None
        head = "dual.slots."
        names = dict.fromkeys(n[len(head) :].split(".")[0] for n in flat if n.startswith(head))
        return cls(
            k=flat["dual.k"],
            rows=numbered(flat, "dual.rows."),
            mass=flat["dual.mass"],
            mask=flat["dual.mask"],
            slots={name: numbered(flat, f"{head}{name}.") for name in names},
        )


def initial_rows(
    recipe: Recipe,
    given: tuple[Tensor, ...],
    *,
    B: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KernelRows:
    """The rows before the first token: none, or the pairs of ``init``.

    Args:
        given: keys ``[H, m, K]``, then the rows of every map that reads the features,
            ``[H, m, out]`` each; or nothing.

    Raises:
        RecipeError: tensors of the wrong number or shape.
    """
    widths = recipe.row_widths(V)
    if not given:
        given = tuple(torch.zeros(H, 0, size, dtype=dtype, device=device) for size in (K, *widths))
    m = given[0].shape[-2] if given[0].dim() > 2 else 0
    for x, size in zip(given, (K, *widths), strict=True):
        if tuple(x.shape) not in ((H, m, size), (B, H, m, size)):
            raise RecipeError(
                f"init of {recipe.memory.title} under {recipe.features.title} must begin with keys "
                f"{[H, m, K]} and rows {', '.join(str([H, m, w]) for w in widths)}, m pairs; "
                f"found {list(x.shape)}"
            )
    keys, *rows = (
        x.to(dtype=dtype, device=device).expand(B, H, m, x.shape[-1]).transpose(1, 2) for x in given
    )
    return KernelRows(
        k=keys,
        rows=tuple(rows),
        mass=torch.ones(B, m, H, dtype=dtype, device=device),
        mask=torch.ones(B, m, dtype=torch.bool, device=device),
        slots={name: tuple(torch.zeros_like(u) for u in rows) for name in recipe.algorithm.slots},
    )


def join_rows(old: KernelRows, new: KernelRows, count: Tensor | None) -> KernelRows:
    """``old``, then the first ``count [B]`` of ``new``, per row, aligned right.

    ``new`` stands aligned left and its mask is ignored; ``count`` omitted takes all of it. Cost
    O(n) per call.
    """
    before, more = old.k.shape[1], new.k.shape[1]
    if count is None:
        mask = torch.ones_like(new.mask)
        joined = _zip(old, new, lambda a, b: torch.cat([a, b.to(a.dtype)], dim=1))
        return KernelRows(
            k=joined.k,
            rows=joined.rows,
            mass=joined.mass,
            slots=joined.slots,
            mask=torch.cat([old.mask, mask], dim=1),
        )
    n = int((old.mask.sum(1) + count).max()) if count.numel() else before
    index = (before + count)[:, None] - n + torch.arange(n, device=count.device)  # [B, n]
    inside = index.clamp(0, max(before + more - 1, 0))
    mask = index >= 0
    if before:
        mask &= torch.where(index < before, old.mask.gather(1, index.clamp(0, before - 1)), True)

    def pick(a: Tensor, b: Tensor) -> Tensor:
        both = torch.cat([a, b.to(a.dtype)], dim=1)
        shape = (1,) * (a.dim() - 2)
        picked = both.gather(1, inside.view(*inside.shape, *shape).expand(-1, -1, *a.shape[2:]))
        return torch.where(mask.view(*mask.shape, *shape), picked, torch.zeros_like(picked))

    joined = _zip(old, new, pick)
    return KernelRows(k=joined.k, rows=joined.rows, mass=joined.mass, slots=joined.slots, mask=mask)


def _zip(a: KernelRows, b: KernelRows, f: Callable[[Tensor, Tensor], Tensor]) -> KernelRows:
    """``f`` of every pair of tensors but the masks."""

    def both(x: Weights, y: Weights) -> Weights:
        return tuple(f(p, q) for p, q in zip(x, y, strict=True))

    return KernelRows(
        k=f(a.k, b.k),
        rows=both(a.rows, b.rows),
        mass=f(a.mass, b.mass),
        mask=a.mask,
        slots={name: both(a.slots[name], b.slots[name]) for name in a.slots},
    )
