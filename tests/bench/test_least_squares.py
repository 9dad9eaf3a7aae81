"""What the least-squares suite times is what it says, and the trade-off has the ends it must."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect.bench.suites import least_squares as bench

SIZES = (1, 40, 2, 8, 8)


def test_the_loop_and_the_engine_compute_the_same() -> None:
    looped = bench.step_case("loop", SIZES).make()()
    q, k, v = bench._draw(SIZES)
    recipe = rc.Recipe(context=rc.context.Prefix(), algorithm=rc.algorithm.LeastSquares())
    assert isinstance(looped, Tensor)
    torch.testing.assert_close(looped.squeeze(-1).transpose(1, 2), rc.recall(recipe, q, k, v)[0])


def test_conjugate_gradients_are_timed_over_every_token() -> None:
    y, _ = bench.conjugate_case("cg", SIZES, 30).make()()  # type: ignore[misc]
    assert y.shape == (1, 40, 2, 8)


def test_the_trade_off(tmp_path: Path) -> None:
    points = {p.name: p for p in bench.trade_off(T=64, K=8)}
    steps = [points[f"{j} CG steps"] for j in (1, 2, 3, 4, 6)]
    assert all(a.error > b.error for a, b in itertools.pairwise(steps))
    assert all(a.flops < b.flops for a, b in itertools.pairwise(steps))
    exact = points["least squares in float32"]
    assert exact.error < 1e-5
    assert exact.flops < points["4 CG steps"].flops
    assert exact.recall < 0.1 * points["linear attention"].recall
    pytest.importorskip("matplotlib")
    bench.save_trade_off(tmp_path)
    assert len(json.loads((tmp_path / "trade-off.json").read_text())["points"]) == len(points)
    assert (tmp_path / "trade-off.png").stat().st_size > 1000
