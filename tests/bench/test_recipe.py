"""`rc.bench`: one recipe next to Gated DeltaNet and SDPA."""

from __future__ import annotations

import importlib
import json
import statistics
from typing import Any

import pytest
import torch

import recollect as rc

one_recipe = importlib.import_module("recollect.benchmarks.recipe")
TINY = {"K": 8, "V": 4, "H": 2, "T": 16, "B": 2}
PASSES, COLUMNS = ("forward", "training", "decode"), ("recipe", "gated_delta_net", "SDPA")


def test_times_of_every_pass_next_to_both_peers() -> None:
    recipe = rc.Recipe(bias=rc.bias.Huber())
    finished: list[tuple[int, int]] = []
    timed = rc.bench(
        recipe, **TINY, rounds=3, progress=lambda done, total: finished.append((done, total))
    )
    assert finished == [(1, 3), (2, 3), (3, 3)]
    data = json.loads(json.dumps(timed.to_dict()))
    seconds = {one["name"]: one["seconds"] for one in data["timings"]}
    assert set(seconds) == {f"{of}, {name}" for of in COLUMNS for name in PASSES}
    for name in PASSES:
        for peer in COLUMNS[1:]:
            rounds = zip(seconds[f"recipe, {name}"], seconds[f"{peer}, {name}"], strict=True)
            ratio = statistics.median(a / b for a, b in rounds)
            assert timed.ratio(name, peer) == ratio
            assert data["ratios"][f"{name}: recipe / {peer}"] == ratio
        assert timed.seconds(name) == statistics.median(seconds[f"recipe, {name}"])
    assert rc.Recipe.from_dict(data["recipe"]) == recipe
    assert data["shape"] == {**TINY, "dtype": "torch.float32", "device": "cpu"}
    lines = str(timed).split("\n")
    assert lines[0] == "Recipe(bias=Huber())"
    assert [line.split()[0] for line in lines[2:5]] == list(PASSES)
    assert "B = 2, T = 16, H = 2, K = 8, V = 4, float32; medians over 3" in lines[-2]
    assert data["environment"]["commit"] in lines[-1]
    page = timed._repr_html_()
    assert all(f">{name}</th>" in page for name in COLUMNS)


def test_decoding_continues_from_the_final_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, int | None, bool]] = []
    real = one_recipe.recall

    def recall(recipe: rc.Recipe, q: torch.Tensor, *args: Any, **options: Any) -> Any:
        state = options.get("state")
        at = None if state is None else int(state.position[0])
        calls.append((q.shape[1], at, torch.is_grad_enabled()))
        return real(recipe, q, *args, **options)

    monkeypatch.setattr(one_recipe, "recall", recall)
    rc.bench("deep_transformer", **{**TINY, "V": 8}, rounds=1)
    assert set(calls) == {(16, None, False), (1, 16, False)}


def test_the_function_is_not_hidden_by_a_module() -> None:
    importlib.import_module("recollect.benchmarks.harness")
    assert callable(rc.bench)
    assert rc.bench is one_recipe.bench


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("delta_nat", {}, "no architecture named 'delta_nat'; did you mean delta_net"),
        ("titans_mac", {}, "several recipes in one layer"),
        (7, {}, "bench takes an rc.Recipe"),
        ("titans", {"V": 4}, "K = V"),
        ("delta_net", {"T": 0}, "T must be a whole number >= 1, not 0"),
        ("delta_net", {"rounds": 1.5}, "rounds must be a whole number >= 1"),
        ("delta_net", {"device": "tpu"}, "device 'tpu' is not here: torch sees cpu"),
    ],
)
def test_refusals(recipe: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        rc.bench(recipe, **{**TINY, **options})
    assert "\n" not in str(refused.value)
