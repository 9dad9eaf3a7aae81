"""Tokens by the fused kernel's own source, on a simulated cluster, against the definition.

All products are float32 here, so a token is off by what float32 rounds, as on the batched path.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import test_fused_walk as forth
from tests.gpu.printed import printed
from tests.gpu.simulator.run import simulated, unnoticed
from tests.gpu.test_budgets import pytestmark as needs_torch
from tests.gpu.test_fused_walk import by_keys, drawn, far, plain, titans, told, worst
from tests.test_decoder import recorded
from torch import Tensor

import recollect as rc
from recollect.decoder import static

NEAR = 2e-6
PLACES = (
    "begin",
    "hidden units",
    "prediction",
    "error",
    "turned",
    "delta",
    "asked",
    "read",
    "end",
)

Inputs = dict[str, Any]
Found = tuple[Tensor, rc.State]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulator")


def cut(x: Inputs, start: int, stop: int) -> Inputs:
    """Some of the tokens, without what they begin with."""
    part = {name: x[name][:, start:stop] for name in ("q", "k", "v")}
    return {**part, "gates": {name: gate[:, start:stop] for name, gate in x["gates"].items()}}


def decoded(
    recipe: rc.Recipe,
    x: Inputs,
    method: str = "fused",
    state: rc.State | None = None,
    **more: Any,
) -> Found:
    """Token by token, from a state or from ``init``."""
    init, outputs = x.get("initial_memory") if state is None else None, []
    for t in range(x["q"].shape[1]):
        with torch.no_grad():
            one = cut(x, t, t + 1)
            y, state = rc.recall(
                recipe, **one, initial_memory=init, state=state, engine=method, **more
            )
        init = None
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def averaged(**choices: Any) -> rc.Recipe:
    """Steps averaged over the open batch, as TTT's, with its learned correction."""
    algorithm = rc.algorithm.GradientDescent(batch_size=16, reduction="mean", offset="learned")
    return rc.Recipe(memory=rc.memory.MLP(**choices), algorithm=algorithm)


CASES = {
    "titans": (titans(), 37, 64),
    "silu, no residual": (plain("silu", residual=False), 33, 64),
}
SLOW = {
    "relu": (plain("relu"), 40, 64),
    "gelu by tanh": (plain("gelu_tanh"), 33, 64),
    "its own width": (titans(expansion=1), 33, 64),
    "three times": (titans(expansion=3), 33, 64),
    "plain, once": (plain("silu", expansion=1), 33, 64),
    "inner product": (
        rc.Recipe(
            memory=rc.memory.MLP(),
            bias=rc.bias.DotProduct(),
            algorithm=rc.algorithm.Momentum(batch_size=16),
        ),
        33,
        64,
    ),
    "32 tokens": (titans(b=32), 70, 64),
    "64 tokens": (titans(b=64), 70, 64),
    "wide heads": (titans(expansion=2), 18, 128),
    "wide heads, 16 blocks": (titans(), 18, 128),
    "wide heads, 12 blocks, 64 tokens": (titans(b=64, expansion=3), 66, 128),
    "wide heads, plain": (plain("gelu", expansion=4), 18, 128),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW)])
