"""The projection to the range of a norm against the nearest point, by bisection, and in steps."""

from __future__ import annotations

import pytest
import torch
from tests.engines.test_normalized import normal
from torch import Tensor

import recollect as rc
from recollect.choices.memory.norms import project_to_norm_range

V = 32
METHODS = pytest.mark.parametrize("method", ["reference", "deep"])
NORMS = pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
WEIGHTS = {
    "equal": torch.full((V,), 0.7, dtype=torch.float64),
    "trained": 0.2 + 0.8 * torch.rand(V, generator=torch.Generator().manual_seed(0)).double(),
    "of both signs": normal(V, seed=1),
    "some zero": torch.cat([torch.zeros(4), torch.ones(V - 4)]).double(),
    "one weak": torch.cat([torch.tensor([0.02]), torch.ones(V - 1)]).double(),
}

FURTHER = {"trained": 0.25, "one weak": 0.2}
"""Largest distance from d relative to the nearest point, in ‖w‖."""


def solved(w: Tensor, d: Tensor, multiplier: Tensor, centred: bool) -> Tensor:
    """Solve (w² + λ) u + μ = w ⊙ d, Σ u = 0, as one linear system."""
    n = V + centred
    system, right = torch.zeros(n, n, dtype=d.dtype), torch.zeros(n, dtype=d.dtype)
    system[:V, :V] = torch.diag(w**2 + multiplier)
    system[V:, :V] = 1
    system[:V, V:] = 1
    right[:V] = w * d
    return torch.linalg.solve(system, right)[:V]


def nearest(w: Tensor, d: Tensor, centred: bool) -> Tensor:
    """Return the nearest w ⊙ u with ‖u‖² ≤ V, Σ u = 0: λ by bisection, as ‖u‖ falls with λ."""
    low, high = torch.tensor(1e-9).double(), 1e6 * torch.ones(()).double()
    if solved(w, d, low, centred).square().mean() > 1:
        for _ in range(120):
            middle = (low * high).sqrt()
            short = solved(w, d, middle, centred).square().mean() < 1
            low, high = (low, middle) if short else (middle, high)
    return w * solved(w, d, low, centred)


def within_reach(w: Tensor, d: Tensor, centred: bool) -> bool:
    return bool(solved(w, d, torch.zeros((), dtype=d.dtype), centred).norm() < V**0.5)


@NORMS
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("size", [0.1, 0.6, 1.0, 1.5, 2.0, 5.0, 30.0])
def test_projection_is_in_range_and_nearest(name: str, size: float, centred: bool) -> None:
    """The projection lies in the range, and is nearest for equal weights and for inner points."""
    w = WEIGHTS[name]
    for seed in range(4):
        d = size * (normal(V, seed=10 + seed) + 0.5) * w.norm() / V**0.5
        projection, best = project_to_norm_range(d, w, centred=centred), nearest(w, d, centred)
        none = w == 0
        u = torch.where(none, 0.0, projection / torch.where(none, 1.0, w))
        if centred:  # channels without weight also have a u, and get the remainder of the norm
            rest = float(u.sum())
            assert bool(none.any()) or abs(rest) < 1e-9 * V
            u[none] = -rest / none.sum()
        assert u.square().mean() < 1 + 1e-6
        if name == "equal" or (name == "trained" and within_reach(w, d, centred)):
            assert (projection - best).norm() < 1e-6 * w.norm()
        if size == 30.0:
            assert (projection - best).norm() < 1e-2 * w.norm()
        further = (projection - d).norm() - (best - d).norm()
        assert further > -1e-6 * w.norm()
        if name in FURTHER:
            assert further < FURTHER[name] * w.norm()


@NORMS
@pytest.mark.parametrize("size", [0.3, 3.0])
def test_derivatives_by_finite_differences(size: float, centred: bool) -> None:
    d, w = (size * normal(2, 6, seed=3)).requires_grad_(), normal(6, seed=4).requires_grad_()

    def project(d: Tensor, w: Tensor) -> Tensor:
        return project_to_norm_range(d, w, centred=centred)

    assert torch.autograd.gradcheck(project, (d, w))
    assert torch.autograd.gradgradcheck(project, (d, w))


