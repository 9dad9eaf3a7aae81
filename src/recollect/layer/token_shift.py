"""The token shift: every projection sees its token and the one before, in a mixture of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["TokenShift"]

RANK = 32


class TokenShift(nn.Module):
    """x_t + μ ⊙ (x_{t−1} − x_t) for each of several streams (RWKV-6 eqs. 1–4; RWKV-7 eq. 3).

    ``"static"``: μ is learned per channel. ``"input"``: μ_t = λ + tanh(z_t A) B with
    z_t = x_t + μ_0 ⊙ (x_{t−1} − x_t) (RWKV-6's low-rank, data-dependent interpolation).
    Before the first token of a sequence stands 0.

    Args:
        kind: ``"static"`` or ``"input"``.
        d_model: width of the tokens.
        streams: names of the mixtures.
    """

    def __init__(self, kind: str, d_model: int, streams: Sequence[str]) -> None:
        super().__init__()
        self.streams, n = tuple(streams), len(streams)
        self.mix = nn.Parameter(torch.empty(n, d_model))
        self.first = self.down = self.up = None
        if kind == "input":
            rank = min(RANK, d_model)
            self.first = nn.Parameter(torch.empty(d_model))
            self.down = nn.Parameter(torch.empty(n, d_model, rank))
            self.up = nn.Parameter(torch.empty(n, rank, d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start: channels look back from not at all to entirely."""
        channels = torch.linspace(0, 1, self.mix.shape[1])
        self.mix.copy_(channels.expand_as(self.mix))
        if self.first is not None and self.down is not None and self.up is not None:
            self.first.copy_(channels)
            nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
            nn.init.normal_(self.up, std=0.1 * self.up.shape[1] ** -0.5)

    def forward(
        self,
        x: Tensor,
        tail: Tensor | None,
        *,
        lengths: Tensor | None = None,
        borders: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The mixtures by name, and the last token of each sequence ``[B, 1, d_model]``.

        Args:
            x: tokens ``[B, T, d_model]``; ``lengths`` and ``borders`` as in `ShortConvolution`.
            tail: the last token of each sequence before this call.
        """
        before, after = _previous(x, tail, lengths, borders)
        delta = before - x
        shifted: dict[str, Tensor] = {}
        if self.first is not None and self.down is not None and self.up is not None:
            z = x + self.first * delta
            h = torch.einsum("btd,ndr->nbtr", z, self.down).tanh()
            more = torch.einsum("nbtr,nrd->nbtd", h, self.up)
            mixes = [mix + extra for mix, extra in zip(self.mix, more, strict=True)]
        else:
            mixes = list(self.mix)
        for name, mix in zip(self.streams, mixes, strict=True):
            shifted[name] = torch.addcmul(x, mix.to(x.dtype), delta)
        return shifted, after

    def extra_repr(self) -> str:
        """The streams."""
        return f"{', '.join(self.streams)}, data-dependent={self.first is not None}"


def _previous(
    x: Tensor, tail: Tensor | None, lengths: Tensor | None, borders: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The token before each, and the last one of each sequence."""
    if borders is None:
        tail = x.new_zeros(x.shape[0], 1, x.shape[2]) if tail is None else tail.to(x.dtype)
        joined = torch.cat([tail, x], dim=1)
        if lengths is None:
            return joined[:, :-1], joined[:, -1:]
        index = lengths.view(-1, 1, 1).expand(-1, 1, x.shape[2])
        return joined[:, :-1], joined.gather(1, index)
    ends = borders.to(device=x.device, dtype=torch.long)
    N = ends.shape[0] - 1
    tail = x.new_zeros(N, 1, x.shape[2]) if tail is None else tail.to(x.dtype)
    T, full = x.shape[1], (ends.diff() > 0).view(-1, 1, 1)
    if T == 0:
        return x, tail
    shifted = torch.cat([x.new_zeros(1, 1, x.shape[2]), x[:, :-1]], dim=1)
    steps = torch.arange(T, device=x.device)
    document = torch.bucketize(steps, ends[1:], right=True)
    first = (steps == ends[document]).view(1, -1, 1)
    before = torch.where(first, tail[document].transpose(0, 1), shifted)
    last = x[0, (ends[1:] - 1).clamp_min(0)].unsqueeze(1)
    return before, torch.where(full, last, tail)
