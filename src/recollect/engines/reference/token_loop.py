"""Recursion of the reference engine, one token at a time (`recollect.engines.reference.engine`)."""

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
    factored_log_decay,
    join_buffer,
    loss_gradients,
    memory_forward,
    memory_read,
    requires_grad,
)
from recollect.engines.reference.normalized_steps import (
    batch_weights,
    line_search_length,
    normalized_gradients,
)
from recollect.state.state import State

__all__ = ["TokenLoop"]


class TokenLoop:
    """Recursion of `docs/design/meaning.md` over tokens for B batch elements and H memories.

    Attributes:
        A, S: Current dual weights and slots.
        W: W°, the weights at which gradients are taken.
        read_weights: Weights of the current read.
        linearization_point: A and link gates of W°, the point of normalised steps.
        batch_step_sum: Σ η g of the open batch (``reduction="mean"``), or its steps −Σ η g
            (``update_every="batch"`` without slots).
        batch_sums: Σ log α and Σ η of the open batch per map (``update_every="batch"``).
    """

    def __init__(self, problem: Problem) -> None:
        self.recipe = recipe = problem.recipe
        self.problem = problem
        self.outer = requires_grad(problem)
        self.tokens = join_buffer(problem)
        self.forward, self.read = memory_forward(problem), memory_read(problem)
        self.b = recipe.algorithm.batch_size
        self.A: Weights = list(problem.state.weights)
        self.S = {name: list(slot) for name, slot in problem.state.algorithm_state.items()}
        # The buffer contains the open batch, so the replay starts at the boundary of that batch.
        self.count = problem.state.position - problem.state.position % self.b
        self.A0, self.S0 = list(self.A), {n: list(s) for n, s in self.S.items()}
        self.W: Weights = list(self.A)  # set at the first boundary
        self.read_weights: Weights = list(self.A)
        self.linearization_point: tuple[Weights, dict[str, Tensor]] = (list(self.A), {})
        zeros = [torch.zeros_like(w) for w in self.A]
        self.batch_step_sum = zeros
        self.batch_sums: tuple[Weights, Weights] = (list(zeros), list(zeros))

    # -- gates ---------------------------------------------------------------------------------

    def _maps(self) -> list[tuple[bool, bool, bool]]:
        """Return (is first, is last, has a bias column) per map; a vector's map is both."""
        memory, shapes = self.recipe.memory, [w.shape[2:] for w in self.A]
        if isinstance(memory, Stack):
            return [(m.reads_features, m.is_output, m.bias) for m in memory.maps(1, 1)]
        return [(True, True, False) for _ in shapes]

    def _per_map(self, x: Tensor | None, side: str, j: int) -> list[Tensor | None]:
        """Return the params of token j as one factor per map ``[B, H, out, in]``.

        Channels over ``"key"`` scale the inputs of the first maps. Channels over ``"value"`` scale
        the outputs of the last map. All other maps use the mean over channels.
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
            return self._per_map(None, "key", j)
        log = self.tokens.rates["log_decay"][:, j : j + 1]
        if decay.is_input_scaled and decay.per == "entry":
            log = factored_log_decay(
                log.unsqueeze(-1), self.tokens.rates["decay_scale"][:, j : j + 1]
            )
        side = "value" if decay.per == "value" else "key"
        parts = self._per_map(log, side, 0)
        if decay.per == "key_value":
            rows = self._per_map(self.tokens.rates["log_decay_value"], "value", j)
            parts = [
                a + b for a, b in zip(parts, rows, strict=True) if a is not None and b is not None
            ]
        return list(parts)

    # -- the recursion -------------------------------------------------------------------------

    def _link(self, A: Sequence[Tensor], gates: Mapping[str, Tensor]) -> Weights:
        if not self.recipe.retention.has_link:
            return list(A)
        return [self.recipe.retention.link(as_matrix(a), gates).reshape(a.shape) for a in A]

    def gradients(
        self,
        W: Sequence[Tensor],
        j: int,
        without_prediction: bool = False,
        association: int | None = None,
    ) -> list[Tensor]:
        """Return g_t at W, or the unweighted gradient of one ``association``.

        Momentum on the write accumulates the part ``without_prediction``.
        """
        tokens, bias, outer = self.tokens, self.recipe.bias, self.outer
        at = tokens.in_window(j) if association is None else slice(association, association + 1)
        raw, phi, v = (x[:, at].transpose(1, 2) for x in (tokens.k, tokens.phi, tokens.v))
        weight = self.weight(j) if association is None else torch.ones_like(v[..., 0])
        gates = tokens.bias_gates(bias, at)
        with torch.enable_grad():
            points = inner_leaves(W, outer=outer)
            prediction = self.forward(points, phi, raw, self.problem.params)
            if not without_prediction:
                gradients = loss_gradients(bias, prediction, v, gates, weight, points, outer=outer)
                return self._add_erasure(gradients, points, phi, raw, weight)
            assert bias.affine is not None
            objective = -bias.affine[1] * (prediction * v).sum(-1)
            gradients = torch.autograd.grad(
                (objective * weight).sum(), points, create_graph=outer, materialize_grads=True
            )
            return list(gradients)

    def _add_erasure(
        self, gradients: list[Tensor], W: Weights, phi: Tensor, raw: Tensor, weight: Tensor
    ) -> list[Tensor]:
        """Add c Σ_i weight_i (W h_i) h_iᵀ to the gradient of every map; h_i are its inputs."""
        c, memory = self.recipe.algorithm.erasure, self.recipe.memory
        if c == 0:
            return gradients
        assert isinstance(memory, Stack)  # Algorithm.requires
        total = list(gradients)

        def apply(index: int, h: Tensor) -> Tensor:
            output = h @ W[index].mT
            weighted = weight.unsqueeze(-1) * output
            total[index] = total[index] + c * weighted.mT @ h
            return output

        memory.compute(apply, phi, raw, self.problem.params)
        return total if self.outer else [g.detach() for g in total]

    def _split_gradients(self, W: Sequence[Tensor], j: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return g_t and its part without the prediction if the algorithm needs the split."""
        splits = self.recipe.algorithm.needs_split_error
        if self.recipe.algorithm.uses_normalized_steps:
            return normalized_gradients(self, W, j, has_split_error=splits)
        write_gradients = self.gradients(W, j, without_prediction=True) if splits else []
        return self.gradients(W, j), write_gradients

    def weight(self, j: int) -> Tensor:
        """Return the weights of the associations in the window of j, ``[B, 1 or H, m]``."""
        valid = self.tokens.valid[:, None, self.tokens.in_window(j)]
        weight = valid.to(self.tokens.v.dtype)
        if "window" not in self.tokens.rates:
            return weight
        # Entry m of the current token's gate is the weight of association t − m.
        gamma = self.tokens.rates["window"][:, j]  # [B, H, c]
        return weight * gamma[..., : weight.shape[-1]].flip(-1)

    def _probe_gradients(self, W: Sequence[Tensor], j: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return g_t = a (W w) cᵀ − η b v kᵀ of a probe on a matrix, with all rates, and its write.

        c is the direction of the erasure, and (a, b) belong to the affine error.
        """
        tokens, probe, affine = self.tokens, self.recipe.bias.probe, self.recipe.bias.affine
        assert probe is not None and affine is not None
        phi, v, lr = tokens.phi[:, j], tokens.v[:, j], tokens.rates["lr"][:, j]
        lr = lr if lr.dim() == 3 else lr.unsqueeze(-1)
        if probe.at == "token":
            raw = tokens.rates["probe"][:, j : j + 1].unsqueeze(3)
            position = (self.count[:, None]).expand(-1, 1)
            w = self.problem.phi(raw, "key", position)[:, 0, :, 0]
        else:
            w = phi
        rate = tokens.rates["erase"][:, j]
        rate = rate if rate.dim() == 3 else rate.unsqueeze(-1)
        direction = rate * (w if probe.write == "probe" else phi)
        predicted = (W[0] @ w.unsqueeze(-1)).squeeze(-1)
        outer_erase = predicted.unsqueeze(-1) * direction.unsqueeze(-2)
        outer_write = (lr * v).unsqueeze(-1) * phi.unsqueeze(-2)
        write = -affine[1] * outer_write
        return [affine[0] * outer_erase + write], [write]

    def _advance(self, j: int, token_mask: Tensor) -> None:
        """Update A, S and the read weights at token j for the selected ``token_mask [B]``."""
        recipe, algorithm, retention = self.recipe, self.recipe.algorithm, self.recipe.retention
        rows = token_mask.view(-1, 1, 1, 1)
        is_boundary = token_mask & (self.count % self.b == 0)
        self._begin_batch(is_boundary, j)

        log_decay = self._log_decay(j)
        decays_first = retention.decay is not None and retention.decay.when == "before"
        W: Weights = list(self.W)
        if decays_first:
            W = [
                (d.exp() * as_matrix(w)).reshape(w.shape) if d is not None else w
                for w, d in zip(W, log_decay, strict=True)
            ]

        phi = self.tokens.phi[:, j]
        batch_position = self.count % self.b + 1  # 1-based position in the inner batch
        lr: list[Tensor | None] = [None] * len(W)
        if recipe.bias.probe is not None:
            gradients, write_gradients = self._probe_gradients(W, j)
        else:
            lr = self._lr(j, phi)
            gradients, write_gradients = self._split_gradients(W, j)
        # With a line search, the step is a direction until all maps have theirs.
        rates = [None] * len(lr) if algorithm.uses_line_search else lr
        theta = self._per_map(self.tokens.rates.get("momentum"), "value", j)
        # A momentum from batch to batch is the mean over the tokens of a batch.
        sums_batch = algorithm.momentum_every == "batch"
        old_slots = self.S0 if sums_batch else self.S
        if sums_batch:
            theta = [None if x is None else x / self.b for x in theta]
        outer_lr = self._per_map(self.tokens.rates.get("outer_lr"), "value", j)
        writes: list[Tensor] | list[None] = write_gradients or [None] * len(W)
        steps: Weights = []
        slots: dict[str, Weights] = {name: [] for name in self.S}
        for i, (g, write) in enumerate(zip(gradients, writes, strict=True)):
            g2 = as_matrix(g)
            eta, theta_i, beta = rates[i], theta[i], outer_lr[i]
            new, step = algorithm.update(
                {name: as_matrix(old_slots[name][i]) for name in self.S},
                Step(
                    gradient=g2,
                    write=None if write is None else as_matrix(write),
                    lr=torch.ones_like(g2[..., :1, :1]) if eta is None else eta,
                    momentum=torch.zeros_like(g2[..., :1, :1]) if theta_i is None else theta_i,
                    count=(self.count + 1).view(-1, 1, 1, 1).to(g2.dtype),
                    outer_lr=1.0 if beta is None else beta,
                ),
            )
            steps.append(step)
            for name, value in new.items():
                if sums_batch:
                    is_first = (batch_position == 1).view(-1, 1, 1, 1)
                    value = value + torch.where(is_first, 0.0, as_matrix(self.S[name][i]))
                slots[name].append(value)
        if algorithm.uses_line_search and algorithm.update_every == "token":
            step_length = line_search_length(
                self, W, steps, self.tokens.in_window(j), self.weight(j)
            )
            steps = [
                step_length * s if e is None else e * step_length * s
                for e, s in zip(lr, steps, strict=True)
            ]

        gates = _scalars(self.tokens.rates, j)
        A, read_weights = self._apply_step(j, batch_position, steps, slots, log_decay, gates)

        def select_tokens(new: Sequence[Tensor], old: Weights) -> Weights:
            return [
                torch.where(rows, as_matrix(n), as_matrix(o)).reshape(o.shape)
                for n, o in zip(new, old, strict=True)
            ]

        self.S = {name: select_tokens(slots[name], self.S[name]) for name in self.S}
        self.A = select_tokens(A, self.A)
        self.read_weights = select_tokens(read_weights, self.read_weights)
        if recipe.links_at_batch_end and retention.links_after_first_token:
            # MIRAS 30: W_1 = link(A_1) of the batch's first token replaces W° for tokens 2..b.
            first = (token_mask & (batch_position == 1)).view(-1, 1, 1, 1)
            linked = self._link(self.A, gates)
            self.W = _select(first, linked, self.W)
            self._record_linearization_point(first, gates)
            self.read_weights = _select(first, linked, self.read_weights)
        self.count = self.count + token_mask

    def _lr(self, j: int, phi: Tensor) -> list[Tensor | None]:
        lr, recipe = self.tokens.rates.get("lr"), self.recipe
        if lr is not None and recipe.algorithm.rate_depends_on_key:
            assert recipe.bias.affine is not None
            kappa = phi.square().sum(-1)
            now = recipe.algorithm.rate(lr[:, j], kappa, recipe.bias.affine[0])
            return self._per_map(now.unsqueeze(1), "value", 0)
        return self._per_map(lr, "value", j)

    def _begin_batch(self, is_boundary: Tensor, j: int) -> None:
        """Set W° = link(A) and store A and S for the state at the start of an inner batch."""
        rows = is_boundary.view(-1, 1, 1, 1)
        # W° of this step is link(A°) with the gates of this step.
        gates = _scalars(self.tokens.rates, j)
        linked = self._link(self.A, gates)
        self.W = _select(rows, linked, self.W)
        self._record_linearization_point(rows, gates)
        if self.recipe.links_at_batch_end or self.recipe.algorithm.update_every == "batch":
            self.read_weights = _select(rows, linked, self.read_weights)
        self.A0 = _select(rows, self.A, self.A0)
        self.S0 = {n: _select(rows, self.S[n], self.S0[n]) for n in self.S}
        zeros = [torch.zeros_like(w) for w in self.A]
        self.batch_step_sum = _select(rows, zeros, self.batch_step_sum)
        decays, rates = self.batch_sums
        self.batch_sums = _select(rows, zeros, decays), _select(rows, zeros, rates)

    def _record_linearization_point(self, rows: Tensor, gates: dict[str, Tensor]) -> None:
        """Store A and the link gates of W° for the selected rows."""
        if not self.recipe.algorithm.uses_normalized_steps:
            return
        A, old = self.linearization_point
        link_gates = {name: torch.where(rows, x, old.get(name, x)) for name, x in gates.items()}
        self.linearization_point = (_select(rows, self.A, A), link_gates)

    def _apply_step(
        self,
        j: int,
        batch_position: Tensor,
        steps: list[Tensor],
        slots: dict[str, Weights],
        log_decay: list[Tensor | None],
        gates: dict[str, Tensor],
    ) -> tuple[Weights, Weights]:
        """Return A_t and the weights that token t reads."""
        recipe, retention, algorithm = self.recipe, self.recipe.retention, self.recipe.algorithm
        old = [as_matrix(a) for a in self.A]
        if algorithm.reduction == "mean":
            total = [as_matrix(m) - s for m, s in zip(self.batch_step_sum, steps, strict=True)]
            self.batch_step_sum = [t.reshape(a.shape) for t, a in zip(total, self.A, strict=True)]
            tau = 1 / batch_position.to(old[0].dtype)[:, None]
            tau = tau + self._offset(j, batch_position)  # [B, H]
            tau = tau.clamp_min(0)[..., None, None]
            A = [as_matrix(a) - tau * t for a, t in zip(self.A0, total, strict=True)]
            return A, A
        if algorithm.update_every == "batch":
            if not slots:
                sums = [as_matrix(m) + s for m, s in zip(self.batch_step_sum, steps, strict=True)]
                self.batch_step_sum = [
                    x.reshape(a.shape) for x, a in zip(sums, self.A, strict=True)
                ]
                slots = {"momentum": sums}
            return self._step_at_batch_end(j, batch_position, slots, log_decay, gates)
        A = [
            retention.advance(a, s, d, gates) for a, s, d in zip(old, steps, log_decay, strict=True)
        ]
        if recipe.links_at_batch_end:
            # W̃_t = α_t W̃_{t−1} + S_t from W° at the boundary: linear inside the batch.
            read = [
                s + (as_matrix(r) if d is None else d.exp() * as_matrix(r))
                for r, s, d in zip(self.read_weights, steps, log_decay, strict=True)
            ]
            return A, read
        shaped = [a.reshape(o.shape) for a, o in zip(A, self.A, strict=True)]
        return shaped, self._link(shaped, gates)

    def _step_at_batch_end(
        self,
        j: int,
        batch_position: Tensor,
        slots: dict[str, Weights],
        log_decay: list[Tensor | None],
        gates: dict[str, Tensor],
    ) -> tuple[Weights, Weights]:
        """Return A and W° for ``update_every="batch"``: A changes at the last token of a batch."""
        decays, rates = self.batch_sums
        lr = self._lr(j, self.tokens.phi[:, j])
        decays = [
            as_matrix(s) + (0 if d is None else d) for s, d in zip(decays, log_decay, strict=True)
        ]
        rates = [as_matrix(s) + (1 if e is None else e) for s, e in zip(rates, lr, strict=True)]
        last = (batch_position == self.b).view(-1, 1, 1, 1)
        A: Weights = []
        has_line_search = self.recipe.algorithm.uses_line_search
        means = [r / self.b for r in rates]
        steps = [
            self.recipe.algorithm.batch_step(
                {name: slots[name][i] for name in slots},
                torch.ones_like(r) if has_line_search else r,
            )
            for i, r in enumerate(means)
        ]
        if has_line_search:
            step_length = line_search_length(self, self.W, steps, *batch_weights(self, j))
            steps = [r * step_length * s for r, s in zip(means, steps, strict=True)]
        for i, (a, step) in enumerate(zip(self.A, steps, strict=True)):
            log_a = None if log_decay[i] is None else decays[i]
            moved = self.recipe.retention.advance(as_matrix(a), step, log_a, gates)
            A.append(torch.where(last, moved, as_matrix(a)))
        self.batch_sums = (
            [d.reshape(a.shape) for d, a in zip(decays, self.A, strict=True)],
            [r.reshape(a.shape) for r, a in zip(rates, self.A, strict=True)],
        )
        return A, list(self.W)

    def _offset(self, j: int, batch_position: Tensor) -> Tensor:
        offset = self.tokens.rates["offset"][:, j]
        if offset.dim() == 2:
            return offset
        index = (batch_position - 1).view(-1, 1, 1).expand(-1, offset.shape[1], 1)
        return offset.gather(-1, index).squeeze(-1)

    # -- reading -------------------------------------------------------------------------------

    def run(self, problem: Problem) -> Tensor:
        """Replay the open batch, process the new tokens, and return their outputs."""
        tokens, read_spec = self.tokens, self.recipe.memory.read
        buffered, num_open = tokens.buffered, problem.state.position % self.b
        num_seen = problem.state.host_position
        first = 0 if num_seen is None else buffered - num_seen % self.b
        steps = torch.arange(problem.q.shape[1], device=problem.q.device)
        q_phi = problem.phi(problem.q, "query", problem.state.position[:, None] + steps)
        outputs: list[Tensor] = []
        replay = problem.state.buffer is not None
        for j in range(len(tokens)):
            if j < buffered:
                token_mask = tokens.valid[:, j] & (j >= buffered - num_open)
                # A known host position avoids a synchronisation with the device.
                if replay and j >= first and (num_seen is not None or bool(token_mask.any())):
                    self._advance(j, token_mask)
                continue
            token_mask = tokens.valid[:, j]
            t = j - buffered
            if read_spec.when == "before":
                y = self._read(q_phi[:, t], problem.q[:, t])
                self._advance(j, token_mask)
            else:
                self._advance(j, token_mask)
                y = self._read(q_phi[:, t], problem.q[:, t])
            if read_spec.bonus != 0.0:
                u = tokens.rates["bonus"][:, j]
                u = u if u.dim() == 3 else u.unsqueeze(-1)
                match = (q_phi[:, t] * (u * tokens.phi[:, j]).unsqueeze(2)).sum(-1)  # [B, H, G]
                y = y + match.unsqueeze(-1) * tokens.v[:, j].unsqueeze(2)
            outputs.append(torch.where(token_mask.view(-1, 1, 1, 1), y, 0.0))
        if outputs:
            return torch.stack(outputs, dim=1)
        B, _, H, G, _ = problem.q.shape
        return problem.v.new_zeros(B, 0, H, G, problem.v.shape[-1])

    def _read(self, phi: Tensor, raw: Tensor) -> Tensor:
        return self.read(self.read_weights, phi, raw.to(phi.dtype), self.problem.params)

    def weights_for_read(self, rates: Mapping[str, Tensor], t: int) -> Weights:
        """Return the weights after the replay that a query with these gates reads."""
        if self.recipe.algorithm.reduction == "mean" or not self.recipe.retention.has_link:
            linear = self.recipe.algorithm.update_every != "batch"
            return self.A if linear else self._select_if_open(list(self.W), list(self.A))
        linked = self._link(self.A, _scalars(rates, t))
        if self.recipe.links_at_batch_end or self.recipe.algorithm.update_every == "batch":
            return self._select_if_open(self.read_weights, linked)
        return linked

    def _select_if_open(self, within: Weights, at_boundary: Weights) -> Weights:
        """Return ``within`` for batch elements with an open inner batch, else ``at_boundary``."""
        is_open = (self.count % self.b != 0).view(-1, 1, 1, 1)
        return _select(is_open, within, at_boundary)

    # -- the state -----------------------------------------------------------------------------

    def state(self, problem: Problem) -> State:
        """Return the final state: weights at the start of the open batch, and its tokens."""
        closed = (self.count % self.b == 0).view(-1, 1, 1, 1)
        return problem.final_state(
            weights=tuple(_select(closed, self.A, self.A0)),
            algorithm_state={n: tuple(_select(closed, self.S[n], self.S0[n])) for n in self.S},
        )


def _scalars(rates: Mapping[str, Tensor], j: int) -> dict[str, Tensor]:
    """Return the scalar gates of token j (radius, tau, ...) as ``[B, H, 1, 1]``."""
    return {name: x[:, j, :, None, None] for name, x in rates.items() if x.dim() == 3}


def _select(rows: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> Weights:
    """Return new weights for the selected ``rows [B, 1, 1, 1]`` and old weights for the others."""
    return [
        torch.where(rows.view(-1, *(1,) * (o.dim() - 1)), n.reshape(o.shape), o)
        for n, o in zip(new, old, strict=True)
    ]
