"""Cutoff beyond which decay makes softmax weights negligible.

With logits q_t·k_i + d_ti, |q·k| ≤ L and d_tt = 0 for a query's own association, association i has
at most e^(2L + d_ti) of the softmax. Where that is below ε^2.5 it changes no digit of float32 or
float64, but costs as much as any other; and between e^−103 and e^−87 its probability is a subnormal
number of float32, with which a product takes a processor ten times as long (measured: FoX at 4096
tokens, forward and backward, 5.2 s with and 0.9 s without them on one core).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DecayCutoff"]


@dataclass(frozen=True, kw_only=True)
class DecayCutoff:
    """Which associations a decay leaves a weight that changes a digit.

    Attributes:
        of_key: logarithms of the weights up to something of the query alone, ``[B, n, H]``.
        furthest: how far below a query's own association a logarithm may lie; inf for any.
    """

    of_key: Tensor
    furthest: float

    @classmethod
    def of(
        cls, of_key: Tensor, q: Tensor, k: Tensor, *, scale: float, by_length: float
    ) -> DecayCutoff:
        """From queries and keys ``[..., K]`` with logits scale·q·k + by_length·‖k‖²."""
        if torch.compiler.is_compiling() or not q.numel() or not k.numel():
            return cls(of_key=of_key.detach(), furthest=math.inf)
        longest = [x.detach().square().sum(-1).amax() for x in (q, k)]
        most = abs(scale) * (longest[0] * longest[1]).sqrt() + abs(by_length) * longest[1]
        least = 2.5 * math.log(torch.finfo(k.dtype).eps)
        return cls(of_key=of_key.detach(), furthest=float(2 * most) - least)

    def negligible(self, own: Tensor, keys: slice) -> Tensor:
        """``[B, m, H]``: keys that no query with its own association in slots ``own`` can weigh."""
        lowest = self.of_key[:, own].amin(1, keepdim=True)
        return self.of_key[:, keys] < lowest - self.furthest

    def first_keys(self, slots: Tensor, cuts: list[tuple[slice, slice]]) -> dict[int, int]:
        """By each piece's first query, the first key that one of its queries may weigh."""
        if math.isinf(self.furthest):
            return {}
        gone = [self.negligible(slots[queries], keys).all(-1).all(0) for queries, keys in cuts]
        firsts = [keys_gone.logical_not().to(torch.uint8).argmax() for keys_gone in gone]
        return {
            queries.start: keys.start + low
            for (queries, keys), low in zip(cuts, torch.stack(firsts).tolist(), strict=True)
        }
