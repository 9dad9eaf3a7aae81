"""What the least-squares suite times is what it says, and the trade-off has the ends it must."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect.benchmarks.harness import run
from recollect.benchmarks.suites import least_squares as bench
from recollect.benchmarks.suites.calls import Shape, recall_case

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


def test_only_steps_that_were_taken_are_counted() -> None:
    shape = Shape(T=96, H=2, K=16, V=16)
    case = recall_case("mesa_net", "mesa_net", shape)
    call = case.make()
    with rc.record_solver() as reports:
        call()
    (report,) = reports
    assert 2 < report.iterations < 30  # rc.cost, which sees no inputs, counts 30
    recipe = rc.zoo.get("mesa_net").recipe

    def stepped(steps: int) -> rc.Cost:
        algorithm = rc.algorithm.Preconditioned(steps=steps)
        return rc.cost(recipe.replace(algorithm=algorithm), T=96, H=2, K=16, V=16)

    assert case.flops == stepped(report.iterations).total
    both = recall_case("mesa_net", "both", shape, backward=True)
    call = both.make()
    with rc.record_solver() as reports:
        call()
    forward, backward = (report.iterations for report in reports)
    price = stepped(forward + backward + 3)
    assert both.flops == price.total + 2 * price.forward_flops["read"]


def test_nothing_is_faster_than_the_ceiling() -> None:
    """A share above 1 counts operations that nobody made."""
    shape = Shape(T=1024, H=2)
    names = ("gated_delta_net", "rls", "mesa_net")
    cases = [recall_case(name, name, shape) for name in names]
    cases += [recall_case(name, f"{name}, fwd+bwd", shape, backward=True) for name in names]
    result = run(cases, baseline="rls", rounds=3, warmup=1, device="cpu")
    assert {t.name: t.share for t in result.timings if not 0 < (t.share or 0) <= 1} == {}


def test_no_result_that_is_kept_is_above_the_ceiling() -> None:
    kept = sorted((Path(__file__).parents[2] / "results" / "bench").glob("*.json"))
    assert kept
    for path in kept:
        for timing in json.loads(path.read_text(encoding="utf-8")).get("timings", []):
            assert (timing["share"] or 0) <= 1, f"{path.name}: {timing['name']}"


@pytest.mark.slow
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
