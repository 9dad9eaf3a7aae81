"""The short convolution: causal, depthwise, exact across splits, padding and packed documents."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from recollect.choices.gradients import HandWritten

__all__ = ["ShortConvolution"]


class _Slide(HandWritten):
    """y_t = Σ_j a_j ⊙ x_{t+j} for ``x [B, T + w − 1, D]``, few fused passes over the channels.

    Against `conv1d` this spares the transpose to ``[B, D, T]`` and back; against autograd of the
    same sum, a full-size zero tensor per tap.
    """

    # The context is an argument: with `setup_context`, torch inspects this signature at every call,
    # which takes as long as the convolution of one token.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolved(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), (dy,) = ctx.saved_tensors, gradients
        T = dy.shape[1]
        dx, taps = torch.zeros_like(x), []
        ones = dy.new_ones(dy.shape[0] * T)  # a product with ones is the fastest sum over tokens
        for j in range(weight.shape[0]):
            dx[:, j : j + T].addcmul_(dy, weight[j])
            taps.append(ones @ (x[:, j : j + T] * dy).flatten(0, 1))
        return dx, torch.stack(taps)


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    T = x.shape[1] - weight.shape[0] + 1
    if T == 1:
        return (x * weight).sum(1, keepdim=True)
    y = x[:, :T] * weight[0]
    for j in range(1, weight.shape[0]):
        y.addcmul_(x[:, j : j + T], weight[j])
    return y


def _slide(x: Tensor, weight: Tensor) -> Tensor:
    weight = weight.to(x.dtype)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return cast(Tensor, _Slide.apply(x, weight))
    return _convolved(x, weight)


class ShortConvolution(nn.Module):
    """y_t = Σ_{j<w} a_j ⊙ u_{t−w+1+j}, per channel, over the last w tokens of the same sequence.

    It starts as the identity plus a little noise, so that a fresh layer sees its own tokens.

    Args:
        channels: D.
        width: w ≥ 1.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        nn.init.normal_(self.weight, std=0.5 * self.width**-0.5)
        self.weight[-1] += 1.0

    def forward(
        self,
        u: Tensor,
        tail: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        borders: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve ``u [B, T, D]`` and return the tail ``[B, w − 1, D]`` that the next call needs.

        Args:
            u: tokens; with ``lengths``, padded on the right.
            tail: last inputs of each sequence before this call (zeros at its beginning).
            lengths: real tokens per row ``[B]``.
            borders: ``[N + 1]`` borders of N documents in one row; then there are N tails.
        """
        past = self.width - 1
        if borders is not None:
            return self._packed(u, tail, borders)
        if tail is None:
            tail = u.new_zeros(u.shape[0], past, u.shape[2])
        joined = torch.cat([tail.to(u.dtype), u], dim=1)  # [B, w − 1 + T, D]
        if lengths is None:
            after = joined[:, joined.shape[1] - past :]
            if u.shape[1] > past:
                after = after.clone()  # a view would keep the whole call alive
        else:
            index = lengths[:, None] + torch.arange(past, device=u.device)
            after = joined.gather(1, index.unsqueeze(-1).expand(-1, -1, u.shape[2]))
        return _slide(joined, self.weight), after

    def _packed(self, u: Tensor, tail: Tensor | None, borders: Tensor) -> tuple[Tensor, Tensor]:
        """Each document is preceded by its own tail, so one pass over the row serves all."""
        past, (_, T, D), N = self.width - 1, u.shape, borders.shape[0] - 1
        borders = borders.to(device=u.device, dtype=torch.long)
        slots = torch.arange(past, device=u.device)
        tokens = torch.arange(T, device=u.device)
        document = torch.bucketize(tokens, borders[1:], right=True)
        places = tokens + (document + 1) * past
        before = borders[:-1, None] + torch.arange(N, device=u.device)[:, None] * past + slots
        joined = u.new_zeros(T + N * past, D).index_copy(0, places, u[0])
        if tail is not None:
            joined = joined.index_copy(0, before.flatten(), tail.to(u.dtype).flatten(0, 1))
        after = joined[before + borders.diff()[:, None]]  # [N, w − 1, D]
        y = _slide(joined.unsqueeze(0), self.weight) if T else u
        return (y[:, places - past] if T else y), after

    def extra_repr(self) -> str:
        """Channels and width."""
        return f"{self.channels}, width={self.width}"
