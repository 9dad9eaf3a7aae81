"""The reference's recursion, one token at a time; see `recollect.engines.reference.engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Step
from recollect.choices.autograd import inner_leaves
from recollect.choices.memory.base import Stack
from recollect.engines.common.problem import (
    Problem,
    Weights,
    as_matrix,
    forward_of,
    join,
    scaled,
    wants_gradient,
)
from recollect.engines.reference.normalized_steps import (
    normalized_gradients,
    searched,
    weight_of_batch,
)
from recollect.state.state import State

__all__ = ["TokenLoop"]


class TokenLoop:
    """The recursion of `docs/design/meaning.md` over tokens, for B rows and H memories at once.

    Attributes:
        A, S: dual weights and slots now.
        W: W°, where gradients are taken.
        readable: the weights that are read now.
    """

    def __init__(self, problem: Problem) -> None:
        self.recipe = recipe = problem.recipe
        self.problem = problem
        self.outer = wants_gradient(problem)
        self.tokens = join(problem)
        self.forward = forward_of(problem)
        self.b = recipe.algorithm.batch_size
        self.c = recipe.context.horizon or 1
        self.A: Weights = list(problem.state.weights)
        self.S = {name: list(slot) for name, slot in problem.state.algorithm_state.items()}
        # At the end of the buffer the open batch will have been replayed, so start at its border.
        self.count = problem.state.position - problem.state.position % self.b
        self.A0, self.S0 = list(self.A), {n: list(s) for n, s in self.S.items()}
        self.W: Weights = list(self.A)  # set at the first border, and so is what is read
        self.readable: Weights = list(self.A)
        # Where W° came from: the A and the link's numbers that a normalised step is measured at.
        self.origin: tuple[Weights, dict[str, Tensor]] = (list(self.A), {})
        zeros = [torch.zeros_like(w) for w in self.A]
        self.mean = zeros  # Σ η g of the open batch (reduction="mean")
        # Muon(update_every="batch"): Σ log α and Σ η of the open batch, per map.
        self.sums: tuple[Weights, Weights] = (list(zeros), list(zeros))

    # -- rates ---------------------------------------------------------------------------------

    def _maps(self) -> list[tuple[bool, bool, bool]]:
        """(first, last, bias column) of each map; a vector's only map is both."""
        memory, shapes = self.recipe.memory, [w.shape[2:] for w in self.A]
        if isinstance(memory, Stack):
            return [(m.reads_features, m.is_output, m.bias) for m in memory.maps(1, 1)]
        return [(True, True, False) for _ in shapes]

    def _per_map(self, x: Tensor | None, side: str, j: int) -> list[Tensor | None]:
        """One token's number(s) as a factor of every map ``[B, H, out, in]``.

        Channels over ``"key"`` act on the first maps' inputs, over ``"value"`` on the last map's
        outputs; every other map takes the channels' mean.
        """
        if x is None:
            return [None] * len(self.A)
        now = x[:, j]  # [B, H, ...]
        factors: list[Tensor | None] = []
        for (first, last, bias), w in zip(self._maps(), self.A, strict=True):
            if now.dim() == 2:
                factor = now[..., None, None]
            elif now.dim() == 4:
                factor = now  # per entry
            elif w.dim() == 3:
                factor = now.unsqueeze(-2)  # a vector is one row
            elif side == "key" and first:
                extra = [now.mean(-1, keepdim=True)] if bias else []
                factor = torch.cat([now, *extra], dim=-1).unsqueeze(-2)
            elif side == "value" and last:
                factor = now.unsqueeze(-1)
            else:
                factor = now.mean(-1)[..., None, None]
            factors.append(factor)
        return factors

    def _log_decay(self, j: int) -> list[Tensor | None]:
        decay = self.recipe.retention.decay
        if decay is None:
            return [None] * len(self.A)
        log = self.tokens.rates["log_decay"][:, j : j + 1]
        if decay.is_input_scaled and decay.per == "entry":
            log = scaled(log.unsqueeze(-1), self.tokens.rates["decay_scale"][:, j : j + 1])
        side = "value" if decay.per == "value" else "key"
        parts = self._per_map(log, side, 0)
        if decay.per == "key_value":
            rows = self._per_map(self.tokens.rates["log_decay_value"], "value", j)
            parts = [
                a + b for a, b in zip(parts, rows, strict=True) if a is not None and b is not None
            ]
        return list(parts)

    def _step_gates(self, j: int) -> dict[str, Tensor]:
        """Scalar numbers of the step (radius, tau ...) as ``[B, H, 1, 1]``."""
        return _scalars(self.tokens.rates, j)

    # -- the recursion -------------------------------------------------------------------------

    def _link(self, A: Sequence[Tensor], gates: Mapping[str, Tensor]) -> Weights:
        if not self.recipe.retention.has_link:
            return list(A)
        return [self.recipe.retention.link(as_matrix(a), gates).reshape(a.shape) for a in A]

    def gradients(
        self,
        W: Sequence[Tensor],
        j: int,
        prediction_free: bool = False,
        only: int | None = None,
    ) -> list[Tensor]:
        """g_t at W, or only its part that no prediction enters (for momentum on the write).

        Of one association ``only``, its gradient as it is: without what it weighs in g_t.
        """
        low, stop = (max(j - self.c + 1, 0), j + 1) if only is None else (only, only + 1)
        tokens, bias = self.tokens, self.recipe.bias
        raw, phi, v = (x[:, low:stop].transpose(1, 2) for x in (tokens.k, tokens.phi, tokens.v))
        weight = self.weight(j, low) if only is None else torch.ones_like(v[..., 0])
        gates = tokens.numbers_of(bias, low, stop)
        outer = self.outer
        with torch.enable_grad():
            points = inner_leaves(W, outer=outer)
            prediction = self.forward(points, phi, raw, self.problem.params)
            if prediction_free:
                assert bias.affine is not None
                objective = -bias.affine[1] * (prediction * v).sum(-1)
            elif bias.defines_loss:
                objective = bias.loss(prediction, v, gates)
            else:
                error = bias.error(prediction, v, gates)
                return list(
                    torch.autograd.grad(
                        prediction,
                        points,
                        error * weight.unsqueeze(-1),
                        create_graph=outer,
                        materialize_grads=True,
                    )
                )
            return list(
                torch.autograd.grad(
                    (objective * weight).sum(), points, create_graph=outer, materialize_grads=True
                )
            )

    def _gradients_of(self, W: Sequence[Tensor], j: int) -> tuple[list[Tensor], list[Tensor]]:
        """g_t, and its part without a prediction if the algorithm asks for that apart."""
        splits = self.recipe.algorithm.needs_split_error
        if self.recipe.algorithm.uses_normalized_steps:
            return normalized_gradients(self, W, j, splits=splits)
        free = self.gradients(W, j, prediction_free=True) if splits else []
        return self.gradients(W, j), free

    def weight(self, j: int, low: int | None = None) -> Tensor:
        """What associations ``low`` to j weigh in g_t, ``[B, 1 or H, m]``: 0 where none is."""
        low = max(j - self.c + 1, 0) if low is None else low
        weight = self.tokens.valid[:, None, low : j + 1].to(self.tokens.v.dtype)
        if "window" not in self.tokens.rates:
            return weight
        # Entry m of the current token's gate weighs association t − m.
        gamma = self.tokens.rates["window"][:, j]  # [B, H, c]
        return weight * gamma[..., : j + 1 - low].flip(-1)

    def _erase_and_write(self, W: Sequence[Tensor], j: int) -> list[Tensor]:
        """A probe's step: −a (W w) bᵀ + η b v kᵀ, on a matrix."""
        tokens, probe, affine = self.tokens, self.recipe.bias.probe, self.recipe.bias.affine
        assert probe is not None and affine is not None
        phi, v, lr = tokens.phi[:, j], tokens.v[:, j], tokens.rates["lr"][:, j]
        lr = lr if lr.dim() == 3 else lr.unsqueeze(-1)
        if probe.at == "token":
            raw = tokens.rates["probe"][:, j : j + 1].unsqueeze(3)
            where = (self.count[:, None]).expand(-1, 1)
            w = self.problem.phi(raw, "key", where)[:, 0, :, 0]
        else:
            w = phi
        rate = tokens.rates["erase"][:, j]
        rate = rate if rate.dim() == 3 else rate.unsqueeze(-1)
        direction = rate * (w if probe.write == "probe" else phi)
        predicted = (W[0] @ w.unsqueeze(-1)).squeeze(-1)
        outer_erase = predicted.unsqueeze(-1) * direction.unsqueeze(-2)
        outer_write = (lr * v).unsqueeze(-1) * phi.unsqueeze(-2)
        return [affine[1] * outer_write - affine[0] * outer_erase]

    def _advance(self, j: int, live: Tensor) -> None:
        """One token: where ``live [B]``, move A, S and the readable weights."""
        recipe, algorithm, retention = self.recipe, self.recipe.algorithm, self.recipe.retention
        rows = live.view(-1, 1, 1, 1)
        border = live & (self.count % self.b == 0)
        self._open(border, j)

        log_decay = self._log_decay(j)
        before = retention.decay is not None and retention.decay.when == "before"
        W: Weights = list(self.W)
        if before:
            W = [
                (d.exp() * as_matrix(w)).reshape(w.shape) if d is not None else w
                for w, d in zip(W, log_decay, strict=True)
            ]

        phi = self.tokens.phi[:, j]
        place = self.count % self.b + 1  # of this token in its inner batch, from 1
        if recipe.bias.probe is not None:
            steps = [as_matrix(s) for s in self._erase_and_write(W, j)]
            slots: dict[str, Weights] = {name: [] for name in self.S}
        else:
            lr = self._lr(j, phi)
            # A step of a searched length is a direction until all maps' are known.
            rates = [None] * len(lr) if algorithm.uses_line_search else lr
            theta = self._per_map(self.tokens.rates.get("momentum"), "value", j)
            gradients, written = self._gradients_of(W, j)
            writes: list[Tensor] | list[None] = written or [None] * len(W)
            steps, slots = [], {name: [] for name in self.S}
            for i, (g, write) in enumerate(zip(gradients, writes, strict=True)):
                g2 = as_matrix(g)
                eta, theta_i = rates[i], theta[i]
                new, step = algorithm.update(
                    {name: as_matrix(self.S[name][i]) for name in self.S},
                    Step(
                        gradient=g2,
                        write=None if write is None else as_matrix(write),
                        lr=torch.ones_like(g2[..., :1, :1]) if eta is None else eta,
                        momentum=torch.zeros_like(g2[..., :1, :1]) if theta_i is None else theta_i,
                        count=(self.count + 1).view(-1, 1, 1, 1).to(g2.dtype),
                    ),
                )
                steps.append(step)
                for name, value in new.items():
                    slots[name].append(value)
            if algorithm.uses_line_search and algorithm.update_every == "token":
                far = searched(self, W, steps, j, max(j - self.c + 1, 0), self.weight(j))
                steps = [
                    far * s if e is None else e * far * s for e, s in zip(lr, steps, strict=True)
                ]

        gates = self._step_gates(j)
        A, readable = self._settle(j, place, steps, slots, log_decay, gates)

        def keep(new: Sequence[Tensor], old: Weights) -> Weights:
            return [
                torch.where(rows, as_matrix(n), as_matrix(o)).reshape(o.shape)
                for n, o in zip(new, old, strict=True)
            ]

        self.S = {name: keep(slots[name], self.S[name]) for name in self.S}
        self.A = keep(A, self.A)
        self.readable = keep(readable, self.readable)
        if recipe.links_at_batch_end and retention.links_after_first_token:
            # MIRAS 30: W_1 = link(A_1) of the batch's first token replaces W° for tokens 2..b.
            first = (live & (place == 1)).view(-1, 1, 1, 1)
            settled = self._link(self.A, gates)
            self.W = _where(first, settled, self.W)
            self._measure_from(first, gates)
            self.readable = _where(first, settled, self.readable)
        self.count = self.count + live

    def _lr(self, j: int, phi: Tensor) -> list[Tensor | None]:
        rates, recipe = dict(self.tokens.rates), self.recipe
        if "lr" not in rates:
            return [None] * len(self.A)
        lr = rates["lr"]
        if recipe.algorithm.rate_depends_on_key:
            assert recipe.bias.affine is not None
            kappa = phi.square().sum(-1)
            now = recipe.algorithm.rate(lr[:, j], kappa, recipe.bias.affine[0])
            return self._per_map(now.unsqueeze(1), "value", 0)
        return self._per_map(lr, "value", j)

    def _open(self, border: Tensor, j: int) -> None:
        """Where a new inner batch begins: W° = link(A), and remember A and S for the state."""
        rows = border.view(-1, 1, 1, 1)
        # A link's gates belong to the step that uses it: W° of this step is link(A°) with its
        # gates.
        linked = self._link(self.A, self._step_gates(j))
        self.W = _where(rows, linked, self.W)
        self._measure_from(rows, self._step_gates(j))
        if self.recipe.links_at_batch_end or self.recipe.algorithm.update_every == "batch":
            self.readable = _where(rows, linked, self.readable)
        self.A0 = _where(rows, self.A, self.A0)
        self.S0 = {n: _where(rows, self.S[n], self.S0[n]) for n in self.S}
        zeros = [torch.zeros_like(w) for w in self.A]
        self.mean = _where(rows, zeros, self.mean)
        self.sums = (_where(rows, zeros, self.sums[0]), _where(rows, zeros, self.sums[1]))

    def _measure_from(self, rows: Tensor, gates: dict[str, Tensor]) -> None:
        """Where W° is made anew, it is the link of A as it stands, with these numbers."""
        if not self.recipe.algorithm.uses_normalized_steps:
            return
        A, old = self.origin
        numbers = {name: torch.where(rows, x, old.get(name, x)) for name, x in gates.items()}
        self.origin = (_where(rows, self.A, A), numbers)

    def _settle(
        self,
        j: int,
        place: Tensor,
        steps: list[Tensor],
        slots: dict[str, Weights],
        log_decay: list[Tensor | None],
        gates: dict[str, Tensor],
    ) -> tuple[Weights, Weights]:
        """A_t and the weights read at t, by the mode of the recipe."""
        recipe, retention, algorithm = self.recipe, self.recipe.retention, self.recipe.algorithm
        old = [as_matrix(a) for a in self.A]
        if algorithm.reduction == "mean":
            total = [as_matrix(m) - s for m, s in zip(self.mean, steps, strict=True)]
            self.mean = [t.reshape(a.shape) for t, a in zip(total, self.A, strict=True)]
            tau = 1 / place.to(old[0].dtype)[:, None] + self._offset(j, place)  # [B, H]
            tau = tau.clamp_min(0)[..., None, None]
            A = [as_matrix(a) - tau * t for a, t in zip(self.A0, total, strict=True)]
            return A, A
        if algorithm.update_every == "batch":
            return self._at_border_only(j, place, slots, log_decay, gates)
        A = [
            retention.advance(a, s, d, gates) for a, s, d in zip(old, steps, log_decay, strict=True)
        ]
        if recipe.links_at_batch_end:
            # W̃_t = α_t W̃_{t−1} + S_t, from W° at the border: linear inside the batch.
            read = [
                s + (as_matrix(r) if d is None else d.exp() * as_matrix(r))
                for r, s, d in zip(self.readable, steps, log_decay, strict=True)
            ]
            return A, read
        shaped = [a.reshape(o.shape) for a, o in zip(A, self.A, strict=True)]
        return shaped, self._link(shaped, gates)

    def _at_border_only(
        self,
        j: int,
        place: Tensor,
        slots: dict[str, Weights],
        log_decay: list[Tensor | None],
        gates: dict[str, Tensor],
    ) -> tuple[Weights, Weights]:
        """Muon(update_every="batch"): tokens read W°; A moves at the batch's last token."""
        decays, rates = self.sums
        lr = self._lr(j, self.tokens.phi[:, j])
        decays = [
            as_matrix(s) + (0 if d is None else d) for s, d in zip(decays, log_decay, strict=True)
        ]
        rates = [as_matrix(s) + (1 if e is None else e) for s, e in zip(rates, lr, strict=True)]
        last = (place == self.b).view(-1, 1, 1, 1)
        A: Weights = []
        searches = self.recipe.algorithm.uses_line_search
        means = [r / self.b for r in rates]
        steps = [
            self.recipe.algorithm.batch_step(
                {name: slots[name][i] for name in slots}, torch.ones_like(r) if searches else r
            )
            for i, r in enumerate(means)
        ]
        if searches:
            far = searched(self, self.W, steps, j, *weight_of_batch(self, j))
            steps = [r * far * s for r, s in zip(means, steps, strict=True)]
        for i, (a, step) in enumerate(zip(self.A, steps, strict=True)):
            log_a = None if log_decay[i] is None else decays[i]
            moved = self.recipe.retention.advance(as_matrix(a), step, log_a, gates)
            A.append(torch.where(last, moved, as_matrix(a)))
        self.sums = (
            [d.reshape(a.shape) for d, a in zip(decays, self.A, strict=True)],
            [r.reshape(a.shape) for r, a in zip(rates, self.A, strict=True)],
        )
        return A, list(self.W)

    def _offset(self, j: int, place: Tensor) -> Tensor:
        offset = self.tokens.rates["offset"][:, j]
        if offset.dim() == 2:
            return offset
        index = (place - 1).view(-1, 1, 1).expand(-1, offset.shape[1], 1)
        return offset.gather(-1, index).squeeze(-1)

    # -- reading -------------------------------------------------------------------------------

    def run(self, problem: Problem) -> Tensor:
        """Replay the open batch, then every new token; outputs of the new ones."""
        tokens, read_how = self.tokens, self.recipe.memory.read
        buffered, opened = tokens.buffered, problem.state.position % self.b
        num_seen = problem.state.host_position
        first = 0 if num_seen is None else buffered - num_seen % self.b
        q_phi = problem.phi(problem.q, "query", self._query_positions(problem))
        outputs: list[Tensor] = []
        replay = problem.state.buffer is not None
        for j in range(len(tokens)):
            if j < buffered:
                live = tokens.valid[:, j] & (j >= buffered - opened)
                # Where the host knows how far the batch has come it need not ask the device.
                if replay and j >= first and (num_seen is not None or bool(live.any())):
                    self._advance(j, live)
                continue
            live = tokens.valid[:, j]
            t = j - buffered
            if read_how.when == "before":
                y = self._read(q_phi[:, t], problem.q[:, t])
                self._advance(j, live)
            else:
                self._advance(j, live)
                y = self._read(q_phi[:, t], problem.q[:, t])
            if read_how.bonus != 0.0:
                u = tokens.rates["bonus"][:, j]
                u = u if u.dim() == 3 else u.unsqueeze(-1)
                match = (q_phi[:, t] * (u * tokens.phi[:, j]).unsqueeze(2)).sum(-1)  # [B, H, G]
                y = y + match.unsqueeze(-1) * tokens.v[:, j].unsqueeze(2)
            outputs.append(torch.where(live.view(-1, 1, 1, 1), y, 0.0))
        if outputs:
            return torch.stack(outputs, dim=1)
        B, _, H, G, _ = problem.q.shape
        return problem.v.new_zeros(B, 0, H, G, problem.v.shape[-1])

    def _query_positions(self, problem: Problem) -> Tensor:
        steps = torch.arange(problem.q.shape[1], device=problem.q.device)
        return problem.state.position[:, None] + steps

    def _read(self, phi: Tensor, raw: Tensor) -> Tensor:
        return self.forward(self.readable, phi, raw.to(phi.dtype), self.problem.params)

    def readable_with(self, rates: Mapping[str, Tensor], t: int) -> Weights:
        """The weights a reading token with these numbers sees, after the replay."""
        if self.recipe.algorithm.reduction == "mean" or not self.recipe.retention.has_link:
            linear = self.recipe.algorithm.update_every != "batch"
            return self.A if linear else self._inside(list(self.W), list(self.A))
        linked = self._link(self.A, _scalars(rates, t))
        if self.recipe.links_at_batch_end or self.recipe.algorithm.update_every == "batch":
            return self._inside(self.readable, linked)
        return linked

    def _inside(self, within: Weights, at_border: Weights) -> Weights:
        """Per row, the first where the inner batch is open, else the second."""
        opened = (self.count % self.b != 0).view(-1, 1, 1, 1)
        return _where(opened, within, at_border)

    # -- the state -----------------------------------------------------------------------------

    def state(self, problem: Problem) -> State:
        """The state after all tokens: weights of the open batch's start, and its raw tokens."""
        closed = (self.count % self.b == 0).view(-1, 1, 1, 1)
        return problem.final_state(
            weights=tuple(_where(closed, self.A, self.A0)),
            algorithm_state={n: tuple(_where(closed, self.S[n], self.S0[n])) for n in self.S},
        )


def _scalars(rates: Mapping[str, Tensor], j: int) -> dict[str, Tensor]:
    return {name: x[:, j, :, None, None] for name, x in rates.items() if x.dim() == 3}


def _where(rows: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> Weights:
    """Per row, new or old; ``rows [B, 1, 1, 1]`` is reshaped to each weight's own rank."""
    return [
        torch.where(rows.view(-1, *(1,) * (o.dim() - 1)), n.reshape(o.shape), o)
        for n, o in zip(new, old, strict=True)
    ]
