"""The fused walk's own source on a simulated cluster, against the definition in float64.

Products of bfloat16 operands with float32 sums are off by some 2⁻⁹ each; inputs are numbers that
bfloat16 holds, so that this is all. Without the residual, which is the query itself, an output is
within 1e-2 of its length, as are states.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.simulator.run import simulated, unnoticed
from torch import Tensor

import recollect as rc

NEAR = 1e-2
PLACES = (
    "begin",
    "hidden units",
    "prediction",
    "error",
    "delta",
    "shares",
    "moved",
    "read",
    "end",
)

Inputs = dict[str, Any]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulator")


def plain(activation: str = "silu", b: int = 16, **choices: Any) -> rc.Recipe:
    """A memory without momentum and measured steps."""
    return rc.Recipe(
        memory=rc.memory.MLP(activation=activation, **choices),
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.GradientDescent(batch_size=b),
    )


def titans(b: int = 16, **choices: Any) -> rc.Recipe:
    return rc.Recipe(
        memory=rc.memory.MLP(**choices),
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.Momentum(batch_size=b, normalized_steps=True),
    )


def by_keys(*, momentum: bool = True) -> rc.Recipe:
    """What `titans` and `titans_minus` are without a norm."""
    kind = rc.algorithm.Momentum if momentum else rc.algorithm.GradientDescent
    return titans().replace(
        algorithm=kind(batch_size=16, normalized_steps=True, batch_overlap="measured")
    )


def drawn(recipe: rc.Recipe, T: int, *, B: int = 1, H: int = 1, D: int = 64) -> Inputs:
    """Arguments of `rc.recall`; keys, queries and values are numbers of bfloat16."""
    g = torch.Generator().manual_seed(T)
    q, k, v = torch.randn(3, B, T, H, D, generator=g).bfloat16().float()
    q, k = (torch.nn.functional.normalize(x, dim=-1).bfloat16().float() for x in (q, k))
    each = torch.rand(3, B, T, H, generator=g)
    gates = {"lr": 0.05 * each[0], "log_decay": -0.05 * each[1], "momentum": 0.9 * each[2]}
    init = [torch.randn(B, H, *s, generator=g) * s[1] ** -0.5 for s in recipe.memory.shapes(D, D)]
    if not isinstance(recipe.algorithm, rc.algorithm.Momentum):
        del gates["momentum"]
    if recipe.retention.decay is None:
        del gates["log_decay"]
    return {"q": q, "k": k, "v": v, "gates": gates, "initial_memory": init}


def told(recipe: rc.Recipe, x: Inputs, **more: Any) -> tuple[Tensor, rc.State]:
    """What the definition says, in float64."""
    wide = {name: x[name].double() for name in ("q", "k", "v") if name in x}
    gates = {name: gate.double() for name, gate in x["gates"].items()}
    state = more.pop("state", None)
    init = None if state is not None else [w.double() for w in x["initial_memory"]]
    y, after = rc.recall(
        recipe, **wide, gates=gates, initial_memory=init, state=state, engine="reference", **more
    )
    assert after is not None
    return y, after


def walked(recipe: rc.Recipe, x: Inputs, **more: Any) -> tuple[Tensor, rc.State]:
    with torch.no_grad():
        y, after = rc.recall(recipe, **x, engine="fused", **more)
    assert after is not None
    return y, after


def far(found: Tensor, said: Tensor) -> float:
    return float((found.double() - said).norm() / said.norm())


def worst(
    recipe: rc.Recipe, x: Inputs, found: tuple[Tensor, rc.State], said: tuple[Tensor, rc.State]
) -> float:
    """The largest error of outputs (what is read beside the residual) and of the state."""
    (y, state), (yy, told_state) = found, said
    own = x["q"].double() if recipe.memory.residual else 0.0
    errors = [far(y.double() - own, yy - own)]
    errors += map(far, state.weights, told_state.weights)
    for name, slot in told_state.algorithm_state.items():
        errors += map(far, state.algorithm_state[name], slot)
    # NaN is larger than everything.
    return max(float("inf") if e != e else e for e in errors)


CASES = {
    "titans, a batch open": (titans(), 75),
    "silu": (plain("silu"), 48),
    "64 tokens": (titans(b=64), 150),
}
SLOW = {
    "relu": (plain("relu"), 64),
    "gelu by tanh, no residual": (plain("gelu_tanh", residual=False), 32),
    "half the width": (titans(expansion=2), 40),
    "its own width": (titans(expansion=1), 40),
    "three times": (titans(expansion=3), 40),
    "plain, once": (plain("silu", expansion=1), 40),
    "inner product": (
        rc.Recipe(
            memory=rc.memory.MLP(),
            bias=rc.bias.DotProduct(),
            algorithm=rc.algorithm.Momentum(batch_size=16),
        ),
        40,
    ),
    "32 tokens": (titans(b=32), 80),
    "32 tokens, silu": (plain("silu", b=32), 80),
    "64 tokens, silu": (plain("silu", b=64), 150),
    "64 tokens, momentum, no shares": (
        rc.Recipe(
            memory=rc.memory.MLP(activation="gelu_tanh", residual=False),
            algorithm=rc.algorithm.Momentum(batch_size=64),
        ),
        150,
    ),
    "64 tokens, shares, no momentum": (
        rc.Recipe(
            memory=rc.memory.MLP(activation="relu", expansion=3),
            algorithm=rc.algorithm.GradientDescent(batch_size=64, normalized_steps=True),
        ),
        150,
    ),
    "64 tokens, its own width": (titans(b=64, expansion=1), 150),
    "64 tokens, half the width": (plain("gelu", b=64, expansion=2), 150),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_a_walk_is_the_definition(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, T = (CASES | SLOW)[case]
    x = drawn(recipe, T, H=2 if case in CASES else 1)
    said = told(recipe, x)
    for seed in range(2):
        with simulated(monkeypatch, folder, seed=seed) as ran:
            found = walked(recipe, x)
        assert len(ran) == 1
        assert worst(recipe, x, found, said) < NEAR


@pytest.mark.slow
def test_a_walk_of_wide_heads_is_the_definition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recipe, T in (
        (titans(expansion=2), 40),
        (plain("gelu", expansion=4), 40),
        (titans(expansion=4), 40),  # 16 blocks
        (titans(b=32, expansion=3), 70),  # 12
        (titans(b=64, expansion=2), 150),
        (titans(b=64, expansion=4), 150),
        (plain("gelu", b=64, expansion=4), 150),
    ):
        x = drawn(recipe, T, D=128)
        with simulated(monkeypatch, folder) as ran:
            found = walked(recipe, x)
        assert len(ran) == 1
        assert worst(recipe, x, found, told(recipe, x)) < NEAR


def test_a_walk_goes_on_where_another_engine_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven tokens by the definition, of an open batch, then thirty by the walk, then the rest."""
    recipe = titans()
    x = drawn(recipe, 60)
    y, kept = told(recipe, x)

    def cut(start: int, stop: int, **more: Any) -> Inputs:
        part = {name: x[name][:, start:stop] for name in ("q", "k", "v")}
        gates = {name: gate[:, start:stop] for name, gate in x["gates"].items()}
        return {**part, "gates": gates, **more}

    first = rc.recall(recipe, **cut(0, 7, initial_memory=x["initial_memory"]), engine="reference")
    with simulated(monkeypatch, folder) as ran, torch.no_grad():
        second = rc.recall(recipe, **cut(7, 37, state=first[1]), engine="fused")
        third = rc.recall(recipe, **cut(37, 60, state=second[1]), engine="fused")
    assert len(ran) == 2 and third[1] is not None
    whole = torch.cat([first[0], second[0], third[0]], dim=1)
    assert worst(recipe, x, (whole, third[1]), (y, kept)) < NEAR


