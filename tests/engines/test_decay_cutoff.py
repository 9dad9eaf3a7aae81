"""Keys are skipped only if they have decayed to zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect.engines.kernel.pieces import DecayCutoff

FOX = rc.zoo.get("fox").recipe


def dense(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Softmax over q·k/√K + Σ_{i<j≤t} log α_j, one query at a time (FoX, eq. 3)."""
    total, rows = log_decay.cumsum(1), []
    for t in range(q.shape[1]):
        bias = (total[:, t : t + 1] - total[:, : t + 1]).transpose(1, 2)  # [B, H, t + 1]
        logits = torch.einsum("bhk,bnhk->bhn", q[:, t], k[:, : t + 1]) / q.shape[-1] ** 0.5
        rows.append(torch.einsum("bhn,bnhv->bhv", (logits + bias).softmax(-1), v[:, : t + 1]))
    return torch.stack(rows, dim=1)


def draw(T: int, size: float, decay: float, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, T, 2, 4, generator=g, dtype=torch.float64) for _ in range(3))
    logs = -decay * torch.rand(2, T, 2, generator=g, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (size * q, size * k, v, logs)]


@pytest.mark.parametrize("decay", [0.6, 3.0, 40.0])
@pytest.mark.parametrize("size", [1.0, 12.0])
def test_equals_all_keys(decay: float, size: float) -> None:
    """Also with logits so large that a distant key outweighs its decay."""
    T = 301
    q, k, v, logs = draw(T, size, decay, torch.float64)
    name = FOX.gates()[0].name
    y, _ = rc.recall(FOX, q, k, v, {name: logs})
    want = dense(q, k, v, logs)
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-10)
    grad_output = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    result = torch.autograd.grad(y, (q, k, v, logs), grad_output)
    for mine, theirs in zip(
        result, torch.autograd.grad(want, (q, k, v, logs), grad_output), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_skipped_keys() -> None:
    """A key is skipped if no query of the piece can give it ε^2.5 of its softmax."""
    q = torch.ones(1, 1, 600, 4)
    of_key = torch.arange(600.0)[None, :, None]  # each token decays the past by e^−1
    cutoff = DecayCutoff.of(of_key, q, q, scale=0.5, by_length=0.0)
    assert 2 * 0.5 * 4 + 39 < cutoff.furthest < 2 * 0.5 * 4 + 40
    pieces = [(slice(0, 256), slice(0, 256)), (slice(256, 600), slice(0, 600))]
    shortened = cutoff.shorten(pieces, torch.arange(600))
    assert shortened == [pieces[0], (pieces[1][0], slice(256 - int(cutoff.furthest), 600))]


def test_long_sequences_stay_accurate_in_float32() -> None:
    q, k, v, logs = (x.detach() for x in draw(700, 1.0, 0.4, torch.float32))
    name = FOX.gates()[0].name
    y, _ = rc.recall(FOX, q, k, v, {name: logs})
    want = dense(*(x.double() for x in (q, k, v, logs)))
    assert float((y.double() - want).norm() / want.norm()) < 2e-6
