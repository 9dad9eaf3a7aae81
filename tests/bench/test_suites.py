"""The suites of `recollect bench` time the recipes that they name, on the requested device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recollect as rc
from recollect.benchmarks.cases import baselines, deep
from recollect.benchmarks.cases import recall as recall_cases
from recollect.benchmarks.cases.recall import differentiable, initial_arguments, recall_case
from recollect.benchmarks.harness import run
from recollect.benchmarks.suites import MEASURED_RECIPES, SUITES, Shape, build_cases

SMALL = Shape(T=16, H=2, K=4, V=4)
RESULTS = Path(__file__).parents[2] / "results"


def build(suite: str, shape: Shape, *only: str) -> dict[str, Any]:
    return {case.name: case for case in build_cases(SUITES[suite], shape, only)}


def reference(recipe: rc.Recipe, arguments: dict[str, Any]) -> torch.Tensor:
    return rc.recall(recipe, **arguments, engine="reference")[0]


def test_cases_equal_their_recipe() -> None:
    cases = build("linear", SMALL)
    recipe = rc.zoo.get("gated_delta_net").recipe
    arguments = initial_arguments(recipe, SMALL, requires_grad=True)
    expected = reference(recipe, arguments)
    # float32, 16 tokens: rounding only.
    torch.testing.assert_close(cases["gated_delta_net"].make()(), expected, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(expected, differentiable(arguments), torch.ones_like(expected))
    computed = cases["gated_delta_net, fwd+bwd"].make()()
    assert isinstance(computed, tuple)
    for x, y in zip(computed, gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_matrix_memories_run_at_their_sizes() -> None:
    """A decay per entry has 16 key channels."""
    shape = replace(SMALL, T=12, K=8, V=8)
    cases = build("matrix", shape)
    names = [name for name in cases if "," not in name]
    assert list(cases) == [label for name in names for label in (name, f"{name}, fwd+bwd")]
    for name in names:
        recipe = rc.zoo.get(name).recipe
        decay = recipe.retention.decay
        K = 16 if decay is not None and decay.per == "entry" else 8
        expected = reference(recipe, initial_arguments(recipe, replace(shape, K=K)))
        torch.testing.assert_close(cases[name].make()(), expected, rtol=1e-3, atol=1e-4)
        gradients = cases[f"{name}, fwd+bwd"].make()()
        assert isinstance(gradients, tuple)
        assert all(x is None or torch.isfinite(x).all() for x in gradients)


def test_the_suite_of_matrix_memories_has_the_published_cases() -> None:
    """Presets that are added to the zoo do not remove cases with results."""
    published = {
        timing["name"]
        for name in ("matrix-cpu", "matrix-lifted-cpu")
        for timing in json.loads((RESULTS / "bench" / f"{name}.json").read_text())["timings"]
    }
    assert published <= {spec.name for spec in SUITES["matrix"].cases}


def test_loops_equal_their_recipes() -> None:
    shape = Shape(T=40, H=2, K=8, V=8)
    loops = {
        baselines.delta_former_loop: rc.zoo.get("delta_former").recipe,
        baselines.sherman_morrison_loop: rc.Recipe(
            context=rc.context.Prefix(), algorithm=rc.algorithm.LeastSquares()
        ),
    }
    for loop, recipe in loops.items():
        expected = reference(recipe, initial_arguments(recipe, shape))
        torch.testing.assert_close(loop(shape, name="loop").make()(), expected)


@pytest.mark.parametrize("suite", ["rows", "least_squares", "deep"])
def test_cases_compute_on_the_requested_device(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the device "meta" have no numbers, and no generator."""

    def generator(device: str, seed: int) -> torch.Generator:
        assert device == "meta"
        return torch.Generator().manual_seed(seed)

    monkeypatch.setattr(recall_cases, "_generator", generator)
    devices = {}
    for spec in SUITES[suite].cases:
        if spec.name.startswith("mesa_net"):
            continue  # its number of operations depends on its inputs
        outputs = spec.build(replace(SMALL, device="meta"), name=spec.name).make()()
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        devices[spec.name] = {x.device.type for x in tensors if isinstance(x, torch.Tensor)}
    assert set(map(frozenset, devices.values())) == {frozenset({"meta"})}, devices


