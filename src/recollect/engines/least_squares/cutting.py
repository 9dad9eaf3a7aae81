"""How a call is cut into chunks: by its decays, and by spans of the ridge.

A span begins a chunk. Rows whose chunks that leaves unfilled are filled up by empty tokens (zero
keys, no decay), which change nothing; where nobody may look, shapes say how many there may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.engines.common.resolution import RESET

__all__ = ["CHUNK", "Cut", "Facts", "aligned", "cut", "gentle", "halves", "read_facts", "unaligned"]

CHUNK, LEAST = 64, 8
"""Tokens per chunk when nobody asks, measured; and under the strongest decays in float32."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What decides on a call's chunks and dtype.

    Attributes:
        anew: whether any token starts anew.
        in_step: whether spans begin at the same tokens of all rows, the first of which begins one.
        most: the most that so many tokens in a row decay by, new starts aside.
    """

    anew: bool
    in_step: bool
    most: Mapping[int, float]


def read_facts(problem: Problem, logs: Tensor, tokens: Iterable[int], *, every: int) -> Facts:
    """Look at log decays ``[B, T, H]`` and positions once."""
    logs, tokens = logs.detach().double(), sorted(set(tokens))
    anew = logs < RESET
    total = torch.nn.functional.pad(logs.masked_fill(anew, 0.0).cumsum(1), (0, 0, 1, 0))
    steps = [min(n, logs.shape[1]) for n in tokens]
    falls = [(total[:, :-step] - total[:, step:]).max() for step in steps]
    flags = [anew.any(), (problem.state.position % max(every, 1) == 0).all()]
    starts, in_step, *most = torch.stack([*(x.double() for x in flags), *falls]).tolist()
    return Facts(anew=starts > 0, in_step=in_step > 0, most=dict(zip(tokens, most, strict=True)))


def halves(tokens: int) -> list[int]:
    """The tokens of a chunk, and what may become of them."""
    return [tokens >> i for i in range(tokens.bit_length())]


def gentle(facts: Facts, tokens: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk: as many as decay by no more than the dtype can take apart again.

    Inside a chunk, what is left of a decayed past is told from noise by subtraction.
    """
    bound, least = (12.0, 1) if dtype == torch.float64 else (4.0, LEAST)
    while tokens > least and facts.most[tokens] > bound:
        tokens //= 2
    return tokens


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where tokens stand.

    Attributes:
        chunk: C. slots: tokens in all, with gaps.
        place: ``[B, T]`` slot of each token, or ``None`` where they stand as they are.
        ends: ``[n, B]``, which rows reach the end of a span with a chunk; ``None`` without spans.
    """

    chunk: int
    slots: int
    place: Tensor | None = None
    ends: Tensor | None = None

    def last(self, row: int, chunks: int, tokens: int) -> int:
        """The last of a row's so many tokens that stand in its first chunks."""
        place = torch.arange(tokens) if self.place is None else self.place[row, :tokens]
        return max(int((place < chunks * self.chunk).sum()) - 1, 0)


def cut(problem: Problem, tokens: int, *, every: int, facts: Facts | None) -> Cut:
    """Cut a call into chunks of so many tokens or fewer.

    Args:
        every: tokens of a span, 0 for none.
        facts: ``None`` where nobody may look; then shapes say how many slots there may be.
    """
    T = problem.k.shape[1]
    # Chunks fill a span.
    chunk = min(T, -(-every // -(-every // tokens)) if every else tokens)
    at = Cut(chunk=chunk, slots=-(-T // chunk) * chunk)
    if not every:
        return at
    index = problem.state.position[:, None] + torch.arange(T, device=problem.k.device)
    in_step = facts is not None and facts.in_step
    if T > 1 and not (in_step and (every >= T or every % chunk == 0)):
        # Each span takes whole chunks, and a row stands in its first one as it does in its span.
        width = -(-every // chunk) * chunk
        first = problem.state.position[:, None] % every // chunk * chunk
        within = index - index[:, :1] // every * every
        place = within // every * width + within % every - first
        borders = (T + every - 2) // every  # as many as T tokens may cross
        most = T + chunk - 1 + borders * (width - every)
        if facts is not None:
            most = min(most, int(place.max()) + 1)
        at = Cut(chunk=chunk, slots=-(-most // chunk) * chunk, place=place)
    last = ((index + 1) % every == 0) & (index < problem.end[:, None])
    ends = aligned(last, at).unflatten(1, (-1, at.chunk)).transpose(0, 1).any(-1)
    return replace(at, ends=ends)


def aligned(x: Tensor, at: Cut) -> Tensor:
    """``[B, T, ...] -> [B, slots, ...]``, zeros in between."""
    if at.place is None:
        missing = at.slots - x.shape[1]
        if missing == 0:
            return x
        return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    index = at.place.view(*at.place.shape, *(1,) * (x.dim() - 2)).expand_as(x)
    return x.new_zeros(x.shape[0], at.slots, *x.shape[2:]).scatter(1, index, x)


def unaligned(y: Tensor, at: Cut, tokens: int) -> Tensor:
    """The way back from `aligned`."""
    if at.place is None:
        return y[:, :tokens]
    index = at.place.view(*at.place.shape, *(1,) * (y.dim() - 2))
    return y.gather(1, index.expand(-1, -1, *y.shape[2:]))
