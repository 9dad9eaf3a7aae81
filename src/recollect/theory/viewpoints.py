"""Two equivalent definitions of a memory: MIRAS section 3, proposition 3.2.

Follow the regularised leader (FTRL) minimises the sum of all losses and a regulariser,

    W_t = argmin Σ_{i≤t} ℓ_i(W) + R(W)/η

and learning–retaining (LR) minimises the new loss and a distance to the last memory,

    W_t = argmin ℓ_t(W) + Ret_t(W, W_{t−1})

Both sequences are equal if Ret_t is the Bregman divergence of h_t = Σ_{i<t} ℓ_i + R/η and h_t is
strictly convex. With linearised losses and R = ½‖W‖² both are gradient descent from 0. Newton steps
compute the minima, so that tests compare the two numerically.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Loss", "ftrl", "learning_retaining", "linearized", "memory_losses"]

Loss = Callable[[Tensor], Tensor]
"""A loss of flat weights ``[n]``, differentiable twice.

Examples:
    >>> def loss(w: torch.Tensor) -> torch.Tensor:  # a rc.theory.Loss with its minimum at 1
    ...     return 0.5 * (w - 1).square().sum()
    >>> torch.func.grad(loss)(torch.zeros(2))
    tensor([-1., -1.])
"""


def ftrl(losses: Sequence[Loss], regularizer: Loss, *, eta: float, start: Tensor) -> Tensor:
    """Return the FTRL sequence W_1 … W_T, ``[T, n]``.

    Args:
        losses: ℓ_1 … ℓ_T.
        regularizer: R, strictly convex.
        eta: η > 0.
        start: Start of the first search ``[n]``; the minimum does not depend on it.

    Cost: T searches of a few solves of n × n.

    Raises:
        ValueError: η ≤ 0, or Newton steps do not converge.

    Examples:
        >>> start = torch.zeros(2, dtype=torch.float64)
        >>> targets = torch.eye(2, dtype=torch.float64)
        >>> losses = [lambda w, z=z: 0.5 * (w - z).square().sum() for z in targets]
        >>> half = lambda w: 0.5 * w.square().sum()
        >>> rc.theory.ftrl(losses, half, eta=1.0, start=start)
        tensor([[0.5000, 0.0000],
                [0.3333, 0.3333]], dtype=torch.float64)
    """
    _check(eta)
    sequence = [start]
    for t in range(1, len(losses) + 1):

        def total(w: Tensor, past: Sequence[Loss] = losses[:t]) -> Tensor:
            return torch.stack([loss(w) for loss in past]).sum() + regularizer(w) / eta

        sequence.append(_minimum(total, sequence[-1]))
    return torch.stack(sequence[1:])


def learning_retaining(
    losses: Sequence[Loss], regularizer: Loss, *, eta: float, start: Tensor
) -> Tensor:
    """Return the LR sequence with Ret_t the Bregman divergence of h_t, ``[T, n]``.

    D_h(W, W') = h(W) − h(W') − ⟨∇h(W'), W − W'⟩. W_0 is the minimum of R.

    Args:
        losses, regularizer, eta, start: See `ftrl`.

    Raises:
        ValueError: η ≤ 0, or Newton steps do not converge.

    Examples:
        >>> start = torch.zeros(2, dtype=torch.float64)
        >>> targets = torch.eye(2, dtype=torch.float64)
        >>> losses = [lambda w, z=z: 0.5 * (w - z).square().sum() for z in targets]
        >>> half = lambda w: 0.5 * w.square().sum()
        >>> first = rc.theory.learning_retaining(losses, half, eta=1.0, start=start)
        >>> torch.allclose(first, rc.theory.ftrl(losses, half, eta=1.0, start=start))
        True
    """
    _check(eta)

    def prior(w: Tensor) -> Tensor:
        return regularizer(w) / eta

    sequence = [_minimum(prior, start)]
    for t, new_loss in enumerate(losses):
        last = sequence[-1]

        def h(w: Tensor, past: Sequence[Loss] = losses[:t]) -> Tensor:
            return sum((loss(w) for loss in past), prior(w))

        slope = _gradient(h, last)
        level = h(last)

        def total(
            w: Tensor,
            h: Loss = h,
            new_loss: Loss = new_loss,
            last: Tensor = last,
            slope: Tensor = slope,
            level: Tensor = level,
        ) -> Tensor:
            retained = h(w) - level - slope @ (w - last)
            return new_loss(w) + retained

        sequence.append(_minimum(total, last))
    return torch.stack(sequence[1:])


def memory_losses(
    bias_loss: Callable[[Tensor, Tensor], Tensor], k: Tensor, v: Tensor
) -> list[Loss]:
    """Return ℓ_t(W) = loss(W k_t, v_t) of a matrix memory, one per token.

    Args:
        bias_loss: Loss of a prediction and a value ``[V]``, such as
            ``lambda p, v: recipe.bias.loss(p, v, {})``.
        k: Keys ``[T, K]``.
        v: Values ``[T, V]``.

    Examples:
        >>> k, v = torch.randn(2, 3, 4, dtype=torch.float64)
        >>> losses = rc.theory.memory_losses(lambda p, value: rc.bias.L2().loss(p, value, {}), k, v)
        >>> nothing = torch.zeros(16, dtype=torch.float64)
        >>> len(losses), bool(losses[0](nothing) == 0.5 * v[0].square().sum())
        (3, True)
    """

    def make(key: Tensor, value: Tensor) -> Loss:
        return lambda w: bias_loss(w.view(len(value), len(key)) @ key, value).sum()

    return [make(key, value) for key, value in zip(k, v, strict=True)]


def linearized(loss: Loss, at: Tensor) -> Loss:
    """Return W ↦ ⟨∇ℓ(at), W − at⟩, with which FTRL and ½‖W‖² are gradient descent.

    Args:
        loss: ℓ of a weight vector ``[n]``.
        at: Weight vector ``[n]`` at which the loss is linearised.

    Examples:
        >>> at = torch.tensor([1.0, 2.0])
        >>> flat = rc.theory.linearized(lambda w: 0.5 * w.square().sum(), at)
        >>> flat(at), flat(at + 1)
        (tensor(0.), tensor(3.))
    """
    slope = _gradient(loss, at)
    return lambda w: slope @ (w - at)


def _check(eta: float) -> None:
    if eta <= 0:
        raise ValueError(f"eta must be above 0, got {eta}")


def _gradient(f: Loss, w: Tensor) -> Tensor:
    with torch.enable_grad():
        at = w.detach().requires_grad_()
        return torch.autograd.grad(f(at), at)[0]


def _hessian(f: Loss, w: Tensor) -> Tensor:
    with torch.enable_grad():
        hessian = torch.autograd.functional.hessian(f, w.detach())
    assert isinstance(hessian, Tensor)  # a tuple for several arguments
    return hessian


def _minimum(f: Loss, start: Tensor) -> Tensor:
    """Return the minimum by Newton's method with halved steps, to rounding error."""
    w = start.detach().clone()
    for _ in range(100):
        slope = _gradient(f, w)
        if float(slope.abs().max()) < 1e-12 * max(1.0, float(w.abs().max())):
            return w
        step = torch.linalg.solve(_hessian(f, w), slope)
        value, length = f(w), 1.0
        # Near the minimum rounding hides the decrease of f, and the full step is right.
        is_near = float((slope @ step).abs()) < 1e-9 * max(1.0, float(value.abs()))
        while not is_near and f(w - length * step) > value and length > 1e-10:
            length /= 2
        candidate = w - length * step
        if torch.equal(candidate, w) or length <= 1e-10:
            break
        w = candidate
    if float(_gradient(f, w).abs().max()) > 1e-8 * max(1.0, float(w.abs().max())):
        raise ValueError("Newton steps did not converge: use a strictly convex, smooth regularizer")
    return w
