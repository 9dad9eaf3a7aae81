"""General path of the deep engine: a loop over inner batches, with gradients at W°.

The recipe decides the execution mode:

* *table*: A is linear in the gradients, and coefficients describe every update
  (`step_coefficients`).
* *border*: tokens read W°, and one step is taken at the end of the batch (Muon over full batches).
* *tokens*: A_t is built for every token. This mode serves links, elementwise optimizers and a
  decay per channel under momentum, which act between the gradients and the read weights.
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
    end_momentum,
    end_weights,
    factors,
    read,
    read_at,
)
from recollect.engines.deep.layout import (
    DeepPlan,
    Layout,
    Memory,
    Segment,
    Weights,
    segment_of,
)
from recollect.engines.deep.line_search import LineSearch, by_step
from recollect.engines.deep.share import scaled_by
from recollect.engines.deep.step_coefficients import band, decay_factors, paired, per_map, sum_of
from recollect.engines.deep.token_weights import TokenStep, advance

__all__ = ["run_inner_batches"]


def run_inner_batches(method: DeepPlan, layout: Layout, memory: Memory) -> tuple[Tensor, Memory]:
    """Return outputs ``[N, B, H, b G, V]`` and the memory after the last committed batch."""
    return InnerBatchLoop(method, layout).run(memory)


class InnerBatchLoop:
    """Recurrence of one memory over inner batches."""

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
            # Updates in place need a copy of the caller's tensors.
            memory = memory.like([w.clone() for w in memory.tensors()])
        for n, commit in enumerate(self.layout.commits):
            y, next_memory = self._batch(n, memory, commit)
            outputs.append(y)
            if commit is True:
                memory = next_memory
            elif commit is not False:
                pairs = zip(next_memory.tensors(), memory.tensors(), strict=True)
                memory = memory.like([torch.where(commit, new, old) for new, old in pairs])
        return torch.stack(outputs), memory

    def _batch(self, n: int, memory: Memory, commit: bool | Tensor) -> tuple[Tensor, Memory]:
        W = self._link(memory.A, n, 0)
        outputs: list[Tensor] = []
        inplace = commit is True and not self.layout.outer
        for index, segment in enumerate(self.segments):
            # The link applies after the first token, even in a batch of one token.
            links_first = self.method.split and index == 0
            last = index == len(self.segments) - 1 and not links_first
            advance = self._tokens if self.method.execution_mode == "tokens" else self._tabled
            if last:
                updates_memory = commit is not False
                y, memory = advance(
                    n, segment, W, memory, updates_memory=updates_memory, inplace=inplace
                )
            else:
                _, memory = advance(
                    n, segment, W, memory, updates_memory=True, needs_outputs=False, inplace=inplace
                )
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
        """Return the factors of every map at W = link(A), and those without the prediction.

        The second list is empty unless momentum applies to the write only.
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
                erasure=self.algorithm.erasure,
            )

        full = slopes(free=False)
        writes = slopes(free=True).factors if self.method.rule.splits else []
        if self.method.normalizer is None:
            return full.factors, writes
        rho = self.method.normalizer.shares(full, points, A, layout.params, layout.scalars(n, 0))
        return scaled_by(full.factors, rho), scaled_by(writes, rho)

    def _at(self, W: Weights, n: int, segment: Segment) -> Weights:
        """Return the linearization point: W°, decayed by the first token if decay comes first."""
        decay = self.retention.decay
        if decay is None or decay.when != "before":
            return W
        return [w * d.exp() for w, d in zip(W, self._log_decays(n, segment.start), strict=True)]

    def _log_decays(self, n: int, t: int) -> Weights:
        """Return the log decay of one token for every map, broadcastable to ``[P, out, in]``."""
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
        updates_memory: bool,
        inplace: bool,
        needs_outputs: bool = True,
    ) -> tuple[Tensor, Memory]:
        layout, method = self.layout, self.method
        if method.execution_mode == "border" and not updates_memory:
            # The sums of an open batch are not needed.
            return self._read_all(n, segment, W), memory
        batch_factors, writes = self._factors(n, segment, W, memory.A)
        if method.rule.splits:
            batch_factors = [
                Factors(w.h, w.delta).join(Factors(f.h, f.delta - w.delta))
                for w, f in zip(writes, batch_factors, strict=True)
            ]
        tokens = segment.stop - segment.start
        rows: list[Factors] = []
        for one, (reads, _) in zip(batch_factors, segment.tables, strict=True):
            h, delta, scale = one.h, one.delta, reads[n].scale
            if method.rule.pairs:
                h, delta = (paired(x, tokens, layout.c) for x in (h, delta))
            if method.rule.pairs or scale is not None:
                one = Factors(h, delta if scale is None else delta * scale)
            rows.append(one)
        y = layout.x[n, :, :, :0]
        if method.execution_mode == "border":
            y = self._read_all(n, segment, W)
        elif needs_outputs and not method.settled:
            y = self._read_by_table(n, segment, rows, W, memory)
        if not (updates_memory or method.settled):
            return y, memory
        # All reads of the old memory precede this update in place.
        next_memory = self._end(n, segment, rows, memory, inplace=inplace)
        if needs_outputs and method.settled:
            y = self._read_all(n, segment, self._link(next_memory.A, n, segment.start))
        return y, next_memory

    def _read_by_table(
        self, n: int, segment: Segment, rows: Sequence[Factors], W: Weights, memory: Memory
    ) -> Tensor:
        """Return the outputs of a segment's queries without building the weights of each token."""
        moments = memory.slots.get("momentum")
        map_reads = [
            Read(
                W=W[i],
                S=None if moments is None else moments[i],
                factors=one,
                table=reads[n],
                tokens=segment.stop - segment.start,
                inplace=not self.layout.outer,
            )
            for i, (one, (reads, _)) in enumerate(zip(rows, segment.tables, strict=True))
        ]
        x, raw = segment.queries[n]
        return read(self.method.memory, map_reads, x, raw, self.layout.params)

    def _end(
        self,
        n: int,
        segment: Segment,
        rows: Sequence[Factors],
        memory: Memory,
        *,
        inplace: bool,
    ) -> Memory:
        """Return A and S after the segment's last token."""
        moments = memory.slots.get("momentum")
        A: Weights = []
        S: Weights = []
        for i, (one, (_, ends)) in enumerate(zip(rows, segment.tables, strict=True)):
            if self.method.execution_mode != "border":
                moment = None if moments is None else moments[i]
                A.append(end_weights(ends[n], one, memory.A[i], moment, inplace=inplace))
            if moments is not None:
                S.append(end_momentum(ends[n], one, moments[i], inplace=inplace))
            elif self.method.execution_mode == "border":
                S.append(end_momentum(ends[n], one, None, inplace=inplace))
        if self.method.execution_mode == "border":
            A = self._settle(n, segment, memory.A, {"momentum": S})
        return Memory(A=A, slots={} if moments is None else {"momentum": S})

    def _settle(
        self, n: int, segment: Segment, A: Weights, slots: Mapping[str, Weights]
    ) -> Weights:
        """Apply the step of a full inner batch: Σ log decays, the mean rate, the last S."""
        layout, last, log_decays = self.layout, self.layout.b - 1, self.recipe.log_decays
        steps = {
            name: x[n : n + 1].mean(2, keepdim=True) if name == "lr" else x[n : n + 1].sum(2, True)
            for name, x in layout.steps.items()
            if name == "lr" or name in log_decays
        }
        decays = _matrices(self.method, steps, 0, 0)
        rates = per_map(steps["lr"], "value", self.method.maps)
        gates = layout.scalars(n, last)
        next_A: Weights = []
        etas = [self._rows(rate[0, :, 0]) for rate in rates]
        algorithm = self.algorithm
        map_slots = [
            {name: self._rows(slot[i]) for name, slot in slots.items()} for i in range(len(A))
        ]
        if algorithm.uses_line_search:
            directions = [algorithm.batch_direction(one) for one in map_slots]
            # Weight of an association: the sum over the windows of all tokens.
            weight = band(layout.gamma[n]).sum(1, keepdim=True)
            search = self._searched(segment.points[n], A, weight)
            length = search.step_length([d.flatten(0, 1).unsqueeze(1) for d in directions])
            length = self._rows(length.unsqueeze(-1))
            batch_steps = [eta * length * d for eta, d in zip(etas, directions, strict=True)]
        else:
            batch_steps = [
                algorithm.batch_step(one, eta) for one, eta in zip(map_slots, etas, strict=True)
            ]
        for i, (a, step) in enumerate(zip(A, batch_steps, strict=True)):
            log_decay = None if self.retention.decay is None else self._rows(decays[i])
            next_A.append(
                self.retention.advance(self._rows(a), step, log_decay, gates).flatten(0, 1)
            )
        return next_A

    def _searched(self, points: Points, W: Weights, weight: Tensor) -> LineSearch:
        """Return the line search at W° over the associations of each step."""  # weight: [P, S, m]
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
        updates_memory: bool,
        inplace: bool,
        needs_outputs: bool = True,
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
        next_memory = Memory(A=built.A, slots=built.slots)
        if not needs_outputs:
            return self.layout.x[n, :, :, :0], next_memory
        return self._read_all(n, segment, built.readable, len(tokens)), next_memory

    def _numbers(self, n: int, t: int) -> dict[str, list[Tensor]]:
        """Return lr, momentum and log decay of one token for every map."""
        # [P, out or 1, in or 1]
        steps, maps = self.layout.steps, self.method.maps
        numbers: dict[str, list[Tensor]] = {}
        for name in ("lr", "momentum"):
            if name in steps:
                x = steps[name][n : n + 1, :, t : t + 1]
                numbers[name] = [value[0, :, 0] for value in per_map(x, "value", maps)]
        if self.retention.decay is not None:
            numbers["log_decay"] = self._log_decays(n, t)
        return numbers


def _matrices(method: DeepPlan, steps: Mapping[str, Tensor], n: int, t: int) -> Weights:
    """Return the log decays of one token for every map."""  # [P, out or 1, in or 1]
    token = {
        name: x[n : n + 1, :, t : t + 1]
        for name, x in steps.items()
        if name in ("log_decay", "log_decay_value")
    }
    decays = decay_factors(method.rule, method.maps, token) if token else []
    return [sum_of(factors)[0, :, 0] for factors in decays]