@NORMS
@pytest.mark.parametrize("size", [0.3, 1.2, 8.0])
def test_written_gradient_equals_the_recorded_one(size: float, centred: bool) -> None:
    """The written-out gradient equals the recorded one, also with weights per head."""
    d, w = size * normal(2, 3, 4, V, seed=3), normal(3, 1, V, seed=4)
    leaves, grad_output = [d.requires_grad_(), w.requires_grad_()], normal(2, 3, 4, V, seed=5)
    projection = project_to_norm_range(d, w, centred=centred)
    grads = torch.autograd.grad(projection, leaves, grad_output, retain_graph=True)
    followed = torch.autograd.grad(projection, leaves, grad_output, create_graph=True)
    for one, other in zip(grads, followed, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-12)


@NORMS
@pytest.mark.parametrize("zero", ["away", "weight", "both"])
def test_second_derivatives_at_zero(zero: str, centred: bool) -> None:
    for dtype in (torch.float32, torch.float64):
        d = torch.zeros(3, 5, dtype=dtype) if zero != "weight" else normal(3, 5, seed=5).to(dtype)
        w = torch.zeros(5, dtype=dtype) if zero != "away" else torch.ones(5, dtype=dtype)
        leaves = [d.requires_grad_(), w.requires_grad_()]
        first = torch.autograd.grad(
            project_to_norm_range(d, w, centred=centred).sum(), leaves, create_graph=True
        )
        total = torch.stack([g.square().sum() for g in first]).sum()
        assert all(g.isfinite().all() for g in torch.autograd.grad(total, leaves))


def step(w: Tensor, b: Tensor, z: Tensor, v: Tensor, method: str) -> Tensor:
    """Return Δz of one normalised step at rate 1 for a key at which a linear map returns z."""
    recipe = rc.Recipe(
        memory=rc.memory.MLP(depth=1, norm="layer", residual=False),
        algorithm=rc.algorithm.GradientDescent(lr=1.0, normalized_steps=True),
    )
    k = normal(V, seed=6)
    W = torch.outer(z, k) / k.square().sum()
    params = {"norm_weight": w[None], "norm_bias": b[None]}
    key = k.view(1, 1, 1, V)
    _, state = rc.recall(
        recipe, key, key, v.view(1, 1, 1, V), params=params, initial_memory=[W[None]], engine=method
    )
    assert state is not None
    return (state.weights[0][0, 0] - W) @ k


@METHODS
@pytest.mark.parametrize("size", [10.0, 100.0])
@pytest.mark.parametrize("name", ["trained", "of both signs"])
def test_no_step_at_the_nearest_point(name: str, size: float, method: str) -> None:
    """If z lies along the centred w ⊙ (v − b), LN is as near to a long value as possible.

    Steps are longest here if the error includes the part outside the range of the norm.
    """
    w, b = WEIGHTS[name], 0.1 * normal(V, seed=7)
    v = size * (normal(V, seed=8) + 1)
    best = nearest(w, v - b, True) / w  # the direction of the nearest point
    for turned, minimum, maximum in ((0.0, 0.0, 0.05), (1.0, 0.2, 2.0)):
        z = best + turned * normal(V, seed=9) * best.norm() / V**0.5
        moved = step(w, b, z - z.mean(), v, method)
        assert minimum <= float(moved.norm() / z.norm()) < maximum


@METHODS
def test_common_part_of_channels_is_not_counted(method: str) -> None:
    """LN does not depend on the mean over channels, so a step under equal weights has mean zero."""
    w, b, z = WEIGHTS["equal"], torch.zeros(V).double(), normal(V, seed=9)
    v = 20 * normal(V, seed=8)
    plain, more = (step(w, b, z, v + x, method) for x in (0.0, 50.0))
    assert plain.norm() > 0.3 * z.norm()
    torch.testing.assert_close(plain, more, rtol=1e-4, atol=0)  # ε |g|² is added to the gain
