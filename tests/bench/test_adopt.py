"""The suite of published layers compares layers that compute equal outputs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from recollect.benchmarks.harness import run
from recollect.benchmarks.suites import SUITES, Shape, ratios
from recollect.benchmarks.suites import adopt as suite

ROOT = Path(__file__).parents[2]

SMALL: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "hidden_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "kimi_linear": {"hidden_size": 32, "linear_num_heads": 4, "linear_head_dim": 8},
    "mamba2": {
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
    },
    "mamba": {"hidden_size": 32, "state_size": 8},
}


def test_adopted_layers_compute_what_the_originals_do(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tuple(
        dataclasses.replace(layer, sizes={**layer.sizes, **SMALL[layer.model]})
        for layer in suite.LAYERS
    )
    monkeypatch.setattr(suite, "LAYERS", layers)
    adopt, shape = SUITES["adopt"], Shape(T=8)
    cases = adopt.cases(shape)
    errors = adopt.errors(shape)
    assert errors.keys() == {case.name for case in cases if case.name.endswith("adopted")}
    assert 0 < max(errors.values()) < 1e-5
    result = run(cases, baseline=adopt.baseline, rounds=1, min_seconds=0.0, device="cpu")
    assert len(result.timings) == 16
    assert len(ratios(adopt, shape, result)) == 8


def test_stored_times_are_within_the_limits_and_those_of_the_page() -> None:
    """Prefill takes at most the original's time, a token at most 1.2 times."""
    stored = json.loads((ROOT / "results" / "bench" / "adopt-cpu.json").read_text("utf-8"))
    assert stored["suite"] == "adopt" and stored["environment"]["threads"] == 1
    assert max(stored["errors"].values()) < 1e-5
    expected = SUITES["adopt"].pairs(Shape())
    assert list(stored["ratios"]) == [what for what, _, _ in expected]
    for what, ratio in stored["ratios"].items():
        assert ratio <= (1.0 if "prefill" in what else 1.2), what
    page = (ROOT / "results" / "README.md").read_text("utf-8")
    for layer in suite.LAYERS:
        row = re.search(rf"^\| `{layer.layer}` \|(.*)\|$", page, re.MULTILINE)
        assert row is not None, layer.layer
        printed = [float(cell) for cell in row[1].split("|")[-2:]]
        for phase, ratio in zip(suite.PHASES, printed, strict=True):
            what = f"{layer.layer}, {phase}: adopted / original"
            assert ratio == round(stored["ratios"][what], 2)
