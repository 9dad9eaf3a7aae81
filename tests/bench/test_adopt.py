"""The suite of published layers compares layers that compute equal outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recollect.benchmarks.cases import adopt
from recollect.benchmarks.harness import run
from recollect.benchmarks.suites import SUITES, Shape, build_cases, compute_ratios

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


def test_adopted_layers_equal_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer, (model, sizes) in adopt.LAYERS.items():
        monkeypatch.setitem(adopt.LAYERS, layer, (model, {**sizes, **SMALL[model]}))
    suite, shape = SUITES["adopt"], Shape(T=8)
    cases = build_cases(suite, shape)
    errors = suite.errors(shape)
    assert errors.keys() == {case.name for case in cases if case.name.endswith("adopted")}
    assert 0 < max(errors.values()) < 1e-5
    result = run(cases, baseline=suite.baseline, rounds=1, min_seconds=0.0, device="cpu")
    assert len(result.timings) == 16
    assert len(compute_ratios(suite, result)) == 8


def test_stored_times_are_within_the_limits_and_those_of_the_page() -> None:
    """Prefill takes at most the original's time, a token at most 1.2 times."""
    stored = json.loads((ROOT / "results" / "bench" / "adopt-cpu.json").read_text("utf-8"))
    assert stored["suite"] == "adopt" and stored["environment"]["threads"] == 1
    assert max(stored["errors"].values()) < 1e-5
    assert list(stored["ratios"]) == [label for label, _, _ in SUITES["adopt"].ratios]
    for label, ratio in stored["ratios"].items():
        assert ratio <= (1.0 if "prefill" in label else 1.2), label
    page = (ROOT / "results" / "README.md").read_text("utf-8")
    for layer in adopt.LAYERS:
        row = re.search(rf"^\| `{layer}` \|(.*)\|$", page, re.MULTILINE)
        assert row is not None, layer
        printed = [float(cell) for cell in row[1].split("|")[-2:]]
        for phase, ratio in zip(("prefill", "token"), printed, strict=True):
            assert ratio == round(stored["ratios"][f"{layer}, {phase}: adopted / original"], 2)