def test_a_token_is_the_definition(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over borders, and into the batch after them; one launch for each token."""
    recipe, T, D = (CASES | SLOW)[case]
    x = drawn(recipe, T, H=2 if D == 64 else 1, D=D)
    with simulated(monkeypatch, folder) as ran:
        found = decoded(recipe, x)
    assert ran == ["token"] * T
    assert worst(recipe, x, found, told(recipe, x)) < NEAR


@pytest.mark.parametrize("momentum", [True, False])
def test_what_a_state_keeps_beside_the_memory(
    momentum: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw associations, which slots hold one, and the count of tokens, digit by digit."""
    recipe, x = by_keys(momentum=momentum), torch.randn(3, 40, 128)
    torch.manual_seed(0)
    batched, fused = (
        rc.MemoryLayer(128, 2, recipe, engine=method).eval() for method in ("deep", "fused")
    )
    fused.load_state_dict(batched.state_dict())
    with torch.no_grad(), simulated(monkeypatch, folder) as ran:
        _, one = batched(x[:, :5])
        other = one
        for t in range(5, 40):
            _, one = batched(x[:, t : t + 1], one)
            _, other = fused(x[:, t : t + 1], other)
            a, b = one.memory, other.memory
            assert (
                a.host_position == b.host_position == t + 1
                and a.buffer.rates.keys() == b.buffer.rates.keys()
            )
            assert torch.equal(a.position, b.position)
            assert torch.equal(a.buffer.mask, b.buffer.mask)
            pairs = zip(
                [a.buffer.k, a.buffer.v, *a.buffer.rates.values()],
                [b.buffer.k, b.buffer.v, *b.buffer.rates.values()],
                strict=True,
            )
            assert all(torch.equal(x, y) for x, y in pairs), t
    assert ran == ["token"] * 34


def test_averaged_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = averaged()
    x = drawn(recipe, 35, H=2)
    offset = 0.02 * torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    with simulated(monkeypatch, folder) as ran:
        found = decoded(recipe, x, params={"offset": offset})
    assert ran == ["token"] * 35
    assert worst(recipe, x, found, told(recipe, x, params={"offset": offset.double()})) < NEAR


def test_a_token_leaves_the_state_before_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of a batch and at its end: two tokens that go on from one state know nothing of it."""
    recipe = titans()
    x, other = drawn(recipe, 17), drawn(recipe, 18)
    for T in (9, 15):
        with simulated(monkeypatch, folder):
            _, state = decoded(recipe, {**cut(x, 0, T), "initial_memory": x["initial_memory"]})
            copied = [one.clone() for one in state.tensors()]
            first = decoded(recipe, cut(x, T, T + 1), state=state)
            second = decoded(recipe, cut(other, T, T + 1), state=state)
            again = decoded(recipe, cut(x, T, T + 1), state=state)
        assert all(map(torch.equal, state.tensors(), copied))
        assert far(second[0], first[0].double()) > 0.1
        pairs = zip([first[0], *first[1].tensors()], [again[0], *again[1].tensors()], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "ways",
    [
        ("deep", 21, "fused", 44, "deep", 50),
        ("fused", 21, "fused", 40),
        ("deep", 5, "fused", 9, "deep", 12, "fused", 20, "deep", 30, "fused", 33),
        pytest.param(("reference", 32, "fused", 50), marks=pytest.mark.slow),
        pytest.param(
            ("deep", 16, "fused", 31, "fused walk", 70, "fused", 80), marks=pytest.mark.slow
        ),
    ],
    ids=lambda ways: " ".join(map(str, ways)),
)
def test_a_token_goes_on_where_others_stopped(
    ways: Sequence[Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts by one engine, tokens by another, in the middle of a batch and at its end.

    The first stretch, and those by the walk, are one call; others are token by token. What the walk
    has written is off by its bfloat16 products.
    """
    recipe = titans()
    x = drawn(recipe, ways[-1], H=2)
    y, kept = told(recipe, x)
    outputs: list[Tensor] = []
    state: rc.State | None = None
    begin, tokens = 0, 0
    with simulated(monkeypatch, folder) as ran:
        for way, stop in zip(ways[::2], ways[1::2], strict=True):
            part = cut(x, begin, stop) | (
                {"initial_memory": x["initial_memory"]} if state is None else {}
            )
            if begin and "walk" not in way:
                one, state = decoded(recipe, part, way, state)
                tokens += stop - begin if way == "fused" else 0
            else:
                with torch.no_grad():
                    method = "fused" if "walk" in way else way
                    one, state = rc.recall(recipe, **part, state=state, engine=method)
            assert state is not None
            outputs.append(one)
            begin = stop
    # After a long call the first token in an open batch makes the factors of that batch.
    assert ran.count("token") in (tokens, tokens - 1)
    rounds = ways[0] == "fused" or "fused walk" in ways
    assert state is not None
    found = torch.cat(outputs, dim=1), state
    assert worst(recipe, x, found, (y, kept)) < (forth.NEAR if rounds else NEAR)


def test_rows_that_came_differently_far_take_the_walk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the batched path they have no factors in common; nothing of a cache is taken."""
    recipe, lengths = titans(), torch.tensor([7, 3])
    x = drawn(recipe, 12, B=2)
    mask = (torch.arange(7) < lengths[:, None]).long()
    prompt = cut(x, 0, 7) | {"initial_memory": x["initial_memory"]}
    outcomes: list[Found] = []
    with simulated(monkeypatch, folder) as ran:
        for method in ("reference", "fused"):
            _, state = rc.recall(recipe, **prompt, attention_mask=mask, engine="reference")
            outcomes.append(decoded(recipe, cut(x, 7, 12), method, state))
    assert "token" not in ran
    own = x["q"][:, 7:].double()
    assert far(outcomes[1][0].double() - own, outcomes[0][0].double() - own) < forth.NEAR


@pytest.mark.parametrize("change", ["float64", "gradient", "two queries"])
def test_what_the_kernel_is_not_for(
    change: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = titans()
    drawn_all = drawn(recipe, 3)
    x = cut(drawn_all, 0, 1) | {"initial_memory": drawn_all["initial_memory"]}
    if change == "float64":
        x |= {name: x[name].double() for name in ("q", "k", "v")}
    elif change == "two queries":
        x["q"] = x["q"].repeat(1, 1, 2, 1)
    else:
        x["v"].requires_grad_()
    with simulated(monkeypatch, folder) as ran:
        y, _ = rc.recall(recipe, **x, engine="fused")
    assert "token" not in ran
    said, _ = rc.recall(recipe, **x, engine="reference")
    assert far(y.detach(), said.detach().double()) < forth.NEAR


def missed(
    recipe: rc.Recipe, before: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """Barriers that can be left out of one token without changing a digit."""
    x = drawn(recipe, before + 1)
    _, state = decoded(recipe, cut(x, 0, before) | {"initial_memory": x["initial_memory"]}, "deep")

    def digits() -> list[Tensor]:
        y, after = decoded(recipe, cut(x, before, before + 1), state=state)
        return [y, *after.tensors()]

    with simulated(monkeypatch, folder) as ran:
        digits()
    assert ran == ["token"]
    return unnoticed(digits, dict(enumerate(PLACES)), folder, monkeypatch)


def test_every_barrier_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(titans(), 5, folder, monkeypatch) == set()
    assert missed(titans(), 15, folder, monkeypatch) == set()
    # Where steps are not measured nobody waits for the others' δ.
    assert missed(plain(), 5, folder, monkeypatch) == {"delta"}


def test_the_order_of_warps_changes_no_digit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = titans()
    x = drawn(recipe, 17)
    outcomes: list[list[Tensor]] = []
    for seed in range(3):
        with simulated(monkeypatch, folder, seed=seed):
            y, state = decoded(recipe, x)
        outcomes.append([y, *state.tensors()])
    for one, other in itertools.pairwise(outcomes):
        assert all(map(torch.equal, one, other))


def test_a_static_decoder_takes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, from a prompt on: replayed in fixed tensors, as on a device without graphs."""
    torch.manual_seed(0)
    given: Any = (128, 2, by_keys())
    layer = rc.MemoryLayer(*given, engine="fused").eval()
    batched = rc.MemoryLayer(*given).eval()
    batched.load_state_dict(layer.state_dict())
    x = torch.randn(1, 80, 128)
    with torch.no_grad(), simulated(monkeypatch, folder) as ran:
        monkeypatch.setattr(static, "graph_recorder", lambda _: recorded)
        _, state = batched(x[:, :7])
        decoder = rc.StaticDecoder(layer, state)
        apart = 0.0
        for t in range(7, 80):
            y = decoder(x[:, t : t + 1])
            said, state = batched(x[:, t : t + 1], state)
            apart = max(apart, far(y, said.double()))
    assert ran.count("token") == 72 and decoder.num_recorded == decoder.period == 16
    assert apart < 1e-5
    pairs = zip(decoder.state.memory.weights, state.memory.weights, strict=True)
    assert all(far(a, b.double()) < 1e-5 for a, b in pairs)


def test_a_layer_in_bfloat16(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its projections are; the memory and the kernel stay float32."""
    torch.manual_seed(0)
    recipe = by_keys()
    x, outcomes = torch.randn(1, 20, 128).bfloat16(), []
    for method in ("deep", "fused"):
        torch.manual_seed(0)
        layer = rc.MemoryLayer(128, 2, recipe, engine=method)
        layer, state = layer.eval().bfloat16(), None
        with torch.no_grad(), simulated(monkeypatch, folder) as ran:
            for t in range(20):
                y, state = layer(x[:, t : t + 1], state)
        assert state is not None
        outcomes.append([y, *state.memory.weights, *state.memory.algorithm_state["momentum"]])
    assert ran == ["token"] * 20
    assert all(far(a, b.double()) < 1e-5 for a, b in zip(*outcomes, strict=True))


@needs_torch
def test_on_a_device_it_is_one_launch_and_no_wait() -> None:
    """And the batched path's tokens take 76; recorded as graphs, both give the same numbers.

    Sixteen of each are what earlier keys of the batch leave of the rate.
    """
    (found,) = printed("graphs", "fused")
    assert found["decoded"] < 1e-5 and found["state"] < 1e-5
    assert found["tokens"] > 50 and found["places"] == [16, 16]
    assert found["syncs"] == found["copies"] == 0
    batched, fused = found["launches"]  # of 16 tokens, a border among them
    assert max(fused) <= 37 and sum(batched) <= 16 * 76, found
