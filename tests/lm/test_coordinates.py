"""The coordinate check: flat under the rules for width, steep without them or with a wrong rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect as rc

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("typer")

from typer.testing import CliRunner

from recollect.cli import build
from recollect.lm.mup import rules
from recollect.lm.mup.coordinate_check import _slope

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets.*")

WIDTHS = (64, 128, 256)
HYBRID = {"delta": "gated_delta_net", "attention": "softmax_attention"}


TEXT = """A memory is a map from keys to values. What is written at a key is read at a query near to
it, and what nobody asks for is forgotten, a little at every step, until there is room again. The
rate at which it forgets, and the step with which it learns, are made of the token that it reads.
"""


def config(name: Any) -> rc.lm.RecollectConfig:
    return rc.lm.RecollectConfig.from_recipes(
        name,
        vocab_size=128,
        hidden_size=WIDTHS[0],
        num_hidden_layers=2 if isinstance(name, dict) else 1,
        num_attention_heads=WIDTHS[0] // 16,
    )


def batches(steps: int = 3) -> list[Mapping[str, Tensor]]:
    """Return rows of a text, whose tokens have a common part: noise would give n^(−1/2)."""
    rows = torch.tensor([*TEXT.encode()])[: steps * 92].view(steps, 4, 23)
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def check(name: Any, base: int | None, **changes: Any) -> rc.lm.Coordinates:
    stated = {"widths": WIDTHS, "lr": 0.01, "seeds": 1, **changes}
    return rc.lm.check_coordinates(config(name), batches(), base_width=base, **stated)


SLOW = pytest.mark.slow
NAMES = [
    "gated_delta_net",
    *(pytest.param(name, marks=SLOW) for name in ("titans", "softmax_attention", HYBRID)),
]


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_coordinates_are_flat_under_the_rules_alone(name: Any) -> None:
    # A zero-initialised memory gives its gates small gradients at first: more seeds, less noise.
    seeds = 3 if name == "titans" else 1
    mup, standard = check(name, WIDTHS[0], seeds=seeds), check(name, None, seeds=seeds)
    result = {one.name: one for one in mup.coordinates}
    assert mup.flat, [one for one in mup.coordinates if not one.flat]
    steep = {one.name: one for one in standard.coordinates if not one.flat}
    # The embedding shrinks, and matrices learn with the number of channels that they read.
    assert steep["embed_tokens"].size_slope == pytest.approx(-0.5, abs=0.1)
    assert (standard.steepest.change_slope or 0) > 0.5
    assert (steep["lm_head, learned"].change_slope or 0) > 0.3
    assert abs(result["lm_head, learned"].change_slope or 1) < 0.25
    for gate in [name for name in result if ".gates." in name]:
        assert (steep[gate].change_slope or 0) > (result[gate].change_slope or 1) + 0.3


def test_wrong_rule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates at the learning rate of vectors, and a head that learns too little."""
    right = rules.width_rules

    def wrong(*args: Any) -> dict[str, rules.Rule]:
        result = right(*args)
        for name, rule in result.items():
            if ".gates." in name:
                result[name] = replace(rule, rate=1.0)
            if name == "lm_head.weight":
                result[name] = replace(rule, rate=rule.rate**2)
        return result

    monkeypatch.setattr("recollect.lm.mup.rules.width_rules", wrong)
    result = {one.name: one for one in check("gated_delta_net", WIDTHS[0]).coordinates}
    assert not result["gated_delta_net.gates.lr"].flat
    assert not result["gated_delta_net.gates.log_decay"].flat
    assert not result["lm_head, learned"].flat
    assert (result["lm_head, learned"].change_slope or 0) < -0.5


def test_generators_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    def seed_all(seed: int) -> None:
        raise AssertionError("the generators of all accelerators were seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seed_all)
    state = torch.get_rng_state()
    check("gated_delta_net", None, widths=(32, 64))
    assert torch.equal(torch.get_rng_state(), state)


def test_slope_of_a_power() -> None:
    assert _slope({n: 3 * n**0.5 for n in (16, 64, 128)}) == pytest.approx(0.5)
    assert _slope({16: 0.0, 32: 0.0}) is None
    assert _slope({16: 1.0, 32: float("nan")}) == float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (32,)}, "needs two widths or more"),
        ({"widths": (64, 32)}, "ascending"),
        ({"widths": (32, 72)}, "4.5 of width 72"),
    ],
)
def test_uninformative_widths_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check("gated_delta_net", None, **changes)


RUN = """
[model]
recipe = "softmax_attention"
width = 64
depth = 4
heads = 4
[data]
train = ["{text}"]
context = 32
[optimizer]
lr = 0.02
steps = 100
batch = 4
parametrization = "mup"
base_width = 32
[run]
out = "{out}"
"""


def test_command_reports_flat_slopes(tmp_path: Path) -> None:
    text, file, out = tmp_path / "t.txt", tmp_path / "run.toml", tmp_path / "out"
    text.write_text("the memory reads at the query what was written at the key. " * 40)
    file.write_text(RUN.format(text=text, out=out))
    command = ["coordinates", str(file), "--widths", "32,64,128", "--depth", "1"]
    flat = CliRunner().invoke(build(), command)
    assert flat.exit_code == 0, flat.output
    assert "mup parametrization from base width 32: 4 steps at learning rate 0.02" in flat.output
    assert "flat: no slope is steeper than 0.25" in flat.output
    more = ["--parametrization", "standard", "--json", "--figure", str(tmp_path / "drawn")]
    steep = CliRunner().invoke(build(), [*command, *more])
    assert steep.exit_code == 1, steep.output
    result = json.loads(steep.stdout)
    assert result["parametrization"] == "standard" and not result["flat"]
    assert result["widths"] == [32, 64, 128]
    names = [one["name"] for one in result["coordinates"]]
    assert {"embed_tokens", "softmax_attention.qkv", "residual stream", "lm_head"} <= {*names}
    assert (tmp_path / "drawn.svg").exists() and (tmp_path / "drawn.png").exists()
    assert not out.exists()

    for options, message in (
        (["--widths", "a"], "--widths must be numbers such as 64,128,256, not 'a'"),
        (["--parametrization", "ntk"], "Invalid value for '--parametrization'"),
        (["--steps", "0"], "Invalid value for '--steps'"),
    ):
        refused = CliRunner().invoke(build(), ["coordinates", str(file), *options])
        assert refused.exit_code == 2 and message in refused.output
