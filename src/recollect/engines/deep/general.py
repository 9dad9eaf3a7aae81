"""The general path: a loop over inner batches of gradients at W°, reads and updates.

Three ways, by what the recipe needs:

* *table*: A is linear in the gradients, so coefficients say everything (`step_coefficients`);
* *border*: tokens read W°, and one step is taken at the batch's end (Muon over whole batches);
* *tokens*: A_t of every token is built, because a link, an elementwise optimizer or a decay per
  channel under momentum stands between the gradients and what is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recollect.engines.deep.gradient_factors import (
    Factors,
    Points,
    Read,
    Slopes,
    factors,
    plus_product,
    read,
    read_at,
    scaled,
)
from recollect.engines.deep.layout import (
    Columns,
    DeepPlan,
    Layout,
    Memory,
    Segment,
    Weights,
    segment_of,
)
from recollect.engines.deep.line_search import LineSearch, by_step
from recollect.engines.deep.share import scaled_by
from recollect.engines.deep.step_coefficients import band, paired, per_map
from recollect.engines.deep.token_weights import TokenStep, advance

__all__ = ["run_inner_batches"]


def run_inner_batches(method: DeepPlan, layout: Layout, memory: Memory) -> tuple[Tensor, Memory]:
    """Outputs ``[N, B, H, b G, V]`` and the memory after the last committed batch."""
    return InnerBatchLoop(method, layout).run(memory)


class InnerBatchLoop:
    """One memory moved from inner batch to inner batch."""

    def __init__(self, method: DeepPlan, layout: Layout) -> None:
        self.method, self.layout = method, layout
        self.recipe = method.recipe
        self.retention, self.algorithm = self.recipe.retention, self.recipe.algorithm
        self.N, self.B, self.H = layout.x.shape[:3]
        b = layout.b
        borders = [(0, 1), (1, b)] if method.split and b > 1 else [(0, b)]
        self.segments = [segment_of(method, layout, start, stop) for start, stop in borders]

    # -- the recursion ------------------------------------------------------------------------

    def run(self, memory: Memory) -> tuple[Tensor, Memory]:
        outputs: list[Tensor] = []
        if not self.layout.outer:
            # From here on the memory is the loop's own, to be moved in place.
            memory = memory.like([w.clone() for w in memory.tensors()])
        for n, commit in enumerate(self.layout.commits):
            y, after = self._batch(n, memory, commit)
            outputs.append(y)
            if commit is True:
                memory = after
            elif commit is not False:
                pairs = zip(after.tensors(), memory.tensors(), strict=True)
                memory = memory.like([torch.where(commit, new, old) for new, old in pairs])
        return torch.stack(outputs), memory

    def _batch(self, n: int, memory: Memory, commit: bool | Tensor) -> tuple[Tensor, Memory]:
        W = self._link(memory.A, n, 0)
        outputs: list[Tensor] = []
        own = commit is True and not self.layout.outer
        for index, segment in enumerate(self.segments):
            # A first token that settles does so too where it is all there is of its batch.
            settles = self.method.split and index == 0
            last = index == len(self.segments) - 1 and not settles
            advance = self._tokens if self.method.way == "tokens" else self._tabled
            if last:
                moves = commit is not False
                y, memory = advance(n, segment, W, memory, moves=moves, own=own)
            else:
                _, memory = advance(n, segment, W, memory, moves=True, reads=False, own=own)
                W = self._link(memory.A, n, 0)
                y = self._read_all(n, segment, W)
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), memory

    def _link(self, A: Weights, n: int, t: int) -> Weights:
        if not self.retention.has_link:
            return A
        gates = self.layout.scalars(n, t)
        return [self.retention.link(self._rows(a), gates).flatten(0, 1) for a in A]

    def _rows(self, w: Tensor) -> Tensor:
        return w.unflatten(0, (self.B, self.H))

    def _factors(
        self, n: int, segment: Segment, W: Weights, A: Weights
    ) -> tuple[list[Factors], list[Factors]]:
        """h and δ of every map at W = link(A), and those of the part without a prediction.

        The second are made where the recipe keeps momentum on the write only.
        """
        layout, points, W = self.layout, segment.points[n], self._at(W, n, segment)

        def slopes(*, free: bool) -> Slopes:
            return factors(
                self.method.memory,
                W,
                points,
                layout.params,
                self.recipe.bias,
                outer=layout.outer,
                free=free,
            )

        whole = slopes(free=False)
        written = slopes(free=True).factors if self.method.rule.splits else []
        if self.method.normalizer is None:
            return whole.factors, written
        rho = self.method.normalizer.shares(whole, points, A, layout.params, layout.scalars(n, 0))
        return scaled_by(whole.factors, rho), scaled_by(written, rho)

    def _at(self, W: Weights, n: int, segment: Segment) -> Weights:
        """Where gradients are taken: W°, or what the first token's decay leaves of it."""
        decay = self.retention.decay
        if decay is None or decay.when != "before":
            return W
        return [w * d.exp() for w, d in zip(W, self._log_decays(n, segment.start), strict=True)]

    def _log_decays(self, n: int, t: int) -> Weights:
        """The log decay of one token for every map, as a factor ``[P, out, in]``."""
        return _matrices(self.method, self.layout.steps, n, t)

    def _read_all(self, n: int, segment: Segment, W: Weights, each: int = 1) -> Tensor:
        x, raw = segment.queries[n]
        return read_at(self.method.memory, W, x, raw, self.layout.params, each)

    # -- coefficients -------------------------------------------------------------------------

    def _tabled(
        self,
        n: int,
        segment: Segment,
        W: Weights,
        memory: Memory,
        *,
        moves: bool,
        own: bool,
        reads: bool = True,
    ) -> tuple[Tensor, Memory]:
        layout, method = self.layout, self.method
        if method.way == "border" and not moves:
            # Nobody reads what an open batch has gathered.
            return self._read_all(n, segment, W), memory
        batch_factors, writes = self._factors(n, segment, W, memory.A)
        if method.rule.splits:
            batch_factors = [
                Factors(w.h, w.delta).join(Factors(f.h, f.delta - w.delta))
                for w, f in zip(writes, batch_factors, strict=True)
            ]
        tokens = segment.stop - segment.start
        rows: list[Factors] = []
        for one, columns in zip(batch_factors, segment.columns, strict=True):
            h, delta, scale = one.h, one.delta, columns.scale[n]
            if method.rule.pairs:
                h, delta = (paired(x, tokens, layout.c) for x in (h, delta))
            if method.rule.pairs or scale is not None:
                one = Factors(h, delta if scale is None else delta * scale)
            rows.append(one)
        y = layout.x[n, :, :, :0]
        if method.way == "border":
            y = self._read_all(n, segment, W)
        elif reads and not method.settled:
            y = self._read_by_table(n, segment, rows, W, memory)
        if not (moves or method.settled):
            return y, memory
        # Everything that reads the old memory is done: it may now be moved in place.
        after = self._end(n, segment, rows, memory, own=own)
        if reads and method.settled:
            y = self._read_all(n, segment, self._link(after.A, n, segment.start))
        return y, after

    def _read_by_table(
        self, n: int, segment: Segment, rows: Sequence[Factors], W: Weights, memory: Memory
    ) -> Tensor:
        """The queries of a segment, each at its own weights, none of which is built."""
        moments = memory.slots.get("momentum")
        reads = [
            Read(
                W=W[i],
                S=None if moments is None else moments[i],
                factors=one,
                a=columns.a[n],
                m=columns.m[n],
                C=_repeated(columns.C[n], one, -1),
                inner=columns.inner[n],
                outer=columns.outer[n],
                tokens=segment.stop - segment.start,
                own=not self.layout.outer,
            )
            for i, (one, columns) in enumerate(zip(rows, segment.columns, strict=True))
        ]
        x, raw = segment.queries[n]
        return read(self.method.memory, reads, x, raw, self.layout.params)

    def _end(
        self,
        n: int,
        segment: Segment,
        rows: Sequence[Factors],
        memory: Memory,
        *,
        own: bool,
    ) -> Memory:
        """A and S after the segment's last token; in place where the memory is ``own``."""
        moments = memory.slots.get("momentum")
        A: Weights = []
        S: Weights = []
        for i, (one, columns) in enumerate(zip(rows, segment.columns, strict=True)):
            if self.method.way != "border":
                moment = None if moments is None else moments[i]
                A.append(_moved(columns, n, one, memory.A[i], moment, own=own))
            if moments is not None:
                s, D = columns.s[n], columns.D[n]
                assert s is not None and D is not None
                h, delta = _weighed(one, _repeated(D, one, 1))
                decayed = scaled(moments[i], s, own=own)
                S.append(plus_product(decayed, delta.mT, h, own=own))
        slots = {} if moments is None else {"momentum": S}
        if self.method.way == "border":
            A = self._settle(n, segment, memory.A, slots)
        return Memory(A=A, slots=slots)

    def _settle(
        self, n: int, segment: Segment, A: Weights, slots: Mapping[str, Weights]
    ) -> Weights:
        """The one step of a whole inner batch: Σ log decays, the mean rate, the last S."""
        layout, last, log_decays = self.layout, self.layout.b - 1, self.recipe.log_decays
        steps = {
            name: x[n : n + 1].mean(2, keepdim=True) if name == "lr" else x[n : n + 1].sum(2, True)
            for name, x in layout.steps.items()
            if name == "lr" or name in log_decays
        }
        decays = _matrices(self.method, steps, 0, 0)
        rates = per_map(steps["lr"], "value", self.method.maps)
        gates = layout.scalars(n, last)
        moved: Weights = []
        etas = [self._rows(rate.matrix(0, 0)) for rate in rates]
        algorithm = self.algorithm
        own = [{name: self._rows(slot[i]) for name, slot in slots.items()} for i in range(len(A))]
        if algorithm.uses_line_search:
            directions = [algorithm.batch_direction(one) for one in own]
            # Every association of the batch, by what all of its tokens' windows give it.
            weight = band(layout.gamma[n]).sum(1, keepdim=True)
            search = self._searched(segment.points[n], A, weight)
            far = search.far([d.flatten(0, 1).unsqueeze(1) for d in directions])
            far = self._rows(far.unsqueeze(-1))
            moves = [eta * far * d for eta, d in zip(etas, directions, strict=True)]
        else:
            moves = [algorithm.batch_step(one, eta) for one, eta in zip(own, etas, strict=True)]
        for i, (a, step) in enumerate(zip(A, moves, strict=True)):
            log_decay = None if self.retention.decay is None else self._rows(decays[i])
            moved.append(
                self.retention.advance(self._rows(a), step, log_decay, gates).flatten(0, 1)
            )
        return moved

    def _searched(self, points: Points, W: Weights, weight: Tensor) -> LineSearch:
        """The search at weights W° for the associations of each step, of weight ``[P, S, m]``."""
        target = self.recipe.bias.target
        assert target is not None
        return LineSearch(
            memory=self.method.memory,
            W=W,
            points=points,
            weight=weight,
            params=self.layout.params,
            target=target,
            outer=self.layout.outer,
        )

    # -- token by token -------------------------------------------------------------------------

    def _tokens(
        self,
        n: int,
        segment: Segment,
        W: Weights,
        memory: Memory,
        *,
        moves: bool,
        own: bool,
        reads: bool = True,
    ) -> tuple[Tensor, Memory]:
        tokens = range(segment.start, segment.stop)
        gamma = self.layout.gamma[n, :, segment.start : segment.stop]
        search = None
        if self.algorithm.uses_line_search:
            points = by_step(segment.points[n], len(tokens), self.layout.c)
            search = self._searched(points, self._at(W, n, segment), gamma)
        batch_factors, writes = self._factors(n, segment, W, memory.A)
        built = advance(
            TokenStep(
                recipe=self.recipe,
                factors=batch_factors,
                writes=writes or None,
                gamma=gamma,
                search=search,
                c=self.layout.c,
                numbers=[self._numbers(n, t) for t in tokens],
                gates=[self.layout.scalars(n, t) for t in tokens],
                count=self.layout.count[n, :, segment.start : segment.stop],
                shape=(self.B, self.H),
            ),
            W,
            memory.A,
            memory.slots,
        )
        after = Memory(A=built.A, slots=built.slots)
        if not reads:
            return self.layout.x[n, :, :, :0], after
        return self._read_all(n, segment, built.readable, len(tokens)), after

    def _numbers(self, n: int, t: int) -> dict[str, list[Tensor]]:
        """lr, momentum and log decay of one token for every map, ``[P, out or 1, in or 1]``."""
        steps, maps = self.layout.steps, self.method.maps
        numbers: dict[str, list[Tensor]] = {}
        for name in ("lr", "momentum"):
            if name in steps:
                x = steps[name][n : n + 1, :, t : t + 1]
                numbers[name] = [own.matrix(0, 0) for own in per_map(x, "value", maps)]
        if self.retention.decay is not None:
            numbers["log_decay"] = self._log_decays(n, t)
        return numbers


