"""Chunks of a memory without momentum, window, probe or decay over values: the common case.

Linear attention, RetNet, Mamba-2, GLA, DeltaNet, Gated DeltaNet, Longhorn and leaky LMS end here.
What a group of chunks needs is written in ordinary differentiable operations; `chunk_recurrence`
carries the state through them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.common.coefficients import cumulated, decay_matrix, shift
from recollect.engines.common.decayed_products import absorbable, decayed_gram
from recollect.engines.linear.chunk_recurrence import Pieces, Plan, run_chunks
from recollect.engines.linear.inputs import LinearProblem

__all__ = ["chunk_simple"]

GROUP = 4096
"""Rows (tokens · heads · batch) of a group on a CPU, about 1 MB per intermediate of 64 channels."""


def chunk_simple(p: LinearProblem, chunk: int) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, H, G, V]`` and A after all tokens, for T ≥ 1.

    Args:
        p: without momentum, window, probe and decay over values.
        chunk: tokens of a chunk, at most T.
    """
    (B, T, H, G, _), v = p.q.shape, p.v
    layout = _Layout(B=B, H=H, G=G, C=chunk, affine=p.affine, before=p.before)
    # Elsewhere than on a CPU, launches cost more than memory: one group.
    rows = GROUP if p.q.device.type == "cpu" else B * H * T
    size = chunk * max(1, rows // (B * H * chunk))
    plan = Plan(
        prepare=layout.prepare,
        groups=[(start, min(start + size, T)) for start in range(0, T, size)],
        outputs=lambda: v.new_empty(B, T, H, G, v.shape[-1]),
        finish=layout.finish,
        unfinish=layout.unfinish,
    )
    tokens = (p.q, p.k, v, p.lr)
    tokens = tokens if p.log_decay is None else (*tokens, p.log_decay)
    y, Z = run_chunks(plan, p.A0.mT.flatten(0, 1), *tokens)
    return y, Z.unflatten(0, (B, H)).mT


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Tokens ``[B, t, H, ...]`` as chunks ``[n, B·H, C, ...]``, the last padded with zeros."""

    B: int
    H: int
    G: int
    C: int
    affine: tuple[float, float]
    before: bool

    def split(self, x: Tensor) -> Tensor:
        missing = -x.shape[1] % self.C
        if missing:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
        x = x.unflatten(1, (x.shape[1] // self.C, self.C))  # [B, n, C, H, ...]
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)

    def finish(self, y: Tensor, tokens: int) -> Tensor:
        """``[n, B·H, C·G, V] -> [B, t, H, G, V]``."""
        y = y.unflatten(1, (self.B, self.H)).unflatten(3, (self.C, self.G))
        return y.permute(1, 0, 3, 2, 4, 5).flatten(1, 2)[:, :tokens]

    def unfinish(self, y: Tensor) -> Tensor:
        """The way back."""
        return self.split(y).flatten(2, 3).contiguous()

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lr: Tensor,
        log_decay: Tensor | None = None,
    ) -> Pieces:
        """The pieces of one group.

        While chunks decay by less than e^−30, cumulated decays are absorbed on both sides of every
        product; otherwise, and where the host would wait to know it, coefficients are differences
        whose exponents are never positive.
        """
        a, b = self.affine
        # Products copy what is not contiguous, each time: copy once.
        Q = self.split(q).flatten(2, 3).contiguous()  # [n, BH, C G, K]
        k = self.split(k).contiguous()
        c = self.split(v) if b == 1 else b * self.split(v)
        c = c.contiguous() if a == 0 else c
        X = None if a == 0 else (k if a == 1 else a * k)
        eta = self.split(lr).unsqueeze(-1)  # [n, BH, C, 1]
        if log_decay is None:
            D = k * eta
            system = None if X is None else X @ D.mT
            return Pieces(system, self._causal(Q @ D.mT), X, Q, D, c, None)
        logs = self.split(log_decay)
        logs = logs if log_decay.dim() == 4 else logs.unsqueeze(-1)
        total = cumulated(logs, 2)  # [n, BH, C, K or 1]
        reach = total.exp().to(c.dtype)
        end = reach[..., -1:, :]
        seen = total if self.before else shift(total, 2, 0.0)
        if X is None:
            Xs = None
        else:
            Xs = X * (reach if self.before else seen.exp().to(c.dtype))
        Qs = Q * self._queries(reach)
        if absorbable(total):
            back = (-total).exp().to(c.dtype)
            D = k * (eta * back)
            system = None if Xs is None else Xs @ D.mT
            return Pieces(system, self._causal(Qs @ D.mT), Xs, Qs, D * end, c, end.mT)
        D = k * eta
        to_end = D * (total[..., -1:, :] - total).exp().to(c.dtype)
        if log_decay.dim() == 4:
            scores = decayed_gram(Q, total, D, total, strict=False)
            system = None if X is None else decayed_gram(X, seen, D, total, strict=True)
        else:
            P = decay_matrix(total.squeeze(-1), c.dtype)
            scores = (Q @ D.mT) * self._queries(P)
            system = None
            if X is not None:
                earlier = shift(P, -2, 0.0)
                earlier = earlier * logs.exp().to(c.dtype) if self.before else earlier
                system = (X @ D.mT) * earlier
        return Pieces(system, scores, Xs, Qs, to_end, c, end.mT)

    def _queries(self, x: Tensor) -> Tensor:
        """Numbers per token spread over its G queries."""
        return x if self.G == 1 else x.repeat_interleave(self.G, dim=-2)

    def _causal(self, scores: Tensor) -> Tensor:
        """Zero where the written token is later than the reading one."""
        if self.G == 1:
            return scores.tril_()  # a fresh product, which autograd does not keep
        return scores * self._queries(scores.new_ones(self.C, self.C).tril())
