"""Alignment of a call's tokens to inner batches, and their layout for the passes.

Sequences may have open inner batches of different lengths (padding, packing). Each sequence is
shifted such that its open batch starts in column 0, with the buffered tokens of this batch before
the new tokens (`Grid`). Batch boundaries are then equal for all sequences. A sequence that ends
earlier stops committing its batches. The passes take columns as batches (`Layout`), and the tokens
of a batch whose gradients are taken at equal weights W (`Segment`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.memory.base import LinearMap, Stack
from recollect.engines.common.problem import Problem, join_buffer
from recollect.engines.deep.chain.chain import Chain
from recollect.engines.deep.gradient_factors import Points
from recollect.engines.deep.share import Normalizer
from recollect.engines.deep.step_coefficients import Rule, Table, tables
from recollect.recipe.recipe import Recipe

__all__ = [
    "DeepPlan",
    "Grid",
    "Layout",
    "Memory",
    "Segment",
    "Weights",
    "lay_out",
    "segment_of",
]

Weights = list[Tensor]


@dataclass(kw_only=True)
class Memory:
    """Weights A and the slots of the algorithm, ``[P, out, in]`` per map."""

    A: Weights
    slots: dict[str, Weights]

    def tensors(self) -> list[Tensor]:
        """Return all tensors, map by map."""
        return [*self.A, *(w for slot in self.slots.values() for w in slot)]

    def like(self, tensors: Sequence[Tensor]) -> Memory:
        """Return a memory of this structure with other tensors."""
        maps = len(self.A)
        parts = [list(tensors[i : i + maps]) for i in range(0, len(tensors), maps)]
        return Memory(A=parts[0], slots=dict(zip(self.slots, parts[1:], strict=True)))


@dataclass(frozen=True, kw_only=True)
class DeepPlan:
    """Precomputed structure of a recipe for this engine.

    Attributes:
        execution_mode: ``"table"``, ``"border"`` or ``"tokens"``.
        settled: whether a token reads the link of its own A.
        split: whether the first token of a batch is a separate segment (MIRAS 30).
        b: tokens of an inner batch.
        c: associations in a window.
        slope: a of the error if the rate depends on the key (`Algorithm.rate`), else ``None``.
        numbers: names of the bias's gates, which are aligned with the keys.
        params: names of the memory's parameters.
        param_names: names of the parameters of the memory and of the feature map.
        decodes: whether the read of a token is one table of coefficients per head.
        chain: the memory as a chain of maps, or ``None`` if `chain` does not support the recipe.
        normalizer: scales of the associations' gradients, or ``None`` without normalised steps.
        widths: sizes of h and δ, map by map.
        kernels: whether Triton kernels may run a chain's recurrence.
    """

    recipe: Recipe
    memory: Stack
    maps: tuple[LinearMap, ...]
    execution_mode: str
    rule: Rule
    settled: bool
    split: bool
    chain: Chain | None
    b: int
    c: int
    slope: float | None
    numbers: tuple[str, ...]
    params: tuple[str, ...]
    param_names: tuple[str, ...]
    decodes: bool
    normalizer: Normalizer | None
    widths: tuple[int, ...]
    kernels: bool = True


# -- alignment over rows --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Tokens of a call in inner batches of ``b`` columns, N of them.

    Attributes:
        b: columns of a batch. A single open batch may have fewer than the recipe's.
        c: associations in a window. The keys have c − 1 more columns at the start.
        N: number of batches.
        keys: ``[B, c − 1 + N b, H, ...]`` by name: features, raw keys if they differ, values and
            the bias's gates.
        valid: mask of the associations ``[B, c − 1 + N b]``, 1 for an association.
        steps: hyperparameters of the step ``[B, N b, H, ...]``.
        queries: ``x``, the features of the queries ``[B, N b, H, G, ·]``, and ``raw`` if it
            differs.
        full: number of batches that each sequence completes, or ``None`` if each completes all.
        start: column of the first new token per sequence.
        count: position of each token in its document from 1, ``[B, N b]``.
    """

    b: int
    c: int
    N: int
    keys: Mapping[str, Tensor]
    valid: Tensor
    steps: Mapping[str, Tensor]
    queries: Mapping[str, Tensor]
    full: tuple[int, ...] | None
    start: tuple[int, ...]
    count: Tensor

    def tensors(self) -> list[Tensor]:
        """Return tensors with columns: keys, with c − 1 more columns, then the others."""
        return [
            *self.keys.values(),
            self.valid,
            *self.steps.values(),
            *self.queries.values(),
            self.count,
        ]

    def like(self, tensors: Iterator[Tensor]) -> Grid:
        """Return a grid of these columns with other tensors, in the order of `tensors`."""
        return replace(
            self,
            keys=dict(zip(self.keys, tensors, strict=False)),
            valid=next(tensors),
            steps=dict(zip(self.steps, tensors, strict=False)),
            queries=dict(zip(self.queries, tensors, strict=False)),
            count=next(tensors),
        )

    def outputs(self, y: Tensor, T: int) -> Tensor:
        """Select the outputs of new tokens ``[B, T, ...]`` from columns ``[B, N b, ...]``."""
        if len(set(self.start)) <= 1:
            first = self.start[0] if self.start else 0
            # Padding beyond the longest sequence has no columns.
            return _span(y, first, T)
        columns = _tensor(self.start, y)[:, None] + torch.arange(T, device=y.device)
        columns = columns.clamp_max(y.shape[1] - 1)
        return y.gather(1, _spread(columns, y).expand(-1, -1, *y.shape[2:]))


