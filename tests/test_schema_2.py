"""Recipes of schema 1: refused by name, and rewritten by results/to_schema_2.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import recollect as rc

SCRIPT = Path(__file__).parents[1] / "results" / "to_schema_2.py"

TITANS: dict[str, Any] = {
    "schema": 1,
    "memory": {
        "member": "MLP",
        "depth": 2,
        "expansion": 4,
        "activation": "gelu",
        "residual": True,
        "norm": "layer",
        "biases": False,
        "base": False,
        "read": {"member": "Read", "normalize": "none", "when": "after", "bonus": 0.0},
    },
    "features": {"member": "Identity"},
    "bias": {"member": "L2", "probe": None},
    "context": {"member": "Online"},
    "retention": {"member": "Decay", "per": "head", "when": "after", "rate": "token"},
    "algorithm": {
        "member": "Momentum",
        "batch": 16,
        "lr": "token",
        "momentum": "token",
        "of": "gradient",
        "per": "head",
        "normalize": True,
        "limit": "keys",
    },
}


def gate(**given: Any) -> dict[str, Any]:
    unset = ("source", "unit", "squash", "low", "high", "init", "spread", "rank", "schedule")
    return {**dict.fromkeys(unset), "temperature": 1.0, **given}


OPTIONS: dict[str, Any] = {
    "conv": 4,
    "conv_activation": "silu",
    "qk_norm": "l2",
    "qk": "input",
    "key_dim": None,
    "rope": None,
    "phase": "none",
    "shift": "none",
    "skip": False,
    "output_norm": "rms",
    "output_gate": "silu",
    "gates": {
        "log_decay": gate(init=-0.0010005003335835344, spread=4.0),
        "lr": gate(unit="share", low=0.2, high=2.0, init=1.5),
        "momentum": gate(high=0.9, init=0.3),
        "norm_weight": gate(init=0.7),
    },
    "ties": [],
    "memory_scale": 1.0,
    "last_map": 0.01,
    "anchors": 16,
    "persistent": 0.0,
    "joined": False,
}


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("to_schema_2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_recipe_of_schema_1_is_refused_with_a_sentence_that_names_the_changelog() -> None:
    with pytest.raises(rc.RecipeError) as refused:
        rc.Recipe.from_dict(TITANS)
    said = str(refused.value)
    assert "schema 1" in said and "reads schema 2" in said and "CHANGELOG.md" in said
    assert "\n" not in said


@pytest.mark.parametrize("schema", [1, 3])
def test_another_schema_is_named_before_its_unknown_choices(schema: int) -> None:
    with pytest.raises(rc.RecipeError, match=f"has schema {schema}.*CHANGELOG.md"):
        rc.Recipe.from_dict({"schema": schema, "loss": {"member": "L2"}})


def test_the_script_rewrites_a_recipe_and_its_options(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "titans.json"
    path.write_text(json.dumps({"recipe": TITANS, "options": OPTIONS}, indent=2) + "\n", "utf-8")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(path)])
    script.main()
    written = json.loads(path.read_text("utf-8"))
    titans = rc.zoo.get("titans")
    assert rc.Recipe.from_dict(written["recipe"]) == titans.recipe
    assert rc.LayerOptions.from_dict(written["options"]) == titans.options


def test_the_script_keeps_the_words_of_fields_that_are_no_quantities(script: ModuleType) -> None:
    probe = {"member": "Probe", "at": "token", "write": "probe", "rate": "token"}
    assert script.converted(probe) == {**probe, "rate": "input"}
    simplex = {"member": "Simplex", "every": "token"}
    assert script.converted(simplex) == {"member": "Simplex", "link_every": "token"}
