"""The limit of the context: S*, convergence of DeltaNet's memory, and softmax's last updates."""

from __future__ import annotations

import torch

import recollect as rc
from recollect.theory import best_memory, normalized_update_norms, relative_distance

D = torch.float64


def weights(heads: int, size: int, width: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    shape = (heads, size, width)
    return tuple(torch.randn(shape, generator=g, dtype=D) / width**0.5 for _ in range(2))


def inputs(T: int, width: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=g, dtype=D) / width**0.5
    x = torch.randn(T, width, generator=g, dtype=D) @ (torch.eye(width, dtype=D) + mix / 2)
    return x / width**0.5  # steps of 0.3 stay below 2/‖k‖²


def steps(T: int, heads: int, rate: float) -> dict[str, torch.Tensor]:
    return {"lr": torch.full((1, T, heads), rate, dtype=D)}


def test_the_best_memory_is_a_minimum() -> None:
    """AM 46 against autograd on the mean loss of the sample whose moment is the argument."""
    for heads, size in ((1, 4), (3, 2)):
        w_k, w_v = weights(heads, size, 4)
        x = inputs(50, 4)
        S = best_memory(w_k, w_v, x.T @ x / 50).requires_grad_()
        k, v = (torch.einsum("hkd,td->htk", w, x) for w in (w_k, w_v))
        loss = (k @ S.mT - v).square().mean()
        (gradient,) = torch.autograd.grad(loss, S)
        assert gradient.abs().max() < 1e-12


def test_best_memory_of_one_head_is_unique() -> None:
    """AM 47; and AM 48, its form with pseudo-inverses, is not AM 46 when heads are small."""
    w_k, w_v = weights(1, 4, 4)
    one, two = (x.T @ x for x in (inputs(60, 4, seed=1), inputs(60, 4, seed=2)))
    expected = w_v @ torch.linalg.inv(w_k)
    for sigma in (one, two):
        torch.testing.assert_close(best_memory(w_k, w_v, sigma), expected, atol=1e-9, rtol=1e-9)
    w_k, w_v = weights(1, 2, 4)
    assert (best_memory(w_k, w_v, one) - best_memory(w_k, w_v, two)).abs().max() > 0.05
    pinv = torch.linalg.pinv(w_k)
    printed = w_v @ one @ pinv @ w_k @ torch.linalg.inv(one) @ pinv
    assert (printed - best_memory(w_k, w_v, one)).abs().max() > 0.05


def test_delta_net_converges_with_one_head_only() -> None:
    T = 3000
    x = inputs(T, 4)
    at = [100, 300, 1000, 2000, 3000]
    w_k, w_v = weights(1, 4, 4)
    w_k = torch.linalg.qr(w_k).Q  # no slow direction in addition to those of the inputs
    one = relative_distance(rc.Recipe(), x, w_k, w_v, at=at, gates=steps(T, 1, 0.3))[:, 0]
    assert one[0] > 1e-3 > 1e-4 > one[1] > one[2]
    assert one[2:].max() < 1e-12, "nothing but rounding is left"
    heads = relative_distance(rc.Recipe(), x, *weights(4, 2, 4), at=at, gates=steps(T, 4, 0.3))
    assert heads.shape == (5, 4)
    assert heads[2:].min() > 0.01, "an error that does not go away"
    assert heads[0].mean() < 1.5
    small = relative_distance(rc.Recipe(), x, *weights(4, 2, 4), at=at, gates=steps(T, 4, 0.01))
    assert small[-1].mean() < heads[-1].mean(), "smaller steps wander less"


def test_pieces_equal_one_call() -> None:
    x = inputs(60, 4)
    all_at = relative_distance(rc.Recipe(), x, *weights(1, 4, 4), at=[60], gates=steps(60, 1, 0.2))
    pieces = relative_distance(
        rc.Recipe(), x, *weights(1, 4, 4), at=[7, 30, 60], gates=steps(60, 1, 0.2)
    )
    torch.testing.assert_close(all_at[-1], pieces[-1])


def test_softmax_updates_by_finite_features() -> None:
    """The memory has these norms: exp's features up to order 39 of keys of size 1."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(30, 1, generator=g, dtype=D)
    v = torch.randn(30, 3, generator=g, dtype=D)
    orders = torch.arange(40, dtype=D)
    phi = (k / 2**0.5) ** orders / torch.lgamma(orders + 1).exp().sqrt()  # φ(x)·φ(y) = exp(xy/2)
    S = torch.zeros(3, 40, dtype=D)
    expected = []
    for t in range(1, 31):
        new = (t - 1) / t * S + torch.outer(v[t - 1], phi[t - 1]) / t
        expected.append((new - S).norm())
        S = new
    result = normalized_update_norms(k, v, temperature=2.0)
    torch.testing.assert_close(result, torch.stack(expected), atol=1e-9, rtol=1e-7)


def test_softmax_updates_vanish_like_one_over_t() -> None:
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(800, 8, generator=g, dtype=D) for _ in range(2))
    norms = normalized_update_norms(k, v, temperature=8**0.5)
    t = torch.arange(1, 801, dtype=D)
    early, late = ((norms * t)[a:b].mean() for a, b in ((20, 100), (700, 800)))
    assert 0.8 < float(early / late) < 1.25
    # Without the denominator updates do not shrink: their norm is ‖v‖ √κ(k, k).
    plain = (v.norm(dim=-1) * (k.square().sum(-1) / 8**0.5 / 2).exp())[700:].mean()
    assert norms[700:].mean() < 0.01 * plain
