"""ATLAS table 1's five properties, as its caption defines them, against the presets of the zoo.

* dynamic decay: the decay depends on the token. A fixed rate is not dynamic (RetNet), and an
  erasure along the key is not a decay (DeltaNet, Longhorn).
* deep memory: the read passes weights through a nonlinearity.
* nonlinear capacity: a matrix memory stores as many pairs as there are features (ATLAS
  propositions 1 and 2), so a map adds capacity beyond O(d_k) if their number grows faster than
  the key.
* locally optimal: second-order information about the tokens: exact solutions and Muon. One step
  on one association, implicit or normalised, has none (ATLAS section 5 calls Atlas the first).
* flexible context: a step uses more than the newest association (the Omega rule, section 3.2; and
  attention, which stores all).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect.explanation.naming import PROPERTIES, properties

DECAY, DEEP, CAPACITY, OPTIMAL, CONTEXT = PROPERTIES
ATTENTION = {CAPACITY, OPTIMAL, CONTEXT}

ROWS: dict[str, set[str]] = {
    "softmax_attention": ATTENTION,
    "qk_norm_attention": ATTENTION,
    "sliding_window_attention": ATTENTION,
    "linear_attention": set(),
    "normalized_linear_attention": set(),
    "performer": set(),
    "rfa": set(),
    "cosformer": set(),
    "hedgehog": set(),
    "based": {CAPACITY},
    "rebased": {CAPACITY},
    "dijiang": set(),
    "dpfp": set(),
    "polysketchformer": {CAPACITY},
    "retnet": set(),
    "lightning_attention": set(),
    "dfw": {DECAY},
    "gla": {DECAY},
    "gateloop": {DECAY},
    "hgrn2": {DECAY},
    "lru": set(),
    "mamba": {DECAY},
    "mamba2": {DECAY},
    "rwkv6": {DECAY},
    "mlstm": {DECAY},
    "delta_net": set(),
    "momentum_delta_net": set(),
    "gated_delta_net": {DECAY},
    "leaky_lms": {DECAY},
    "longhorn": set(),
    "nlms": set(),
    "rwkv7": {DECAY},
    "delta_product": set(),
}

MLP, Decay, Poly = rc.memory.MLP(), rc.retention.Decay(), rc.features.Polynomial()
Momentum, Muon, Window = rc.algorithm.Momentum, rc.algorithm.Muon, rc.context.Window
# The deep rows of the same table, written out.
DEEP_ROWS: dict[str, tuple[rc.Recipe, set[str]]] = {
    "ttt": (rc.Recipe(memory=MLP), {DEEP}),
    "titans_minus": (rc.Recipe(memory=MLP, retention=Decay), {DECAY, DEEP}),
    "titans": (rc.Recipe(memory=MLP, retention=Decay, algorithm=Momentum()), {DECAY, DEEP}),
    "memora": (
        rc.Recipe(memory=MLP, retention=rc.retention.Simplex(decay=Decay)),
        {DECAY, DEEP},
    ),
    "dla": (
        rc.Recipe(memory=MLP, features=Poly, bias=rc.bias.DotProduct(), retention=Decay),
        {DECAY, DEEP, CAPACITY},
    ),
    "omega_net": (
        rc.Recipe(memory=MLP, features=Poly, context=Window(size=4), retention=Decay),
        {DECAY, DEEP, CAPACITY, CONTEXT},
    ),
    "atlas": (
        rc.Recipe(
            memory=MLP, features=Poly, context=Window(size=4), retention=Decay, algorithm=Muon()
        ),
        set(PROPERTIES),
    ),
}


def properties_of(recipe: rc.Recipe) -> set[str]:
    return {name for name, value in properties(recipe).items() if value}


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_the_defined_properties(name: str) -> None:
    assert properties_of(rc.zoo.get(name).recipe) == ROWS[name]


@pytest.mark.parametrize("name", DEEP_ROWS)
def test_deep_rows_have_the_properties_of_the_table(name: str) -> None:
    recipe, expected = DEEP_ROWS[name]
    assert properties_of(recipe) == expected


def test_command_prints_properties(capsys: pytest.CaptureFixture[str]) -> None:
    testing = pytest.importorskip("typer.testing")
    from recollect.cli import build

    run = testing.CliRunner().invoke(build(), ["zoo", "--json"])
    assert run.exit_code == 0, run.output
    result = {row["name"]: row["properties"] for row in json.loads(run.output)}
    assert result.keys() == {*rc.zoo.names(), *rc.zoo.names(kind="hybrid")}
    for name, expected in ROWS.items():
        assert list(result[name]) == list(PROPERTIES)
        assert {key for key, value in result[name].items() if value} == expected
    wide = {"COLUMNS": "200"}
    table = (
        testing.CliRunner().invoke(build(), ["zoo", "--family", "feature_maps"], env=wide).output
    )
    (based,) = (line for line in table.splitlines() if line.split()[:1] == ["based"])
    assert "capacity" in based
    (performer,) = (line for line in table.splitlines() if line.split()[:1] == ["performer"])
    assert "capacity" not in performer


def test_properties_follow_from_structure() -> None:
    """A user's map with every pair of channels has the capacity of its features."""

    class Pairs(rc.features.Features):
        def dim(self, K: int) -> int:
            return K * K

        def phi(
            self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor
        ) -> Tensor:
            return torch.einsum("...i,...j->...ij", x, x).flatten(-2)

    result = rc.member(type("Pairs_of_a_user", (Pairs,), {}))
    assert properties_of(rc.Recipe(features=result())) == {CAPACITY}
    # Twice the features for a key of twice the length is the capacity of a longer key.
    assert properties_of(rc.Recipe(features=rc.features.PositiveRandom(features=4096))) == set()
