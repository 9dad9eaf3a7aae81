"""Every mode in which torch can run a layer gives exact results or one error.

The plain call is the oracle here; `test_fuzz` and `test_engines` compare it with the reference and
with finite differences. Second derivatives are compared with finite differences here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.testing.modes import (
    check_autocast,
    check_copies,
    check_create_graph,
    check_inference,
    check_layer,
    check_layer_gradients,
    check_subset,
)

CI, ALL = 100, 1000

PRESETS = {name: rc.zoo.get(name).recipe for name in rc.zoo.names()}
RANDOM = {f"{index}": recipe for index, recipe in generate.valid(CI, seed=7)}
METHODS = ("auto", "reference")

ROUNDED_OFTEN = ("atlas_per_token", "memora_per_token")
"""Presets whose gradients pass Newton–Schulz, or a softmax of logits times 64, at every token.

Autocast rounds these products of torch.
"""


def inputs(recipe: rc.Recipe, name: str) -> generate.Inputs:
    if name in PRESETS:
        K, V = generate.sizes(recipe, random.Random(0))
        return generate.inputs(recipe, B=1, T=5, H=2, K=K, V=V)
    x = generate.small_inputs(recipe, int(name), longest=5)
    y, _ = generate.run_recall(recipe, x)
    return x if y.abs().amax() < 1e3 else generate.scaled_down(recipe, x)


def params(recipes: dict[str, rc.Recipe]) -> list[pytest.param]:
    slow = PRESETS.keys() - {*generate.FIRST}  # drawn recipes have the mechanisms of the others
    return [
        pytest.param(name, recipe, id=name, marks=[pytest.mark.slow] * (name in slow))
        for name, recipe in recipes.items()
    ]


# Half of the drawn recipes below use the reference.
@pytest.mark.parametrize("method", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "recipe"), params(PRESETS))
def test_create_graph_changes_no_gradient(name: str, recipe: rc.Recipe, method: str) -> None:
    check_create_graph(recipe, inputs(recipe, name), method)


@pytest.mark.parametrize(("name", "recipe"), params(PRESETS))
def test_inference_mode_runs(name: str, recipe: rc.Recipe) -> None:
    for method in METHODS:
        check_inference(recipe, inputs(recipe, name), method)


@pytest.mark.parametrize(("name", "recipe"), params(PRESETS))
def test_autocast_copies_and_subsets(name: str, recipe: rc.Recipe) -> None:
    x = inputs(recipe, name)
    check_autocast(recipe, x)
    check_copies(recipe, x)


@pytest.mark.parametrize(("name", "recipe"), params(PRESETS))
def test_gradient_under_autocast(name: str, recipe: rc.Recipe) -> None:
    """Written-out backward passes keep their precision; torch rounds its own products."""
    K, V = generate.sizes(recipe, random.Random(0))
    x = generate.inputs(recipe, B=1, T=5, H=2, K=K, V=V, dtype=torch.float32).with_grad()
    y, _ = generate.run_recall(recipe, x)
    leaves = [x.q, x.k, x.v]
    outside = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True, allow_unused=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    for a, b in zip(inside, outside, strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert a.isfinite().all()
        assert a.dtype == b.dtype
        if name not in ROUNDED_OFTEN:
            torch.testing.assert_close(a, b, rtol=0, atol=0.05 * float(b.abs().amax()) + 1e-6)


@pytest.mark.parametrize(("name", "recipe"), params(RANDOM))
def test_random_recipes_in_every_mode(name: str, recipe: rc.Recipe) -> None:
    x = inputs(recipe, name)
    if generate.is_ill_posed(recipe):
        return
    check_create_graph(recipe, x, METHODS[int(name) % 2])
    check_inference(recipe, x, METHODS[int(name) % 2])
    check_autocast(recipe, x)
    check_copies(recipe, x)
    check_subset(recipe, x, int(name))


# -- layers and models -----------------------------------------------------------------------------


def build_layer(name: str) -> rc.MemoryLayer:
    torch.manual_seed(0)
    return rc.zoo.get(name).build(d_model=32, num_heads=2)


@pytest.mark.parametrize("name", generate.first_presets())
def test_a_layer_in_every_mode(name: str) -> None:
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    check_layer(build_layer(name), x)


@pytest.mark.parametrize("name", generate.first_presets())
def test_layer_gradient_under_create_graph(name: str) -> None:
    """Queries, keys, values and gates of a layer depend on one sequence and one set of weights."""
    layer = build_layer(name).double()
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check_layer_gradients(layer, x)


def test_generate_under_inference_mode() -> None:
    """A deep memory, a kernel memory with an MLP, and a memory with its own decoding path."""
    for name in ("yaad", "deep_transformer", "titans"):
        torch.manual_seed(0)
        config = rc.lm.RecollectConfig.from_recipes(
            name, vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = rc.lm.RecollectForCausalLM(config).eval()
        prompt = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
        with torch.inference_mode():
            result = model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(result, expected), name


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda a: f(a).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


# Torch compiles its rules on the first dual tensor by a deprecated function.
TORCH_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@TORCH_WARNS
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_raise(transform: str) -> None:
    recipe = rc.Recipe()
    x = generate.inputs(recipe, B=2, T=3, K=4, V=4)
    layer = build_layer("delta_net")

    def recalled(k: Tensor) -> Tensor:
        return rc.recall(recipe, x.q, k, x.v, x.gates)[0]

    def reads(q: Tensor) -> Tensor:
        return rc.read(recipe, q, initial_memory=torch.zeros(2, 4, 4, dtype=torch.float64))

    tokens = torch.randn(2, 1, 4, 32)
    for f, a in ((recalled, x.k), (reads, x.q), (lambda a: layer(a)[0], tokens)):
        a = a if transform == "vmap" else a[:, :3].flatten(0, 1) if a is tokens else a
        with pytest.raises(RuntimeError, match=r"inside the transforms of torch\.func"):
            TRANSFORMS[transform](f, a)


@TORCH_WARNS
def test_forward_mode_derivatives_raise() -> None:
    recipe = rc.Recipe()
    x = generate.inputs(recipe, B=1, T=3, K=4, V=4)
    layer = build_layer("delta_net")
    with torch.autograd.forward_ad.dual_level():
        k = torch.autograd.forward_ad.make_dual(x.k, torch.ones_like(x.k))
        with pytest.raises(RuntimeError, match="does not support forward-mode derivatives"):
            rc.recall(recipe, x.q, k, x.v, x.gates)
        tokens = torch.randn(1, 3, 32)
        with pytest.raises(RuntimeError, match="does not support forward-mode derivatives"):
            layer(torch.autograd.forward_ad.make_dual(tokens, torch.ones_like(tokens)))
        layer(tokens)  # no error without a tangent


@pytest.mark.slow
def test_many_random_recipes_in_every_mode() -> None:
    for index, recipe in generate.valid(ALL, seed=8):
        if generate.is_ill_posed(recipe):
            continue
        x = inputs(recipe, str(index))
        for method in METHODS:
            check_create_graph(recipe, x, method)
            check_inference(recipe, x, method)
        check_autocast(recipe, x)
        check_subset(recipe, x, index)
