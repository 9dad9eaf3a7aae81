"""Every preset on a CUDA device: the CPU's results, and host waits within the budgets.

``make test-gpu`` runs these; without a device they are skipped. ``RECOLLECT_TEST_DEVICE=cpu`` runs
them on the CPU, with which all results are equal: this shows that they run, and `test_it_can_fail`
that they detect an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from tests.gpu import parity
from tests.gpu.parity import DEVICE, IS_AVAILABLE, MISSING, compare
from tests.gpu.test_budgets import BUDGETS, CANCELS, FEWER, LOOSE, NEAR, SLOW
from torch import nn

import recollect as rc

BITS = {"float32": 23, "tf32": 10}
needs_device = pytest.mark.skipif(not IS_AVAILABLE, reason=MISSING)


def deviations(name: str, precision: str, measured: dict[str, float]) -> list[str]:
    """Return a line for every number that is too far from the CPU's."""
    recipe = rc.zoo.get(name).recipe
    exact = (
        precision == "float32" or rc.select_engine(recipe).engine.float32_reason(recipe) is not None
    )
    y, gradient = (NEAR["y"], NEAR["gradient"]) if exact else FEWER[BITS[precision]]
    maximum = {"y": y, "gradient": gradient, "decoded": y if precision == "float32" else 2 * y}
    if name in CANCELS and not exact:
        del maximum["gradient"]
    return [
        f"{name}, {precision}: {what} {measured[what]:.1e} from the CPU's, at most {near:.0e}"
        for what, near in maximum.items()
        if not measured.get(what, 0.0) <= max(near, LOOSE.get(name, 0.0))
    ]


def waited(name: str, lines: dict[str, list[str]]) -> list[str]:
    """Return a line for every stretch with more host waits than its budget."""
    budget = BUDGETS["presets"][name]
    return [
        f"{name} {part}: the host waited {len(sites)} times, budget {sum(budget[part][1:])}: "
        f"{', '.join(dict.fromkeys(sites))}"
        for part, sites in lines.items()
        if len(sites) > sum(budget[part][1:])
    ]


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize("name", rc.zoo.names())
def test_preset(name: str, precision: str, record_property: Callable[[str, object], None]) -> None:
    if precision != "float32" and name in SLOW:
        pytest.skip("solves anew at every token, seconds each: compared in float32 alone")
    result = compare(name, precision=precision)
    for what, value in result.items():
        record_property(what, json.dumps(value))
    problems = deviations(name, precision, result) + waited(name, result["waits"])
    assert not problems, "\n".join(problems)


@pytest.mark.gpu
@needs_device
@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU never waits")
def test_wait_is_detected() -> None:
    waits = parity.Waits()
    x = torch.ones(3, device=DEVICE)
    waits.run("asks", lambda: x.sum().item())
    waits.run("sends", lambda: torch.tensor([1.0, 2.0], device=DEVICE))
    waits.run("adds", lambda: x + 1)
    assert [bool(waits.lines[name]) for name in ("asks", "sends", "adds")] == [True, True, False]


def test_it_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose first weight is off by a hundredth is detected in all three numbers."""

    def wrong(layer: nn.Module) -> nn.Module:
        moved = copied(layer)
        with torch.no_grad():
            next(moved.parameters()).mul_(1 + 1e-2)
        return moved

    copied = parity.moved
    monkeypatch.setattr(parity, "DEVICE", torch.device("cpu"))
    assert not deviations("gated_delta_net", "float32", compare("gated_delta_net"))
    monkeypatch.setattr(parity, "moved", wrong)
    lines = deviations("gated_delta_net", "float32", compare("gated_delta_net"))
    assert len(lines) == 3
    sites = {"decode": ["layer.py:7"], "forward": []}
    assert waited("gated_delta_net", sites) == [
        "gated_delta_net decode: the host waited 1 times, budget 0: layer.py:7"
    ]
    assert not waited("mesa_net", {"forward": ["solve.py:3"] * 9})
