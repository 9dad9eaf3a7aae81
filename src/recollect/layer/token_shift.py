"""The token shift: a mixture of every token with the previous one, per projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recollect.functional.packing import last_tokens

__all__ = ["TokenShift", "previous_tokens", "tail"]

RANK = 32


class TokenShift(nn.Module):
    """x_t + μ ⊙ (x_{t−1} − x_t) for each of several streams (RWKV-6 eqs. 1–4; RWKV-7 eq. 3).

    Kind ``"learned"``: μ is learned per channel. ``"input"``: μ_t = λ + tanh(z_t A) B with
    z_t = x_t + μ_0 ⊙ (x_{t−1} − x_t) (RWKV-6's low-rank, data-dependent interpolation).
    The token before the first one of a sequence is 0.
    """

    first: nn.Parameter | None
    down: nn.Parameter
    up: nn.Parameter

    def __init__(self, kind: str, d_model: int, streams: Sequence[str]) -> None:
        super().__init__()
        self.streams, n = tuple(streams), len(streams)
        self.mix = nn.Parameter(torch.empty(n, d_model))
        shapes: dict[str, tuple[int, ...]] = {}
        if kind == "input":
            rank = min(RANK, d_model)
            shapes = {"first": (d_model,), "down": (n, d_model, rank), "up": (n, rank, d_model)}
        for name in ("first", "down", "up"):  # μ_0, A and B
            weight = nn.Parameter(torch.empty(shapes[name])) if shapes else None
            self.register_parameter(name, weight)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set μ from 0 to 1 over the channels, and sample new low-rank maps."""
        channels = torch.linspace(0, 1, self.mix.shape[1])
        self.mix.copy_(channels.expand_as(self.mix))
        if self.first is not None:
            self.first.copy_(channels)
            nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
            nn.init.normal_(self.up, std=0.1 * self.up.shape[1] ** -0.5)

    def forward(
        self,
        x: Tensor,  # tokens [B, T, d_model]; lengths and cu_seqlens as in `ShortConvolution`
        last_token: Tensor | None,  # last token of each sequence before this call
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the mixtures by name, and the last token of each sequence ``[B, 1, d_model]``."""
        previous, last_token = previous_tokens(x, last_token, lengths, cu_seqlens)
        delta = previous - x
        shifted: dict[str, Tensor] = {}
        if self.first is not None:
            z = x + self.first * delta
            h = torch.einsum("btd,ndr->nbtr", z, self.down).tanh()
            low_rank_mix = torch.einsum("nbtr,nrd->nbtd", h, self.up)
            mixes = [mix + extra for mix, extra in zip(self.mix, low_rank_mix, strict=True)]
        else:
            mixes = list(self.mix)
        for name, mix in zip(self.streams, mixes, strict=True):
            shifted[name] = torch.addcmul(x, mix.to(x.dtype), delta)
        return shifted, last_token

    def extra_repr(self) -> str:
        return f"{', '.join(self.streams)}, data-dependent={self.first is not None}"


def previous_tokens(
    x: Tensor, last_token: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the token before each token, and the last token of each sequence ``[B, 1, D]``.

    The arguments are those of `TokenShift.forward`, with x ``[B, T, D]``.
    """
    B, T, D = x.shape
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    start = x.new_zeros(rows, 1, D) if last_token is None else last_token.to(x.dtype)
    if cu_seqlens is None:
        joined = torch.cat([start, x], dim=1)
        return joined[:, :-1], last_tokens(joined, 1, lengths)
    if T == 0:
        return x, start
    ends = cu_seqlens.to(device=x.device, dtype=torch.long)
    shifted = torch.cat([x.new_zeros(1, 1, D), x[:, :-1]], dim=1)
    steps = torch.arange(T, device=x.device)
    document = torch.bucketize(steps, ends[1:], right=True)
    is_first = (steps == ends[document]).view(1, -1, 1)
    previous = torch.where(is_first, start[document].transpose(0, 1), shifted)
    has_tokens = (ends.diff() > 0).view(-1, 1, 1)
    last = x[0, (ends[1:] - 1).clamp_min(0)].unsqueeze(1)
    return previous, torch.where(has_tokens, last, start)


def tail(earlier: Tensor | None, tokens: Tensor, size: int, lengths: Tensor | None) -> Tensor:
    """Return the last ``size`` of earlier tokens (default: zeros) and tokens ``[B, T, ...]``."""
    if earlier is None:
        earlier = tokens.new_zeros(tokens.shape[0], size, *tokens.shape[2:])
    joined = torch.cat([earlier.to(tokens.dtype), tokens], dim=1)
    return last_tokens(joined, size, lengths).clone()
