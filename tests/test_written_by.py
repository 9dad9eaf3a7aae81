"""A state stores the id of the recipe that wrote it, and other recipes are refused."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.misuse.sentences import refuses
from torch import Tensor

import recollect as rc
from recollect.recipe.canonical import first_difference

DELTA = rc.Recipe()
# Each needs the numbers of DELTA and stores tensors of its shapes.
OTHERS = {
    "bias": DELTA.replace(bias=rc.bias.Lp(p=3)),
    "features": DELTA.replace(features=rc.features.Relu()),
    "retention": DELTA.replace(retention=rc.retention.Decay(alpha=0.5)),
    "retention, barely": DELTA.replace(retention=rc.retention.Decay(alpha=0.1234567)),
    "memory": DELTA.replace(memory=rc.memory.Matrix(read=rc.memory.Read(when="before"))),
}


def _call(recipe: rc.Recipe, state: rc.State | None = None, T: int = 3) -> rc.State:
    q, k, v = torch.randn(3, 1, T, 2, 4).unbind()
    _, later = rc.recall(recipe, q, k, v, {"lr": torch.full((1, T, 2), 0.5)}, state=state)
    assert later is not None
    return later


def _read(recipe: rc.Recipe, state: rc.State) -> Tensor:
    return rc.read(recipe, torch.randn(1, 1, 2, 4), state=state)


@pytest.mark.parametrize("what", OTHERS)
def test_another_recipe_of_the_same_shape_is_refused(what: str) -> None:
    other, choice = OTHERS[what], what.partition(",")[0]
    for mine, theirs in ((DELTA, other), (other, DELTA)):
        state = _call(theirs)
        for go_on in (_call, _read):
            refuses(
                lambda go_on=go_on, mine=mine, state=state: go_on(mine, state),
                "belongs to another recipe",
                f"its {choice} is ",
                "or start without a state",
                error=rc.RecipeError,
            )
        _call(theirs, state), _read(theirs, state)


def test_error_prints_all_digits_of_numbers() -> None:
    state = _call(OTHERS["retention, barely"])
    near = DELTA.replace(retention=rc.retention.Decay(alpha=0.12345671))
    says = ("Decay(alpha=0.1234567)", "Decay(alpha=0.12345671)")
    refuses(lambda: _call(near, state), *says, error=rc.RecipeError)


def test_state_of_a_layer_has_the_id_of_its_recipe() -> None:
    x = torch.randn(1, 3, 8)
    _, state = rc.MemoryLayer(8, 2, DELTA)(x)
    other = rc.MemoryLayer(8, 2, OTHERS["bias"])
    refuses(lambda: other(x, state), "its bias is L2(), not Lp", error=ValueError)
    refuses(
        lambda: rc.MemoryLayer(8, 4, DELTA)(x, state), "(H, K, V) = (2, 4, 4)", error=ValueError
    )


def test_equivalent_recipes_continue_each_others_states() -> None:
    same = [
        DELTA.replace(context=rc.context.Window(size=1, gated=False)),
        DELTA.replace(retention=rc.retention.Lq(q=2)),
        rc.Recipe.from_json(DELTA.to_json()),
        copy.deepcopy(DELTA),
        pickle.loads(pickle.dumps(DELTA)),
    ]
    for recipe in same:
        assert recipe.normal_form == DELTA.normal_form
        _call(recipe, _call(DELTA)), _call(DELTA, _call(recipe))


def test_equal_members_have_one_text_and_others_another() -> None:
    texts = {rc.zoo.get(name).recipe.normal_form for name in rc.zoo.names()}
    meanings = {rc.zoo.get(name).recipe.canonical() for name in rc.zoo.names()}
    assert len(texts) == len(meanings) > 40
    one = DELTA.replace(algorithm=rc.algorithm.GradientDescent(lr=1))
    assert (
        one.normal_form == one.replace(algorithm=rc.algorithm.GradientDescent(lr=1.0)).normal_form
    )
    for recipe in [rc.zoo.get(name).recipe for name in rc.zoo.names()]:
        assert rc.Recipe.from_json(recipe.normal_form).canonical() == recipe.canonical()


def _saved(state: rc.State) -> rc.State:
    from safetensors.torch import load, save

    return rc.State.from_dict(load(save(state.to_dict())))


def _torch_saved(state: rc.State) -> rc.State:
    file = io.BytesIO()
    torch.save(state.to_dict(), file)
    file.seek(0)
    return rc.State.from_dict(torch.load(file, weights_only=True))


KEEPING: dict[str, Callable[[rc.State], rc.State]] = {
    "detach": lambda s: s.detach(),
    "select": lambda s: s.select(torch.tensor([0])),
    "repeat": lambda s: s.repeat(2).select(torch.tensor([1])),
    "to a type": lambda s: s.to(dtype=torch.float32),
    "to a device": lambda s: s.to(device="cpu"),
    "reset": lambda s: s.reset(torch.tensor([True])),
    "map": lambda s: s.map(torch.clone),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "copy": copy.deepcopy,
    "safetensors": _saved,
    "torch.save": _torch_saved,
    "a call": lambda s: _call(DELTA, s),
    "a call without a token": lambda s: _call(DELTA, s, T=0),
}


@pytest.mark.parametrize("what", KEEPING)
def test_methods_of_a_state_keep_the_id(what: str) -> None:
    state = KEEPING[what](_call(DELTA))
    assert state.recipe_id == DELTA.normal_form
    _call(DELTA, state)
    refuses(lambda: _call(OTHERS["bias"], state), "another recipe", error=rc.RecipeError)


def test_documents_and_beams_of_a_model_keep_the_id() -> None:
    pytest.importorskip("transformers")
    config = rc.lm.RecollectConfig.from_recipes(
        "gated_delta_net",
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = rc.lm.RecollectForCausalLM(config).eval()
    cache = rc.lm.cache_of(model(torch.tensor([[1, 2, 3]]), use_cache=True))
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    form = rc.zoo.get("gated_delta_net").recipe.normal_form
    assert [layer.state.memory.recipe_id for layer in cache.layers] == [form] * 2
    q = torch.randn(1, 5, 2, 4)
    borders = torch.tensor([0, 1, 5])
    _, state = rc.recall(DELTA, q, q, q, {"lr": torch.rand(1, 5, 2)}, cu_seqlens=borders)
    assert state is not None and state.rows == 2
    assert state.recipe_id == DELTA.normal_form


def test_every_engine_writes_the_id() -> None:
    q = torch.randn(1, 3, 2, 4)
    for method in ("reference", "linear", "deep"):
        _, state = rc.recall(DELTA, q, q, q, {"lr": torch.rand(1, 3, 2)}, engine=method)
        assert state is not None and state.recipe_id == DELTA.normal_form


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_calls_write_and_check_the_id() -> None:
    layer, other = rc.MemoryLayer(8, 2, DELTA), rc.MemoryLayer(8, 2, OTHERS["bias"])
    x = torch.randn(1, 3, 8)
    compiled = torch.compile(layer, backend="aot_eager")
    _, state = compiled(x)
    assert state.memory.recipe_id == DELTA.normal_form
    y, _ = compiled(x, state)
    assert torch.allclose(y, layer(x, state)[0], atol=1e-5)
    _, theirs = other(x)
    with pytest.raises(Exception, match="belongs to another recipe"):
        compiled(x, theirs)


def test_states_without_an_id_fit_every_recipe_of_their_shapes() -> None:
    bare = _call(DELTA).to_dict()
    del bare["recipe_id"]
    state = rc.State.from_dict(bare)
    assert state.recipe_id is None
    later = _call(OTHERS["bias"], state)
    assert later.recipe_id == OTHERS["bias"].normal_form
    _call(OTHERS["bias"], dataclasses.replace(_call(DELTA), recipe_id=None))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "[" * 50_000, "x" * 10**5, '{"bias": {"member": 3}}']
)
def test_unknown_id_is_another_recipe(text: str) -> None:
    state = dataclasses.replace(_call(DELTA), recipe_id=text)
    says = "belongs to another recipe" if "bias" in text else "is not the text of a recipe"
    refuses(lambda: _call(DELTA, state), says, error=rc.RecipeError)
    assert len(" ".join(first_difference(text, DELTA.normal_form))) < 300


def test_a_saved_prompt_of_another_recipe_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = rc.lm.RecollectConfig.from_recipes("delta_net", **sizes)
    model = rc.lm.RecollectForCausalLM(config).eval()
    prompt = rc.lm.CachedPrompt.prefill(model, torch.tensor([[1, 2, 3]]))
    (layer,) = prompt.cache.layers
    assert layer.state is not None
    memory = dataclasses.replace(layer.state.memory, recipe_id=OTHERS["bias"].normal_form)
    layer.state = dataclasses.replace(layer.state, memory=memory)
    prompt.save(tmp_path / "p.safetensors", model)
    loaded = rc.lm.CachedPrompt.load(tmp_path / "p.safetensors", model)
    refuses(
        lambda: model.generate(**loaded.generate_kwargs(), max_new_tokens=1),
        "belongs to another recipe",
        error=rc.RecipeError,
    )
