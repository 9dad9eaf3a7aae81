"""States that were changed, rounded or written by other recipes; other types; deep nesting."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.misuse.sentences import refuses
from torch import Tensor

import recollect as rc
from recollect.engines.common.problem import Problem
from recollect.functional.binding import bind
from recollect.functional.recall import memorise
from recollect.state.tree import encode_text

R = rc.Recipe()
LR = {"lr": torch.full((1, 2, 1), 0.5)}


def _state() -> rc.State:
    _, state = rc.recall(R, *torch.randn(3, 1, 2, 1, 4), LR)
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("titans", "numbers kept"),
        ("sliding_window_attention", "numbers kept"),
    ],
)
def test_a_renamed_number_of_the_buffer(name: str, says: str) -> None:
    """A flipped byte in the header of a file renames a number."""
    layer = rc.zoo.get(name).build(d_model=8, num_heads=2)
    _, state = layer(torch.randn(1, 5, 8))
    flat = state.to_dict()
    rates = [key for key in flat if key.startswith("memory.buffer.rates.")]
    for key in rates:
        altered = {k + "x" if k == key else k: x for k, x in flat.items()}
        reloaded = type(state).from_dict(altered)
        refuses(
            lambda reloaded=reloaded: layer(torch.randn(1, 1, 8), reloaded), says, error=ValueError
        )
    altered = {k.replace("buffer.k", "buffer.s"): x for k, x in flat.items()}
    refuses(lambda: type(state).from_dict(altered), "buffer.s", error=ValueError)


WRITERS = {
    "noise": ("xyz\n\0", "is not the text of a recipe"),
    "a list": ("[1]", "is not the text of a recipe"),
    "lists in lists": ("[" * 50_000, "is not the text of a recipe"),
    "a line end": (json.dumps({"memory": {"member": "a\nb"}}), "memory is {'member': 'a\\nb'}"),
    "a line end in a field": (json.dumps({"memory": {"member": "M", "a\nb": 1}}), "'a\\nb'"),
    "half a pair": (json.dumps({"memory": {"member": "\ud800"}}), "\\ud800"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_changed_recipe_id(what: str) -> None:
    text, says = WRITERS[what]
    state = rc.State.from_dict({**_state().to_dict(), "recipe_id": encode_text(text)})
    refuses(
        lambda: rc.recall(R, *torch.randn(3, 1, 2, 1, 4), LR, state=state), says, error=ValueError
    )


@pytest.mark.parametrize("writer", [5, b"x", ["a"]])
def test_recipe_id_of_another_type(writer: Any) -> None:
    state = dataclasses.replace(_state(), recipe_id=writer)
    refuses(
        lambda: rc.recall(R, *torch.randn(3, 1, 2, 1, 4), LR, state=state),
        "is not the text of a recipe",
        error=ValueError,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["titans", "value_less", "dot", "mesa_net"])
def test_a_rounded_state(name: str, dtype: torch.dtype) -> None:
    layer = rc.zoo.get(name).build(d_model=8, num_heads=2)
    _, state = layer(torch.randn(1, 5, 8))
    for tokens in (1, 3):
        refuses(
            lambda tokens=tokens: layer(torch.randn(1, tokens, 8), state.to(dtype=dtype)),
            "were rounded to",
            "state.to(dtype=torch.float32)",
            error=ValueError,
        )
    layer(torch.randn(1, 1, 8), state.to(dtype=dtype).to(dtype=torch.float32))


@pytest.mark.parametrize("name", ["gated_delta_net", "titans"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_gates_of_another_type_at_a_decoded_token(name: str, dtype: torch.dtype) -> None:
    layer = rc.zoo.get(name).build(d_model=8, num_heads=2)
    _, state = layer(torch.randn(1, 5, 8))
    x = layer.memory_inputs(torch.randn(1, 1, 8), state)
    bound = bind(layer.recipe, H=2, K=4, V=4)

    def token(gates: dict[str, Tensor], *, trusted: bool) -> Tensor:
        return memorise(
            Problem(
                bound=bound, q=x.q, k=x.k, v=x.v, gates=gates, params=x.params,
                state=state.memory, trusted=trusted,
            )
        )[0]  # fmt: skip

    cast = {key: gate.to(dtype) for key, gate in x.gates.items()}
    plain = {key: gate.float() for key, gate in cast.items()}
    y = token(cast, trusted=True)
    assert y.dtype == x.q.dtype
    torch.testing.assert_close(y, token(plain, trusted=False), rtol=1e-5, atol=1e-6)


def _nested(kind: str) -> dict[str, Any]:
    leaf = rc.blocks.MemoryAsGate("gla", "sliding_window_attention").to_dict()
    data = leaf
    for _ in range(3000):
        data = (
            {"mixer": "sequential", "parts": [data]}
            if kind == "chain"
            else {**leaf, "memory": data}
        )
    return data


@pytest.mark.parametrize("kind", ["chain", "gated"])
def test_mixers_nested_too_deep(kind: str) -> None:
    data = _nested(kind)
    refuses(lambda: rc.blocks.read_mixer(data), "nested too deep", error=rc.RecipeError)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_whole_numbers_of_numpy_are_whole_numbers(kind: Any) -> None:
    layer = rc.MemoryLayer(
        kind(16), kind(2), R, num_kv_heads=kind(1), head_dim=kind(4), depth=(kind(0), kind(2))
    )
    assert type(layer.d_model) is int and type(layer.depth[1]) is int
    assert R.shapes(kind(4), kind(4)) == R.shapes(4, 4)
    window = rc.Recipe(context=rc.context.Window(size=kind(4)))
    assert rc.Recipe.from_json(window.to_json()) == window
    assert rc.cost(R, K=kind(4), V=4, H=2, T=kind(8)).total == rc.cost(R, K=4, V=4, H=2, T=8).total
    x = torch.randn(3, 1, 4, 2, 4)
    rc.recall(R, *x, {"lr": torch.ones(1, 4, 2)}, chunk_size=kind(2))
    for odd in (True, np.bool_(True), 2.0, torch.tensor(2)):
        refuses(lambda odd=odd: rc.MemoryLayer(16, odd, R), "whole number", error=rc.RecipeError)
        refuses(lambda odd=odd: R.shapes(odd, 4), "whole number", error=rc.RecipeError)


def test_numbers_in_the_requested_unit() -> None:
    huber = rc.Recipe(bias=rc.bias.Huber())

    def make(**options: Any) -> rc.MemoryLayer:
        gate = rc.GateOptions(unit="value_rms", **options)
        return rc.MemoryLayer(32, 2, huber, rc.LayerOptions(gate_options={"threshold": gate}))

    refuses(
        lambda: make(init=5.0, low=0.0, high=1.0, activation="sigmoid"),
        "init must be in [0, 1], not 5",
        error=rc.RecipeError,
    )
    refuses(lambda: make(low=-1.0), "softplus has values >= -1,", error=rc.RecipeError)


def test_missing_field_is_named_once() -> None:
    message = refuses(
        lambda: rc.Recipe.from_dict({"context": {"member": "Window"}}),
        "Window needs size, which is missing",
        error=rc.RecipeError,
    )
    assert message.count("Window") == 1


def test_a_flipped_byte_of_a_folders_header_names_the_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = rc.lm.RecollectConfig.from_recipes("delta_net", **sizes)
    rc.lm.RecollectForCausalLM(config).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"lm_head", b"lm_hdad", 1))
    refuses(
        lambda: rc.lm.RecollectForCausalLM.from_pretrained(tmp_path),
        "lacks the weight 'lm_head.weight'",
        error=ValueError,
    )
