"""Who gets the fused walk: who asks for it by name, with a recipe and sizes that are its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.gpu.test_fused_walk import titans
from torch import Tensor

import recollect as rc
from recollect.engines import deep
from recollect.engines.deep.fused import walk
from recollect.engines.deep.fused.fitting import Build
from recollect.engines.select import ASKED, ENGINES
from recollect.functional.binding import bind


def built(recipe: rc.Recipe, K: int = 64, V: int = 64) -> Build | None:
    return deep.fused_plan(bind(recipe, H=1, K=K, V=V)).fused


def test_nobody_gets_it_unasked() -> None:
    recipe = titans()
    assert rc.select_engine(recipe).engine.name == "deep"
    assert "fused" not in [engine.name for engine in ENGINES]
    assert [engine.name for engine in ASKED] == ["fused"]
    found = rc.select_engine(recipe, "fused")
    assert found.engine.name == "fused" and "CUDA kernels" in found.how
    said = str(rc.explain(recipe, engine="fused"))
    assert "decoded tokens in float32" in said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ttt_mlp", "no chain of maps"),  # norm and biases inside
        ("titans", "ends in more than a residual"),
        ("yaad", "no chain of maps"),  # decay per channel
        ("moneta", "no chain of maps"),
        ("ttt_linear", "no chain of maps"),
        ("gated_delta_net", "no chain of maps"),
    ],
)
def test_other_recipes_are_refused_with_a_reason(name: str, reason: str) -> None:
    with pytest.raises(rc.RecipeError, match=reason):
        rc.select_engine(rc.zoo.get(name).recipe, "fused")


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (rc.Recipe(memory=rc.memory.MLP(depth=3)), "chain of 3 maps"),
        (titans().replace(features=rc.features.Polynomial()), "lifts keys"),
        (rc.Recipe(memory=rc.memory.MLP(activation="tanh")), "has no tanh"),
        (rc.Recipe(memory=rc.memory.MLP(), bias=rc.bias.Huber()), "not a·prediction"),
        (rc.Recipe(memory=rc.memory.MLP(), context=rc.context.Window(size=3)), "more than once"),
        (rc.Recipe(memory=rc.memory.MLP()), "1 tokens, and the kernel takes 16, 32 or 64"),
    ],
)
def test_the_rule_is_about_structure(recipe: rc.Recipe, reason: str) -> None:
    assert reason in deep.fused_refuses(recipe)[0]


def test_sizes_decide_how_many_blocks_share_a_memory() -> None:
    one = built(titans())
    assert one is not None and (one.HS, one.CS, one.momentum, one.normalised) == (64, 4, True, True)
    momentary = titans().replace(
        algorithm=rc.algorithm.GradientDescent(batch_size=16, normalized_steps=True)
    )
    minus = built(momentary)
    assert minus is not None and (minus.HS, minus.CS, minus.momentum) == (128, 2, False)
    wide = built(momentary, 128, 128)
    assert wide is not None and (wide.HS, wide.CS) == (64, 8)
    most = built(titans(), 128, 128)
    assert most is not None and (most.HS, most.CS) == (32, 16)
    five = rc.Recipe(
        memory=rc.memory.MLP(expansion=5), algorithm=rc.algorithm.Momentum(batch_size=16)
    )
    assert built(five, 128, 128) is None  # 20 blocks
    assert built(titans(), 48, 48) is None
    for momentum in (False, True):
        kind = rc.algorithm.Momentum if momentum else rc.algorithm.GradientDescent
        long = rc.Recipe(memory=rc.memory.MLP(), algorithm=kind(batch_size=64))
        found = built(long)
        assert found is not None and (found.R, found.HS, found.CS) == (64, 64, 4)
        found = built(long, 128, 128)
        sizes = (32, 16) if momentum else (64, 8)
        assert found is not None and sizes == (found.HS, found.CS)
    plain = rc.Recipe(
        memory=rc.memory.MLP(residual=False), algorithm=rc.algorithm.Momentum(batch_size=16)
    )
    assert built(plain, 64, 128) is None


def call(method: str, K: int = 64, *, gradient: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    recipe = titans()
    q, k, v = torch.randn(3, 1, 20, 1, K, generator=g)
    v.requires_grad_(gradient)
    each = torch.rand(3, 1, 20, 1, generator=g)
    gates = {"lr": 0.05 * each[0], "log_decay": -each[1], "momentum": 0.9 * each[2]}
    init = [0.1 * torch.randn(1, 1, *s, generator=g) for s in recipe.memory.shapes(K, K)]
    y, state = rc.recall(recipe, q, k / 8, v, gates, initial_memory=init, engine=method)
    assert state is not None
    outcome = [y, *state.weights, *state.algorithm_state["momentum"]]
    return [*outcome, *torch.autograd.grad(y.sum(), v)] if gradient else outcome


def token(method: str, K: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    """One decoded token."""
    g = torch.Generator().manual_seed(0)
    recipe = titans()
    q, k, v = torch.randn(3, 1, 1, 2, K, generator=g).to(dtype)
    gates = {name: torch.full((1, 1, 2), 0.1, dtype=dtype) for name in ("lr", "momentum")}
    gates["log_decay"] = -gates["lr"]
    init = [0.1 * torch.randn(1, 2, *s, generator=g) for s in recipe.memory.shapes(K, K)]
    with torch.no_grad():
        return rc.recall(recipe, q, k / 8, v, gates, initial_memory=init, engine=method)[0]


def test_tokens_without_a_device_are_the_batched_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(token("fused"), token("deep"))
    monkeypatch.setitem(walk.LAUNCHERS, "cpu", refused)
    for K, dtype in ((32, torch.float32), (64, torch.float64)):  # sizes and types of others
        assert torch.equal(token("fused", K, dtype), token("deep", K, dtype))
    token("deep")  # nobody gets it unasked
    with pytest.raises(AssertionError, match="no walk here"):
        token("fused")


def refused(*args: object) -> None:
    raise AssertionError("no walk here")


def test_without_a_device_it_is_the_batched_path() -> None:
    for gradient in (False, True):
        pairs = zip(call("fused", gradient=gradient), call("deep", gradient=gradient), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_other_sizes_take_the_batched_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(walk.LAUNCHERS, "cpu", refused)
    call("fused", K=32)
    call("fused", K=32, gradient=True)
    with pytest.raises(AssertionError, match="no walk here"):
        call("fused")


def test_the_library_loads_no_compiler() -> None:
    code = (
        "import sys, recollect; "
        "print([m for m in sys.modules if m.endswith(('fused.launch', 'fused.compiling'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
