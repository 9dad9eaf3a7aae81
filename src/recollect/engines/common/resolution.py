"""Whether a dtype is precise enough for least squares whose past and ridge decay.

After F tokens of decay γ the Gram matrix D holds weights from 1 down to γ^F, and W = J (D + ρI)⁻¹
needs the smallest. With G = D + ρI and P = G⁻¹, rounding in G moves W by about ε ‖G‖‖P‖, and a
ridge raised by δ, where the dtype resolves no smaller, by at most δ‖P‖. `loss` takes both from
diagonals that are at hand. What it says was calibrated: `docs/design/least-squares.md`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["RESET", "Unresolved", "check", "looks", "loss", "lost_within", "refuse"]

RESET = math.log(torch.finfo(torch.float32).tiny)
"""Log decays below this are −∞: they forget everything."""

MOST = 2e-5
"""The largest loss at which outputs count as the minimum."""


class Unresolved(Exception):
    """A dtype does not hold the digits: at which end of a chunk (slot), row and head."""

    def __init__(self, slot: int, row: int, head: int, worst: float) -> None:
        super().__init__(f"slot {slot}, row {row}, head {head}: {worst:.1e}")
        self.slot, self.row, self.head, self.worst = slot, row, head, worst


def looks(x: Tensor) -> bool:
    """Whether numbers may be looked at: a GPU would have to wait, a compiled graph would break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def loss(G: Tensor, P: Tensor, raised: Tensor) -> Tensor:
    """Relative error of W to be feared, ``[...]``.

    Args:
        G, P: the system and its inverse ``[..., F, F]``.
        raised: what the ridge was raised to where the dtype resolves no smaller one, else 0,
            ``[...]``.
    """
    size, inverse = (x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (G, P))
    rounding = 5 * torch.finfo(G.dtype).eps * size * inverse / G.shape[-1] ** 2
    return torch.maximum(rounding, raised * inverse)


def lost_within(A: Tensor, half: Tensor) -> Tensor:
    """The same inside chunks, ``[...]``: what L Lᵀ = A ``[..., C, C]`` takes from A's diagonal.

    ``half`` is L⁻¹. The square of L's diagonal is what earlier tokens of the chunk leave of A's,
    and rounding in the latter stays.
    """
    left = half.diagonal(dim1=-2, dim2=-1).square() * A.diagonal(dim1=-2, dim2=-1)
    return torch.finfo(A.dtype).eps * left.amax(-1)


def check(lost: Tensor, *, end: int = 0, chunk: int = 1) -> None:
    """Raise `Unresolved` where a `loss`, ``[B, H]`` or ``[n, B, H]`` of chunks, is too large.

    Args:
        end: slot after the first of these chunks. chunk: slots of a chunk.
    """
    lost = lost.detach().reshape(-1, *lost.shape[-2:])
    if not lost.numel() or float(lost.max()) <= MOST:
        return
    first = (~(lost <= MOST)).int().argmax()  # also where it is no number
    place, row, head = (int(x) for x in torch.unravel_index(first, lost.shape))
    raise Unresolved(max(end + place * chunk - 1, 0), row, head, float(lost[place, row, head]))


def refuse(worst: float, *, row: int, token: int, head: int, title: str) -> ValueError:
    """The sentence."""
    lost = worst if worst < 1 else 1.0  # also where it is no number
    return ValueError(
        f"{title} is not determined at row {row}, token {token}, head {head}: decays this strong "
        "leave less of older tokens than float64 resolves beside new ones, and the ridge fades "
        f"with them (relative error {lost:.0e}): decay less, use fewer features, refresh the ridge "
        "sooner (every=...), or use form='constant', whose ridge stays"
    )
