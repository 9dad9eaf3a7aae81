"""Known positions of a state's rows, without reading tensors, and ids of constants."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import recollect as rc
from recollect.choices.runtime import cached_constant, version_tag
from recollect.state.state import State, join_states

RECIPES = {
    "matrix": rc.Recipe(),
    "attention": rc.zoo.get("softmax_attention").recipe,
    "rows by key": rc.zoo.get("delta_former").recipe,
    "two associations a token": rc.zoo.get("delta_product").recipe,
}


def run(recipe: rc.Recipe, T: int, state: State | None = None, **more: torch.Tensor) -> State:
    n = recipe.associations_per_token
    shape = (2, T, 1, n, 4) if n > 1 else (2, T, 1, 4)
    k = torch.nn.functional.normalize(torch.randn(shape), dim=-1)
    gates = {}
    for gate in recipe.gates():
        sizes = recipe.axes(4, 4)
        per = (n,) if n > 1 and recipe.per_association(gate) else ()
        gates[gate.name] = torch.full((2, T, 1, *per, *(sizes[a] for a in gate.axes)), 0.5)
    q = torch.randn(2, T, 1, 4)
    _, later = rc.recall(recipe, q, k, torch.randn(shape), gates, state=state, **more)
    assert later is not None
    return later


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rows_in_step(recipe: rc.Recipe) -> None:
    state = run(recipe, 5)
    assert state.host_position == 5
    state = run(recipe, 1, state)
    assert state.host_position == 6 == int(state.position[0])
    for other in (
        state.detach(),
        state.select(torch.tensor([1, 1, 0])),
        state.repeat(2),
        state.to(dtype=torch.float64),
        State.from_dict(state.to_dict()),
        join_states([state, state]),
    ):
        assert other.host_position == 6
        assert set(other.position.tolist()) == {6}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rows_that_differ_have_no_number(recipe: rc.Recipe) -> None:
    state = run(recipe, 5)
    assert state.reset(torch.tensor([True, False])).host_position is None
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    padded = run(recipe, 5, attention_mask=mask)
    assert padded.host_position is None
    assert run(recipe, 1, padded).host_position is None
    assert State.from_dict(padded.to_dict()).host_position is None
    assert join_states([state, run(recipe, 4)]).host_position is None


def test_position_of_a_foreign_state_is_unknown() -> None:
    state = run(RECIPES["matrix"], 5)
    assert dataclasses.replace(state, weights=state.weights).host_position == 5
    assert dataclasses.replace(state, position=torch.tensor([7, 9])).host_position is None


def test_rows_by_key_restart_empty() -> None:
    recipe = RECIPES["rows by key"]
    state = run(recipe, 5).reset(torch.tensor([True, False]))
    assert state.kernel_rows is not None
    assert state.kernel_rows.mask.sum(1).tolist() == [0, 5]


def test_stamp_changes_with_its_tensors() -> None:
    weight, other = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    first = version_tag([weight, other])
    assert first is not None
    assert version_tag([weight, other]) == first
    with torch.no_grad():
        weight.add_(1.0)
    second = version_tag([weight, other])
    assert second not in (first, None)
    assert version_tag([other, weight]) != second
    serials = {version_tag([torch.zeros(1)]) for _ in range(100)}
    assert len(serials) == 100, "memory that is used again is no name"
    with torch.inference_mode():
        result = torch.zeros(3)
    assert version_tag([result]) is None


def test_constant_is_built_once_for_all_modes() -> None:
    result: list[int] = []

    def ramp(size: int) -> torch.Tensor:
        result.append(size)
        return torch.arange(size, dtype=torch.float64)

    with torch.inference_mode(), torch.device("meta"):
        first = cached_constant(ramp, 3, device=torch.device("cpu"), dtype=torch.float32)
    second = cached_constant(ramp, 3, device=torch.device("cpu"), dtype=torch.float32)
    assert first is second
    assert result == [3]
    assert first.tolist() == [0.0, 1.0, 2.0]
    assert not first.is_inference()
    meta = cached_constant(ramp, 3, device=torch.device("meta"))
    assert meta.is_meta
    assert cached_constant(ramp, 3, device=torch.device("meta")) is not meta, "it holds no numbers"


@pytest.mark.parametrize(
    "name", ["recipe_id_x", "normalizer_of_mine", "position2", "log_scale.0", "sizess"]
)
def test_saved_state_ignores_names_with_a_common_prefix(name: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 1, 4)
    _, state = rc.recall(rc.Recipe(), q, k, v, {"lr": torch.full((1, 2, 1), 0.5)})
    assert state is not None
    flat = state.to_dict()
    with pytest.raises(ValueError, match=f"{name!r} is not part of a recollect state"):
        rc.State.from_dict({**flat, name: torch.zeros(1)})
    with pytest.raises(ValueError, match="'recipe_id' of a state must be text"):
        rc.State.from_dict({**flat, "recipe_id": torch.zeros(0, dtype=torch.uint8)})


LAYERS = {
    **{name: rc.MemoryLayer(8, 2, recipe) for name, recipe in RECIPES.items()},
    "titans": rc.MemoryLayer(8, 2, "titans"),
    "chain": rc.blocks.build(rc.blocks.Sequential("gla", "softmax_attention"), 8, 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_states_are_compared_by_identity_and_hashed(name: str) -> None:
    _, state = LAYERS[name](torch.randn(1, 5, 8))
    other = state.detach()
    assert state == state and state != other
    assert len({state, other, state}) == 2


def test_parts_of_a_state_are_compared_by_identity_and_hashed() -> None:
    buffer = run(RECIPES["attention"], 5).buffer
    rows = run(RECIPES["rows by key"], 5).kernel_rows
    one = torch.ones(1, 1, 2, 2)
    step = rc.algorithm.Step(gradient=one, write=None, lr=one, momentum=one, count=one)
    assert buffer is not None and rows is not None
    for part in (buffer, rows, step):
        assert part == part and part != dataclasses.replace(part)
        assert len({part, part}) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_repr_of_a_state_shows_shapes(name: str) -> None:
    """One line without values of tensors: printing is as fast and short for a large state."""
    lines = []
    for rows in (1, 64):
        _, state = LAYERS[name](torch.randn(rows, 5, 8))
        assert state is not None
        text = repr(state)
        lines.append(text)
        assert text == str(state) and "\n" not in text and "tensor(" not in text
        assert len(text) < 1500, len(text)
        assert f"position=int64[{rows}]" in text
    assert len(lines[1]) < len(lines[0]) + 60
    if name == "matrix":
        assert lines[0] == (
            "LayerState(memory=State(weights=(float32[1, 2, 4, 4],), position=int64[1], "
            "sizes=(2, 4, 4)), conv=float32[1, 3, 24])"
        )


@pytest.mark.parametrize("name", LAYERS)
def test_state_moves_like_tensors(name: str) -> None:
    _, state = LAYERS[name](torch.randn(1, 5, 8))
    assert state is not None
    like = torch.zeros(1, dtype=torch.float64)
    expected = state.to(dtype=torch.float64)
    assert str(expected) == str(state).replace("float32", "float64") != str(state)
    for moved in (
        state.to(torch.float64),
        state.to("cpu", torch.float64),
        state.to(torch.device("cpu"), dtype=torch.float64),
        state.to(like),
    ):
        assert repr(moved) == repr(expected)
        for a, b in zip(moved.to_dict().values(), expected.to_dict().values(), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
    stays = state.to("cpu")
    assert repr(stays) == repr(state)
    away = state.to("meta")
    assert {x.device.type for x in away.to_dict().values() if x.is_floating_point()} == {"meta"}