def _matrices(method: DeepPlan, steps: Mapping[str, Tensor], n: int, t: int) -> Weights:
    """Log decays of one token as factors ``[P, out or 1, in or 1]`` of every map."""
    if "log_decay" not in steps:
        return []
    here = slice(n, n + 1), slice(None), slice(t, t + 1)
    owns = per_map(steps["log_decay"][here], method.rule.side, method.maps)
    if "log_decay_value" in steps:
        rows = per_map(steps["log_decay_value"][here], "value", method.maps)
        owns = [a.add(b) for a, b in zip(owns, rows, strict=True)]
    return [own.matrix(0, 0) for own in owns]


def _moved(
    columns: Columns, n: int, one: Factors, A: Tensor, S: Tensor | None, *, own: bool
) -> Tensor:
    """a_n A° + m_n S° + Σ C[n, i] δ_i h_iᵀ of one map."""
    a, m = columns.a_end[n], columns.m_end[n]
    h, delta = _weighed(one, _repeated(columns.C_end[n], one, 1))
    inner, outer = columns.inner[n], columns.outer[n]
    moved = A if a is None else scaled(A, a, own=own)
    if inner is not None:
        moved, h = _absorbed(moved, h, inner, -1)
    if outer is not None:
        moved, delta = _absorbed(moved, delta, outer, -2)
    if m is not None and S is not None:
        moved = moved.addcmul_(S, m) if own else torch.addcmul(moved, S, m)
    return plus_product(moved, delta.mT, h, own=own)


def _weighed(one: Factors, weight: Tensor) -> tuple[Tensor, Tensor]:
    """h and δ with every association's coefficient in the narrower of the two."""
    h, delta = one.h, one.delta
    return (h * weight, delta) if h.shape[-1] <= delta.shape[-1] else (h, delta * weight)


def _repeated(C: Tensor, one: Factors, dim: int) -> Tensor:
    """Coefficients of R associations for a map that its program applies more than once."""
    times = one.h.shape[1] // C.shape[dim]
    return C if times == 1 else torch.cat([C] * times, dim=dim)


def _absorbed(old: Tensor, rows: Tensor, total: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """A° and rows ``[P, R, ·]`` decayed to the last token, over channels ``dim`` of A."""
    end = total[:, -1:]
    fade = end.exp().to(old.dtype)
    rest = (end - total).exp().to(old.dtype)
    rest = rest.repeat_interleave(rows.shape[1] // total.shape[1], dim=1)
    return old * (fade if dim == -1 else fade.mT), rows * rest
