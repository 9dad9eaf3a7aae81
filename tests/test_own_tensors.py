"""A state owns its tensors: it shares none with the caller, and stale caches are ignored."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import recollect as rc

Q, K, V = torch.randn(3, 1, 6, 2, 3, generator=torch.Generator().manual_seed(0)).unbind(0)


def recall(recipe: rc.Recipe, start: int, stop: int, **options: object) -> tuple[Tensor, rc.State]:
    y, state = rc.recall(recipe, Q[:, start:stop], K[:, start:stop], V[:, start:stop], **options)
    assert state is not None
    return y, state


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_factor_of_another_ridge_is_ignored() -> None:
    def regression(ridge: float) -> rc.Recipe:
        return rc.Recipe(
            features=rc.features.Gaussian(),
            context=rc.context.Prefix(),
            algorithm=rc.algorithm.Analytic(ridge=ridge),
        )

    _, state = recall(regression(1.0), 0, 4)
    # a state with a recipe id is refused
    other, state = regression(0.1), replace(state, recipe_id=None)
    expected, _ = recall(other, 4, 6, state=state, engine="reference")
    same(recall(other, 4, 6, state=state)[0], expected)
    same(rc.read(other, Q[:, 4:], state=state), rc.read(other, Q[:, 4:], state=bare(state)))


def bare(state: rc.State) -> rc.State:
    return rc.State.from_dict(state.to_dict())  # a cache is not saved


@torch.no_grad()
def test_features_trained_in_place_invalidate_the_cache() -> None:
    recipe = rc.Recipe(
        features=rc.features.LearnedRelu(),
        algorithm=rc.algorithm.GradientDescent(lr=0.3, batch_size=4),
    )
    axes, g = recipe.axes(3, 3), torch.Generator().manual_seed(1)
    params = {
        p.name: torch.randn(2, *(axes[a] for a in p.axes), generator=g) for p in recipe.params()
    }
    state = None
    for t in range(2):
        begin = {} if state is None else {"state": state}
        _, state = recall(recipe, t, t + 1, params=params, engine="deep", **begin)
    assert state is not None and state.cache
    for p in params.values():
        p.mul_(2)
    expected, _ = recall(recipe, 2, 3, params=params, state=bare(state), engine="reference")
    same(recall(recipe, 2, 3, params=params, state=state, engine="deep")[0], expected)


def test_recipes_with_equal_hashes_differ() -> None:
    assert hash(-1.0) == hash(-2.0)
    from recollect.functional.binding import bind

    def tag(memory: rc.memory.MLP, lr: float) -> int | None:
        recipe = rc.Recipe(memory=memory, algorithm=rc.algorithm.GradientDescent(lr=lr))
        return bind(recipe, H=1, K=4, V=4).fingerprint

    assert tag(rc.memory.MLP(), 0.5) == tag(rc.memory.MLP(), 0.5)
    assert tag(rc.memory.MLP(), 0.5) != tag(rc.memory.MLP(), 0.25)
    assert tag(rc.memory.MLP(), 0.5) != tag(rc.memory.MLP(depth=3), 0.5)

    @rc.member
    class Shifted(rc.bias.Bias):
        shift: float = rc.fields.number(0.0)

        def loss(self, prediction: Tensor, value: Tensor, gates: object) -> Tensor:
            return 0.5 * (prediction - value + self.shift).square().sum(-1)

    one, two = (rc.Recipe(bias=Shifted(shift=shift)) for shift in (-1.0, -2.0))
    assert hash(one) == hash(two) and one != two
    assert bind(one, H=1, K=4, V=4).fingerprint != bind(two, H=1, K=4, V=4).fingerprint


@torch.no_grad()
def test_cache_of_keys_is_a_copy() -> None:
    recipe = rc.zoo.get("softmax_attention").recipe
    k, v = K[:, :4].clone(), V[:, :4].clone()
    _, state = rc.recall(recipe, Q[:, :4], k, v)
    expected, _ = recall(recipe, 4, 6, state=state)
    k.zero_(), v.zero_()
    assert torch.equal(recall(recipe, 4, 6, state=state)[0], expected)


def test_cache_without_gradients_requires_none() -> None:
    k = K[:, :4].clone().requires_grad_()
    with torch.no_grad():
        _, state = rc.recall(rc.zoo.get("softmax_attention").recipe, Q[:, :4], k, V[:, :4])
    y, _ = recall(rc.zoo.get("softmax_attention").recipe, 4, 6, state=state)
    assert not y.requires_grad


@pytest.mark.parametrize("tokens", [0, 1])
@torch.no_grad()
def test_state_copies_the_initial_memory(tokens: int) -> None:
    recipe = rc.Recipe(
        memory=rc.memory.MLP(residual=False),
        algorithm=rc.algorithm.GradientDescent(lr=0.1, batch_size=4),
    )
    init = [torch.randn(2, *shape) for shape in recipe.shapes(3, 3)]
    _, state = recall(recipe, 0, tokens, initial_memory=init)
    expected, _ = recall(recipe, tokens, 6, state=state)
    for x in init:
        x.zero_()
    assert torch.equal(recall(recipe, tokens, 6, state=state)[0], expected)


def test_layer_frees_prompts_and_recipes() -> None:
    layer = rc.zoo.get("gated_delta_net").build(d_model=16, num_heads=2)
    _, state = layer(torch.randn(1, 500, 16))
    assert state.conv.untyped_storage().nbytes() == state.conv.numel() * 4
    with pytest.raises(AttributeError, match="recipe"):
        layer.recipe = rc.Recipe()


def test_layer_trains_after_a_first_call_in_inference_mode() -> None:
    layer = rc.zoo.get("mamba2").build(d_model=16, num_heads=2)
    x = torch.randn(1, 5, 16)
    with torch.inference_mode():
        layer(x)
    layer(x)[0].sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rc.read(
            rc.Recipe(), torch.ones(1, 1, 2, 3, dtype=torch.long), initial_memory=Q[0, :3]
         ),
         "q must be a floating-point tensor"),
        (lambda: rc.read(rc.Recipe(), [1], initial_memory=Q[0, :3]),
         "q must be a floating-point tensor"),
        (lambda: recall(rc.Recipe(), 0, 6, gates=LR, initial_memory=5),
         "initial_memory must be a tensor"),
        (lambda: recall(rc.Recipe(), 0, 6, gates=LR, initial_memory=[1, 2]),
         "initial_memory must be a tensor"),
        (lambda: rc.read(rc.Recipe(), Q, initial_memory=[3]), "initial_memory must be a tensor"),
        (lambda: recall(rc.Recipe(), 0, 6, gates=LR, chunk_size=True), "chunk_size must be"),
        (lambda: rc.MemoryLayer(8, 2, rc.Recipe(), head_dim=-1), "head_dim must be"),
        (lambda: rc.MemoryLayer(8, 2, rc.Recipe(), head_dim=0), "head_dim must be"),
        (lambda: rc.MemoryLayer(8, "2", rc.Recipe()), "heads must be"),
        (lambda: rc.MemoryLayer(8, 2, rc.Recipe(), value_dim=1.5), "value_dim must be"),
        (lambda: layer()(torch.randn(1, 3, 8), cu_seqlens=torch.tensor([0, 5])), "rise from 0"),
        (lambda: layer()(torch.randn(1, 3, 8), cu_seqlens=[0, 3]), "cu_seqlens must be a tensor"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(call: object, says: str) -> None:
    with pytest.raises((ValueError, rc.RecipeError), match=says) as refused:
        call()
    assert len(str(refused.value)) < 400


LR = {"lr": torch.full((1, 6, 2), 0.5)}


def layer() -> rc.MemoryLayer:
    return rc.MemoryLayer(8, 2, rc.Recipe())


def test_precision_of_a_state() -> None:
    _, state = recall(rc.Recipe(), 0, 6, gates=LR)
    wide = rc.read(rc.Recipe(), Q.double(), state=state)
    same(wide.float(), rc.read(rc.Recipe(), Q, state=state))
    assert math.isfinite(wide.sum())
    with pytest.raises(ValueError, match="the state is float64 and the inputs are not"):
        recall(rc.Recipe(), 0, 6, gates=LR, state=state.to(dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the scripting compiler
def test_loss_with_an_unknown_signature_is_accepted() -> None:
    @rc.member
    class Scripted(rc.bias.Bias):
        loss = staticmethod(torch.jit.script(_squares))

    y, _ = recall(rc.Recipe(bias=Scripted()), 0, 6, gates=LR, engine="reference")
    same(y, recall(rc.Recipe(), 0, 6, gates=LR)[0])


def _squares(prediction: Tensor, value: Tensor, gates: dict[str, Tensor]) -> Tensor:
    return 0.5 * (prediction - value).square().sum(-1)
