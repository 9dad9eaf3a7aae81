"""AM theorem 1, without training: the rounding kernel follows any swaps, the linear one none."""

from __future__ import annotations

import pytest
import torch

import recollect as rc
from recollect.tasks import Exchange, low_coherence_keys, swap_stream
from recollect.tasks.exchange import welch

SIZES = [(64, 36), (256, 128)]
GD, Matrix = rc.algorithm.GradientDescent, rc.memory.Matrix


def tracker(kernel: rc.features.Kernel) -> rc.Recipe:
    """u_t = v_t − Σ κ(k_i, k_t) u_i, y_t = Σ κ(k_i, q_t) u_i."""
    return rc.Recipe(features=kernel, algorithm=GD(lr=1.0))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x[None, :, None]


def wrong(
    recipe: rc.Recipe, stream: Exchange, method: str = "auto", **options: object
) -> tuple[int, int]:
    """Return the fraction of wrong answers along the way, and at the end."""
    y, state = rc.recall(
        recipe, heads(stream.q), heads(stream.k), heads(stream.v), engine=method, **options
    )
    requested = (y[0, :, 0].argmax(-1) != stream.answer_index).sum()
    assert state is not None
    end = rc.read(recipe, heads(stream.keys), state=state)[0, :, 0]
    return int(requested), int((end.argmax(-1) != stream.final_assignment).sum())


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_keys_are_spread(n: int, d: int) -> None:
    """Below the theorem's 1/8, and more of them than dimensions."""
    keys = low_coherence_keys(n, d)
    assert keys.shape == (n, d)
    gram = keys @ keys.T
    torch.testing.assert_close(gram.diagonal(), torch.ones(n).double(), atol=1e-12, rtol=0)
    assert (gram - torch.eye(n)).abs().max() < 1 / 8


@pytest.mark.parametrize(
    ("n", "d"),
    [(128, 56), (192, 64), pytest.param(512, 128, marks=pytest.mark.slow), (5, 5), (3, 8)],
)
def test_other_separated_keys(n: int, d: int) -> None:
    """By descent, or without it if they fit."""
    keys = low_coherence_keys(n, d)
    gram = keys @ keys.T
    assert keys.shape == (n, d)
    torch.testing.assert_close(gram.diagonal(), torch.ones(n).double(), atol=1e-12, rtol=0)
    spread = float((gram - torch.eye(n)).abs().max())
    assert welch(n, d) - 1e-12 <= spread < 1 / 8


def test_the_welch_bound() -> None:
    """64 keys need 33 dimensions, and (64, 36) is as good as it can be."""
    assert welch(64, 32) > 1 / 8 > welch(64, 33)
    assert welch(64, 36) == pytest.approx(1 / 9)
    with pytest.raises(ValueError, match="no keys are known"):
        low_coherence_keys(64, 32)


def test_questions_about_the_first_key() -> None:
    stream = swap_stream(6, 8, 30, torch.Generator().manual_seed(0), ask="first")
    row, swapped = list(range(6)), stream.k[6:]
    assert set(stream.query_index.tolist()) == {0}
    assert set(stream.answer_index[:6].tolist()) == {0}
    for t in range(30):
        a, b = (int(i) for i in (swapped[t].argmax(), swapped[t].argmin()))
        row[a], row[b] = row[b], row[a]
        assert int(stream.answer_index[6 + t]) == row[0]
    assert stream.final_assignment.tolist() == row


@pytest.mark.parametrize("method", ["reference", "kernel"])
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_rounding_follows_400_swaps(n: int, d: int, method: str) -> None:
    """Float32, no error along the way and none at the end; the outputs are whole numbers."""
    stream = swap_stream(n, d, 400, torch.Generator().manual_seed(n))
    with torch.no_grad():
        assert wrong(tracker(rc.features.Round()), stream, method) == (0, 0)
        y, _ = rc.recall(
            tracker(rc.features.Round()), heads(stream.q), heads(stream.k), heads(stream.v)
        )
    assert torch.equal(y[0, :, 0], torch.nn.functional.one_hot(stream.answer_index, n).float())


@pytest.mark.parametrize(("n", "d"), SIZES)
def test_the_linear_kernel_fails(n: int, d: int) -> None:
    stream = swap_stream(n, d, 400, torch.Generator().manual_seed(n), dtype=torch.float64)
    with torch.no_grad():
        _, end = wrong(tracker(rc.features.LinearKernel()), stream)
    assert end > n // 2