def test_titans_pytorch_runs_on_the_requested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(torch.nn.Linear):
        store_norm = retrieve_norm = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
            return (super().forward(x),)

    monkeypatch.setattr(deep, "_neural_memory", lambda batch, chunk, dim: Module(dim, dim))
    monkeypatch.setattr(deep, "_recall", lambda recipe, module, x: module(x)[0])
    suite = SUITES["titans"]
    cases = build_cases(suite, replace(suite.shape, device="meta"))
    assert len(cases) == 12
    for case in cases:
        outputs = case.make()()
        x = outputs[0] if isinstance(outputs, tuple) else outputs
        assert isinstance(x, torch.Tensor)
        assert (x.shape, x.device.type) == ((2, 256, 64), "meta")


def test_only_the_selected_cases_are_built() -> None:
    assert list(build("matrix", SMALL, "gla")) == [
        *("gla", "gla, fwd+bwd", "gated_delta_net", "gated_delta_net, fwd+bwd")
    ]
    with pytest.raises(ValueError, match="this suite has no 'glla'; it has linear_attention, "):
        build("matrix", SMALL, "glla")


def test_large_cases_are_left_out_of_the_suite_of_presets() -> None:
    assert set(build("presets", SMALL)) == set(MEASURED_RECIPES)
    suite = replace(SUITES["presets"], max_flops=1e5)
    cases = build_cases(suite, SMALL)
    assert 0 < len(cases) < len(MEASURED_RECIPES)
    assert all((case.flops or 0) <= 1e5 for case in cases)


def test_rates_of_plain_steps_are_divided_by_the_inner_batch() -> None:
    def largest_rate(recipe: rc.Recipe) -> float:
        return initial_arguments(recipe, SMALL)["gates"]["lr"].max().item()

    plain, normalized = deep.mlp_recipe(16), rc.zoo.get("titans").recipe
    assert largest_rate(plain) <= 0.9 / 16 < 0.5 < largest_rate(normalized)


def test_only_executed_steps_of_a_solver_are_counted() -> None:
    shape = Shape(T=96, H=2, K=16, V=16)
    case = recall_case("mesa_net", shape, name="mesa_net")
    call = case.make()
    with rc.record_solver() as reports:
        call()
    (report,) = reports
    assert 2 < report.iterations < 30  # rc.cost, which does not get the inputs, counts 30
    recipe = rc.zoo.get("mesa_net").recipe

    def price(steps: int) -> rc.Cost:
        algorithm = rc.algorithm.Preconditioned(steps=steps)
        return rc.cost(recipe.replace(algorithm=algorithm), T=96, H=2, K=16, V=16)

    assert case.flops == price(report.iterations).total
    both = recall_case("mesa_net", shape, name="both", backward=True)
    call = both.make()
    with rc.record_solver() as reports:
        call()
    forward, backward = (report.iterations for report in reports)
    expected = price(forward + backward + 3)
    assert both.flops == expected.total + 2 * expected.forward_flops["read"]


def test_no_case_is_faster_than_the_ceiling() -> None:
    """A fraction above 1 would count operations that are not executed."""
    shape = Shape(T=1024, H=2)
    cases = [
        recall_case(name, shape, name=f"{name}, {backward}", backward=backward)
        for name in ("gated_delta_net", "rls", "mesa_net")
        for backward in (False, True)
    ]
    result = run(cases, baseline="rls, False", rounds=3, warmup=1, device="cpu")
    assert {t.name: t.share for t in result.timings if not 0 < (t.share or 0) <= 1} == {}


def test_no_stored_result_is_faster_than_the_ceiling() -> None:
    stored = sorted((RESULTS / "bench").glob("*.json"))
    assert stored
    for path in stored:
        for timing in json.loads(path.read_text(encoding="utf-8")).get("timings", []):
            assert (timing["share"] or 0) <= 1, f"{path.name}: {timing['name']}"
