"""Inner batches laid out for the passes: tokens, queries, and coefficients batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recollect.choices.memory.base import LinearMap, Stack
from recollect.engines.deep.chain.engine import Chain
from recollect.engines.deep.gradient_factors import Points
from recollect.engines.deep.step_coefficients import Rule, Table, tables
from recollect.recipe.recipe import Recipe

__all__ = ["Columns", "Layout", "Memory", "Method", "Segment", "Weights", "segment_of"]

Weights = list[Tensor]


@dataclass(kw_only=True)
class Memory:
    """A and the slots, ``[P, out, in]`` per map."""

    A: Weights
    slots: dict[str, Weights]

    def tensors(self) -> list[Tensor]:
        """All tensors, map by map."""
        return [*self.A, *(w for slot in self.slots.values() for w in slot)]

    def like(self, tensors: Sequence[Tensor]) -> Memory:
        """The same structure around other tensors."""
        maps = len(self.A)
        parts = [list(tensors[i : i + maps]) for i in range(0, len(tensors), maps)]
        return Memory(A=parts[0], slots=dict(zip(self.slots, parts[1:], strict=True)))


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a recipe runs: ``way`` is ``"table"``, ``"border"`` or ``"tokens"``.

    Attributes:
        settled: what is read at a token is the link of its own A.
        split: the first token of a batch is a segment of its own (MIRAS 30).
        slope: a of the error, where the rate depends on the key (`Algorithm.rate`), else ``None``.
        numbers: names of the bias's numbers, which travel with the keys.
        params: names of the memory's own.
        decodes: whether one token's read is one table of coefficients with numbers per head.
        chain: the memory as a chain of maps, where everything else is plain enough for `chain`.
    """

    recipe: Recipe
    memory: Stack
    maps: tuple[LinearMap, ...]
    way: str
    rule: Rule
    settled: bool
    split: bool
    chain: Chain | None
    slope: float | None
    numbers: tuple[str, ...]
    params: tuple[str, ...]
    decodes: bool


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tokens of consecutive inner batches, ready for the passes.

    Attributes:
        keys: by name, ``[N, B, H, b + c − 1, ·]``; the bias's numbers keep a trailing axis, and
            raw keys are left out where they are the features.
        steps: numbers of the step by name, ``[N, P, b, ...]``.
        gamma: ``[N, P, b, c]``.
        x: queries' features ``[N, B, H, b G, ·]``; raw: the queries, ``None`` where the same.
        count: number of the token in its document from 1, ``[N, B, b]``.
        commits: per batch whether its end is kept: for all rows, for none, or a mask ``[P, 1, 1]``.
        params: the memory's own.
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
        """Numbers of the step that a link may use, ``[B, H, 1, 1]``."""
        B, H = self.x.shape[1:3]
        return {name: x[n, :, t].view(B, H, 1, 1) for name, x in self.steps.items() if x.dim() == 3}


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A map's coefficients batch by batch: what reads take (G rows per token), and the border.

    Attributes:
        a, m, C: ``[P, n G, 1 or R]``.
        a_end, m_end, s: ``[P, 1, 1]``. C_end, D: ``[P, R, 1]``.
        inner, outer, scale: as in `Table`, ``[P, ...]``.
    """

    a: Sequence[Tensor | None]
    m: Sequence[Tensor | None]
    C: Sequence[Tensor]
    a_end: Sequence[Tensor | None]
    m_end: Sequence[Tensor | None]
    C_end: Sequence[Tensor]
    s: Sequence[Tensor | None]
    D: Sequence[Tensor | None]
    inner: Sequence[Tensor | None]
    outer: Sequence[Tensor | None]
    scale: Sequence[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens ``start`` to ``stop`` of every batch, whose gradients are taken at the same W."""

    start: int
    stop: int
    points: Sequence[Points]
    queries: Sequence[tuple[Tensor, Tensor]]
    columns: Sequence[Columns]


def segment_of(method: Method, layout: Layout, start: int, stop: int) -> Segment:
    """Tokens ``start`` to ``stop`` of every batch, as the passes take them."""
    G, N = layout.G, layout.x.shape[0]
    # One call makes the views of all batches; their gradients meet in one stack.
    keys = {
        name: x[:, :, :, start : stop + layout.c - 1].unbind(0) for name, x in layout.keys.items()
    }
    names = [name for name in keys if name not in ("raw", "phi", "v")]
    raw = keys.get("raw", keys["phi"])
    points = [
        Points(
            phi=keys["phi"][n],
            raw=raw[n],
            v=keys["v"][n],
            gates={name: keys[name][n] for name in names},
        )
        for n in range(N)
    ]
    x = layout.x[:, :, :, start * G : stop * G].unbind(0)
    asked = x
    if layout.raw is not None:
        asked = layout.raw[:, :, :, start * G : stop * G].unbind(0)
    return Segment(
        start=start,
        stop=stop,
        points=points,
        queries=list(zip(x, asked, strict=True)),
        columns=[] if method.way == "tokens" else _columns(method, layout, start, stop),
    )


def _columns(method: Method, layout: Layout, start: int, stop: int) -> list[Columns]:
    G, none = layout.G, (None,) * layout.x.shape[0]
    numbers = {name: x[:, :, start:stop] for name, x in layout.steps.items()}
    gamma = layout.gamma[:, :, start:stop]
    found = tables(method.rule, method.maps, numbers, gamma, start=start)
    memo: dict[int, Columns] = {}

    def each(x: Tensor | None) -> Sequence[Tensor | None]:
        return none if x is None else x.unbind(0)

    def rows(x: Tensor | None) -> Tensor | None:
        return x if x is None or G == 1 else x.repeat_interleave(G, dim=2)

    def shared(table: Table) -> Columns:
        a, m, s, D = (
            None if x is None else x.unsqueeze(-1) for x in (table.a, table.m, table.s, table.D)
        )
        C = rows(table.C)
        assert C is not None
        return Columns(
            a=each(rows(a)),
            m=each(rows(m)),
            C=C.unbind(0),
            a_end=each(None if a is None else a[:, :, -1:]),
            m_end=each(None if m is None else m[:, :, -1:]),
            C_end=table.C[:, :, -1].unsqueeze(-1).unbind(0),
            s=each(None if s is None else s.unsqueeze(-1)),
            D=each(D),
            inner=none,
            outer=none,
            scale=none,
        )

    columns: list[Columns] = []
    for table in found:
        if id(table.C) not in memo:
            memo[id(table.C)] = shared(table)
        own = {"inner": table.inner, "outer": table.outer, "scale": table.scale}
        given = {name: x.unbind(0) for name, x in own.items() if x is not None}
        one = memo[id(table.C)]
        columns.append(dataclasses.replace(one, **given) if given else one)
    return columns