def test_rows_that_end_early_keep_their_own_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 40, 33, 16 and 3 tokens, padded to 40; what the padding holds has no effect."""
    recipe, lengths = titans(), torch.tensor([40, 33, 16, 3])
    x = drawn(recipe, 40, B=4)
    mask = (torch.arange(40) < lengths[:, None]).long()
    y, kept = told(recipe, x, attention_mask=mask)
    for name in ("k", "v"):
        x[name] = torch.where(mask[..., None, None].bool(), x[name], 7.0)
    with simulated(monkeypatch, folder):
        found, state = walked(recipe, x, attention_mask=mask)
    there = mask.bool()[..., None, None]
    own = torch.where(there, x["q"], 0.0).double()
    assert far(found.double() * there - own, y * there - own) < NEAR
    for a, b in zip(state.weights, kept.weights, strict=True):
        for row in range(4):
            assert far(a[row], b[row]) < NEAR
    assert float(found[~mask.bool()].abs().max()) == 0


def missed(
    recipe: rc.Recipe, T: int, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> set[str]:
    """Barriers that can be left out, after so many crossings, without changing a digit."""
    x = drawn(recipe, T)

    def digits() -> list[Tensor]:
        y, state = walked(recipe, x)
        return [y, *state.tensors()]

    return unnoticed(digits, dict(enumerate(PLACES)), folder, monkeypatch, after=after)


def test_every_barrier_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(titans(), 48, folder, monkeypatch, after=0) == set()


@pytest.mark.slow
def test_every_barrier_is_needed_later_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory holds what was there a batch or two ago, and not NaN."""
    once = {"begin", "end"}
    assert missed(titans(), 112, folder, monkeypatch, after=2) == once
    # Where steps are not measured there are no shares to wait for.
    assert missed(plain(), 48, folder, monkeypatch, after=0) == {"shares"}
    assert missed(plain(), 112, folder, monkeypatch, after=2) == {"shares", *once}


@pytest.mark.parametrize(("b", "T"), [(16, 64), (64, 200)], ids=["16 tokens", "64 tokens"])
def test_the_order_of_warps_changes_no_digit(
    b: int, T: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = titans(b=b)
    x = drawn(recipe, T)
    outputs: list[Tensor] = []
    for seed in range(4):
        with simulated(monkeypatch, folder, seed=seed):
            outputs.append(walked(recipe, x)[0])
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(outputs))