def _tensor(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def _spread(index: Tensor, x: Tensor) -> Tensor:
    return index.view(*index.shape, *(1,) * (x.dim() - 2))


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Map from column j of the grid to token ``first + j`` of a sequence."""

    first: tuple[int, ...]
    columns: int

    def take(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Gather ``x [B, tokens, ...]`` on the grid, with ``fill`` in columns without a token."""
        if len(set(self.first)) <= 1:
            return _span(x, self.first[0] if self.first else 0, self.columns, fill)
        index = _tensor(self.first, x)[:, None] + torch.arange(self.columns, device=x.device)
        is_token = (index >= 0) & (index < x.shape[1])
        index = index.clamp(0, x.shape[1] - 1)
        tokens = x.gather(1, _spread(index, x).expand(-1, -1, *x.shape[2:]))
        return torch.where(_spread(is_token, x), tokens, torch.full((), fill, dtype=x.dtype).to(x))


def _span(x: Tensor, first: int, columns: int, fill: float = 0.0) -> Tensor:
    """Return columns ``first`` to ``first + columns`` of ``x``, with ``fill`` beyond its ends."""
    length = x.shape[1]
    num_before = min(max(-first, 0), columns)
    num_after = min(max(first + columns - length, 0), columns - num_before)
    inside = x[:, max(first, 0) : max(min(first + columns, length), 0)]
    if not num_before and not num_after:
        return inside
    return pad(inside, (*(0, 0) * (x.dim() - 2), num_before, num_after), value=fill)


def lay_out(problem: Problem) -> Grid:
    """Return the grid of a call with at least one token."""
    tokens, method = join_buffer(problem), problem.bound.plan
    b, c = method.b, method.c
    B, T = problem.k.shape[:2]
    num_seen = 0 if b == 1 else problem.state.host_position
    # Shapes depend on the positions of the sequences, which must be available on the host.
    positions = problem.state.position.tolist() if num_seen is None else [num_seen] * B
    opened = [position % b for position in positions]
    lengths = [T] * B if problem.lengths is None else problem.lengths.tolist()
    ends = [o + n for o, n in zip(opened, lengths, strict=True)]
    N = max(1, -(-max(ends, default=1) // b))
    width = max(1, *ends) if N == 1 and ends else b
    full = [end // b for end in ends]
    columns = N * width
    # Columns without a token need hyperparameters that every loss accepts.
    has_no_gaps = all(o == 0 for o in opened) and columns == T and c == 1
    fills: Mapping[str, float] = {} if has_no_gaps else problem.bound.padding_values
    join_first = tuple(tokens.buffered - o for o in opened)
    steps = _Place(first=join_first, columns=columns)
    keys = _Place(first=tuple(f - (c - 1) for f in join_first), columns=c - 1 + columns)
    query_place = _Place(first=tuple(-o for o in opened), columns=columns)
    rates = dict(tokens.rates)
    if method.slope is not None and "lr" in rates:
        kappa = tokens.phi.square().sum(-1)
        rates["lr"] = problem.recipe.algorithm.rate(rates["lr"], kappa, method.slope)
    token_tensors, lifts = {"phi": tokens.phi, "v": tokens.v}, problem.bound.has_features
    if lifts:
        token_tensors["raw"] = tokens.k
    q_phi = problem.phi(problem.q, "query")
    opening = _tensor(tuple(opened), problem.k)[:, None] if len({*opened}) > 1 else opened[0]
    count = torch.arange(1, columns + 1, device=problem.k.device) - opening
    of_keys: dict[str, Tensor] = {}
    of_steps: dict[str, Tensor] = {}
    for name, x in token_tensors.items():
        of_keys[name] = keys.take(x)
    for name in method.numbers:
        of_keys[name] = keys.take(rates.pop(name), fills.get(name, 0.0))
    for name, x in rates.items():
        of_steps[name] = steps.take(x, fills.get(name, 0.0))
    queries = {"x": query_place.take(q_phi)}
    if lifts:
        queries["raw"] = query_place.take(problem.q.to(q_phi.dtype))
    return Grid(
        b=width,
        c=c,
        N=N,
        keys=of_keys,
        valid=keys.take(tokens.valid.to(tokens.phi.dtype)),
        steps=of_steps,
        queries=queries,
        full=None if all(n == N for n in full) else tuple(full),
        start=tuple(opened),
        count=problem.state.position[:, None] + count,
    )


# -- inner batches for the passes -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tokens of consecutive inner batches in the layout of the passes.

    Attributes:
        keys: tensors of the keys by name, ``[N, B, H, b + c − 1, ·]``. The bias's gates have a
            trailing axis, and raw keys are absent if they equal the features.
        steps: hyperparameters of the step by name, ``[N, P, b, ...]``.
        gamma: window weights ``[N, P, b, c]``.
        x: features of the queries ``[N, B, H, b G, ·]``.
        raw: queries, or ``None`` if they equal the features.
        count: position of the token in its document from 1, ``[N, B, b]``.
        commits: whether the end of each batch is committed: for all sequences, for none, or a mask
            ``[P, 1, 1]``.
        params: parameters of the memory.
        outer: whether the passes will be differentiated.
    """

    b: int
    c: int
    G: int
    keys: Mapping[str, Tensor]
    steps: Mapping[str, Tensor]
    gamma: Tensor
    x: Tensor
    raw: Tensor | None
    count: Tensor
    commits: Sequence[bool | Tensor]
    params: Mapping[str, Tensor]
    outer: bool

    def scalars(self, n: int, t: int) -> dict[str, Tensor]:
        """Return the hyperparameters of the step that a link may use, ``[B, H, 1, 1]``."""
        B, H = self.x.shape[1:3]
        return {name: x[n, :, t].view(B, H, 1, 1) for name, x in self.steps.items() if x.dim() == 3}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens ``start`` to ``stop`` of every batch, whose gradients are taken at equal weights.

    Attributes:
        points: associations by batch.
        queries: features and raw queries by batch.
        tables: coefficients of the reads and of the end, by map and batch (`Table.batches`).
    """

    start: int
    stop: int
    points: Sequence[Points]
    queries: Sequence[tuple[Tensor, Tensor]]
    tables: Sequence[tuple[Sequence[Table], Sequence[Table]]]


def segment_of(method: DeepPlan, layout: Layout, start: int, stop: int) -> Segment:
    """Return the segment of tokens ``start`` to ``stop`` of every batch."""
    G, N = layout.G, layout.x.shape[0]
    # A single call creates the views of all batches, and autograd stacks their gradients once.
    keys = {
        name: x[:, :, :, start : stop + layout.c - 1].unbind(0) for name, x in layout.keys.items()
    }
    names = [name for name in keys if name not in ("raw", "phi", "v")]
    raw = keys.get("raw", keys["phi"])
    targets = _representable_targets(method, layout, start, stop)
    points = [
        Points(
            phi=keys["phi"][n],
            raw=raw[n],
            v=keys["v"][n],
            gates={name: keys[name][n] for name in names},
            representable_target=targets[n],
        )
        for n in range(N)
    ]
    map_tables: list[tuple[list[Table], list[Table]]] = []
    if method.execution_mode != "tokens":
        numbers = {name: x[:, :, start:stop] for name, x in layout.steps.items()}
        gamma = layout.gamma[:, :, start:stop]
        of_maps = tables(method.rule, method.maps, numbers, gamma, start=start)
        map_tables = [table.batches(G) for table in of_maps]
    x = layout.x[:, :, :, start * G : stop * G].unbind(0)
    raw_queries = x
    if layout.raw is not None:
        raw_queries = layout.raw[:, :, :, start * G : stop * G].unbind(0)
    return Segment(
        start=start,
        stop=stop,
        points=points,
        queries=list(zip(x, raw_queries, strict=True)),
        tables=map_tables,
    )


def _representable_targets(
    method: DeepPlan, layout: Layout, start: int, stop: int
) -> Sequence[Tensor | None]:
    """Return the closest representable outputs to the values, which depend on no weight."""
    N, B = layout.x.shape[:2]
    if method.normalizer is None or not method.memory.bounded:
        return (None,) * N
    columns = slice(start, stop + layout.c - 1)
    v, raw = (
        x[:, :, :, columns].flatten(0, 1)
        for x in (layout.keys["v"], layout.keys.get("raw", layout.keys["phi"]))
    )
    return (
        method.normalizer.representable_target(v, raw, layout.params).unflatten(0, (N, B)).unbind(0)
    )
