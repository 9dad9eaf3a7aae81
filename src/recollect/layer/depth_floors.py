"""Lower ends of decays that grow with the depth of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["DepthFloors"]


class DepthFloors(nn.Module):
    """γ_l = Σ_{1 ≤ i ≤ l} softmax(B)_i, with one B per layer and a softmax over layers (HGRN2).

    So γ_0 = 0, and deeper layers keep more. B starts at zero: γ_l = l/L. ``shape`` is that of γ.
    """

    def __init__(self, layers: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers, *shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set B to zero."""
        nn.init.zeros_(self.weight)

    def forward(self, log_decay: Tensor, index: int) -> Tensor:
        """Return log(γ + (1 − γ) α) of the layer at an index for ``log α [..., *shape]``."""
        if index == 0:
            return log_decay
        work = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        floor = self.weight.to(work).softmax(0)[1 : index + 1].sum(0)
        floor = floor.clamp(torch.finfo(work).tiny, 1 - 1e-7)  # its logarithms have gradients
        return torch.logaddexp(floor.log(), torch.log1p(-floor) + log_decay)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape))
