"""Sparse features: the best of n² slots, found with two sets of n sub-keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Features, affine_map
from recollect.choices.member import member
from recollect.fields import Param, integer
from recollect.messages import RecipeError

__all__ = ["ProductKeys"]


@member
class ProductKeys(Features):
    """Softmax over the best slots of a product of two sets of learned sub-keys.

    Slot (i, j) of n² has the score a_i·x₁ + b_j·x₂ for the halves x₁ and x₂ of x. φ(x) is the
    softmax of the ``top_k`` largest scores, and 0 at all other slots. The best slots are among the
    ``top_k`` best a_i and b_j, so that the search compares 2n + top_k² scores, not n². F = n².

    A memory over these features writes and reads ``top_k`` slots per token. Its state is stored
    densely: n² columns, of which an engine multiplies all. Gradients reach the sub-keys through the
    softmax, and not through the choice of the slots. With an odd K, x₂ has a zero channel.
    Source: Lample et al. 2019 (product key memory), section 3.

    Args:
        n: number of sub-keys in each set, ≥ 1.
        top_k: number of slots with features above 0, from 1 to n².

    Examples:
        >>> features = rc.features.ProductKeys(n=4, top_k=3)
        >>> features.dim(8)
        16
        >>> [(param.name, param.axes) for param in features.params()]
        [('sub_keys', ('half', 'sub_key', 'half_channel'))]
        >>> params = {"sub_keys": torch.randn(1, 2, 4, 4)}
        >>> phi = features.phi(torch.randn(1, 5, 1, 1, 8), params, "key", torch.arange(5)[None])
        >>> (phi > 0).sum(-1).flatten()
        tensor([3, 3, 3, 3, 3])
    """

    shown = ("n", "top_k")

    n: int = integer(16, at_least=1, size=True)
    top_k: int = integer(8, at_least=1, size=True)

    def validate(self) -> None:
        if self.top_k > self.n**2:
            raise RecipeError(
                f"features.ProductKeys(top_k={self.top_k}) chooses among n² = {self.n**2} slots: "
                "use a smaller top_k or a larger n"
            )

    def dim(self, K: int) -> int:
        return self.n**2

    def axes(self, K: int) -> dict[str, int]:
        return {"half": 2, "sub_key": self.n, "half_channel": (K + 1) // 2}

    def flops(self, K: int) -> int:
        return 2 * self.n * K + self.top_k**2

    def params(self) -> tuple[Param, ...]:
        """a and b as ``sub_keys [H, half, sub_key, half_channel]``."""
        axes = ("half", "sub_key", "half_channel")
        return (Param(name="sub_keys", owner=self.title, axes=axes, draw="fan_in"),)

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        sub_keys = params["sub_keys"]
        size = sub_keys.shape[-1]
        padded = functional.pad(x, (0, 2 * size - x.shape[-1]))
        best = [
            affine_map(half, sub_keys[:, i]).topk(min(self.top_k, self.n), dim=-1)
            for i, half in enumerate(padded.split(size, dim=-1))
        ]
        pair_scores = best[0].values.unsqueeze(-1) + best[1].values.unsqueeze(-2)
        pair_slots = self.n * best[0].indices.unsqueeze(-1) + best[1].indices.unsqueeze(-2)
        scores, chosen = pair_scores.flatten(-2).topk(self.top_k, dim=-1)
        slots = pair_slots.flatten(-2).gather(-1, chosen)
        empty = torch.zeros(*x.shape[:-1], self.n**2, dtype=x.dtype, device=x.device)
        return empty.scatter(-1, slots, scores.softmax(-1))

    @property
    def text(self) -> str:
        return (
            f"softmax of the {self.top_k} largest of {self.n}² scores a_i·x₁ + b_j·x₂, else 0, a "
            "and b learned"
        )
