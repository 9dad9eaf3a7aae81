"""FTRL and learning–retaining are the same sequence (MIRAS 3.2), and gradient descent is one."""

from __future__ import annotations

import pytest
import torch

import recollect as rc
from recollect.theory import ftrl, learning_retaining, linearized, memory_losses

T, K, V = 6, 3, 2


def pairs(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(T, K, generator=g, dtype=torch.float64)
    return k, torch.randn(T, V, generator=g, dtype=torch.float64)


def squares(w: torch.Tensor) -> torch.Tensor:
    return w.square().sum() / 2


def quartic(w: torch.Tensor) -> torch.Tensor:
    """Strictly convex, and no quadratic."""
    return w.square().sum() / 2 + w.pow(4).sum() / 4 + (w.exp() - w).sum()


BIASES = {
    "L2": rc.bias.L2(),
    "dot product": rc.bias.DotProduct(),
    "l3": rc.bias.Lp(p=3.0, eps=1e-2),
}


@pytest.mark.parametrize("regularizer", [squares, quartic])
@pytest.mark.parametrize("name", BIASES)
def test_the_two_viewpoints_agree(name: str, regularizer) -> None:
    """To 1e-8: both minima have a gradient below 1e-12."""
    k, v = pairs()
    losses = memory_losses(lambda p, y: BIASES[name].loss(p, y, {}), k, v)
    start = torch.zeros(V * K, dtype=torch.float64)
    one = ftrl(losses, regularizer, eta=0.7, start=start)
    two = learning_retaining(losses, regularizer, eta=0.7, start=start)
    torch.testing.assert_close(one, two, atol=1e-8, rtol=1e-8)
    assert (one[1:] - one[:-1]).abs().max() > 1e-2, "the memory moves"


def test_another_retention_is_another_sequence() -> None:
    """Without the old losses in the divergence, learning–retaining forgets more than FTRL."""
    k, v = pairs()
    losses = memory_losses(lambda p, y: rc.bias.L2().loss(p, y, {}), k, v)
    start = torch.zeros(V * K, dtype=torch.float64)
    full = ftrl(losses, squares, eta=0.7, start=start)
    W, near = start, []
    for key, value in zip(k, v, strict=True):  # argmin ½‖Wk − v‖² + ‖W − W'‖²/2η: Longhorn
        old = W.view(V, K)
        step = 0.7 / (1 + 0.7 * float(key @ key))
        W = (old - step * torch.outer(old @ key - value, key)).flatten()
        near.append(W)
    assert (full[-1] - near[-1]).abs().max() > 1e-2
    torch.testing.assert_close(full[0], near[0], atol=1e-9, rtol=0)  # from 0 they start equal


def test_least_squares_is_ftrl_of_exact_losses() -> None:
    """The exact solver of the library: ridge 1/η over the full past."""
    k, v = pairs()
    losses = memory_losses(lambda p, y: rc.bias.L2().loss(p, y, {}), k, v)
    result = ftrl(losses, squares, eta=0.5, start=torch.zeros(V * K, dtype=torch.float64))
    recipe = rc.Recipe(context=rc.context.Prefix(), algorithm=rc.algorithm.LeastSquares(ridge=2.0))
    q = torch.eye(K, dtype=torch.float64)
    for t in range(1, T + 1):
        _, state = rc.recall(recipe, *(x[None, :t, None] for x in (k, k, v)))
        read = rc.read(recipe, q[None, :, None], state=state)[0, :, 0]  # rows are W e_i
        torch.testing.assert_close(read.T.flatten(), result[t - 1], atol=1e-8, rtol=1e-8)


def test_gradient_descent_is_ftrl_of_linearized_losses() -> None:
    """MIRAS: with W_0 = 0, online gradient descent is FTRL of slopes and ½‖W‖²."""
    k, v = pairs()
    recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.3))
    losses = memory_losses(lambda p, y: recipe.bias.loss(p, y, {}), k, v)
    walked = [torch.zeros(V * K, dtype=torch.float64)]
    for t in range(1, T + 1):
        _, state = rc.recall(recipe, *(x[None, :t, None] for x in (k, k, v)))
        assert state is not None
        walked.append(state.weights[0].flatten())
    slopes = [linearized(loss, at) for loss, at in zip(losses, walked, strict=False)]
    result = ftrl(slopes, squares, eta=0.3, start=walked[0])
    torch.testing.assert_close(result, torch.stack(walked[1:]), atol=1e-9, rtol=1e-9)


def test_losses_without_a_minimum_are_refused() -> None:
    k, v = pairs()
    losses = memory_losses(lambda p, y: rc.bias.L2().loss(p, y, {}), k, v)
    start = torch.zeros(V * K, dtype=torch.float64)
    with pytest.raises(ValueError, match="eta must be above 0"):
        ftrl(losses, squares, eta=0.0, start=start)
    with pytest.raises((ValueError, torch.linalg.LinAlgError)):
        ftrl(losses, lambda w: -w.pow(4).sum() + w.sum(), eta=1.0, start=start + 1)
