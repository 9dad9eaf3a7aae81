"""Recipes of schema 1: refused by name, and rewritten by results/to_schema_2.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


def gate(**values: Any) -> dict[str, Any]:
    unset = ("source", "unit", "squash", "low", "high", "init", "spread", "rank", "schedule")
    return {**dict.fromkeys(unset), "temperature": 1.0, **values}


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
    message = str(refused.value)
    assert "schema 1" in message and "reads schema 2" in message and "CHANGELOG.md" in message
    assert "\n" not in message


@pytest.mark.parametrize("schema", [1, 3])
def test_another_schema_is_named_before_its_unknown_choices(schema: int) -> None:
    with pytest.raises(rc.RecipeError, match=f"has schema {schema}.*CHANGELOG.md"):
        rc.Recipe.from_dict({"schema": schema, "loss": {"member": "L2"}})


def test_the_script_keeps_the_words_of_fields_that_are_no_quantities(script: ModuleType) -> None:
    probe = {"member": "Probe", "at": "token", "write": "probe", "rate": "token"}
    assert script.converted(probe) == {**probe, "rate": "input"}
    simplex = {"member": "Simplex", "every": "token"}
    assert script.converted(simplex) == {"member": "Simplex", "link_every": "token"}


def test_a_state_of_schema_1_is_refused_with_a_sentence_that_names_the_changelog() -> None:
    recipe = rc.Recipe(algorithm=rc.algorithm.Momentum(lr=0.5, momentum=0.5))
    x = torch.randn(1, 3, 2, 4)
    _, state = rc.recall(recipe, x, x, x)
    assert state is not None
    old = {
        name.replace("algorithm_state", "slots").replace("recipe_id", "written_by"): tensor
        for name, tensor in state.to_dict().items()
    }
    with pytest.raises(
        ValueError, match=r"schema 1, in which 'algorithm_state' was 'slots'.*CHANGE"
    ):
        rc.State.from_dict(old)
    with pytest.raises(ValueError, match=r"'memory\.slots'"):
        rc.LayerState.from_dict({f"memory.{name}": tensor for name, tensor in old.items()})


def test_the_script_rewrites_a_model_with_its_recipe_and_options(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    config = rc.lm.RecollectConfig.from_recipes(
        "titans", vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = rc.lm.RecollectForCausalLM(config)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text("utf-8"))
    del data["engine"]
    recipes = {"titans": {"recipe": TITANS, "options": OPTIONS}}
    old = {**data, "schema": 1, "method": "deep", "recipes": recipes}
    path.write_text(json.dumps(old), "utf-8")
    with pytest.raises(rc.RecipeError, match="has schema 1 and"):
        rc.lm.RecollectForCausalLM.from_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(path)])
    script.main()  # the manifest, too: a changed file is refused
    loaded = rc.lm.RecollectForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.engine == "deep"
    assert loaded.config.recipe("titans") == model.config.recipe("titans")
