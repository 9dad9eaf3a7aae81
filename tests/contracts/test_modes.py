"""Every mode in which torch can run a layer: exact in each, or one sentence that says why not.

What these tests hold to the plain call is held to the reference and to finite differences by
`test_fuzz` and `test_engines`; second derivatives are held to finite differences here.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import re
from collections.abc import Callable

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.select import select

CI, ALL = 200, 1000
ROUNDING = 1e-9
SINGLE = 2e-4
# What cannot be differentiated twice says this, in these engines only.
ONCE = r"can be differentiated once, not its gradient again: use "
ONCE_ENGINES = {"least_squares", "kernel"}

PRESETS = {name: rc.zoo.get(name).recipe for name in rc.zoo.names()}
DRAWN = {f"{index}": recipe for index, recipe in generate.valid(CI, seed=7)}
METHODS = ("auto", "reference")


def inputs(recipe: rc.Recipe, name: str) -> generate.Inputs:
    if name in PRESETS:
        K, V = generate.sizes(recipe, random.Random(0))
        return generate.inputs(recipe, B=1, T=5, H=2, K=K, V=V)
    x = generate.small_inputs(recipe, int(name), longest=5)
    y, _ = generate.run(recipe, x)
    return x if y.abs().amax() < 1e3 else generate.smaller(recipe, x)


def every(recipes: dict[str, rc.Recipe]) -> list[pytest.param]:
    return [pytest.param(name, recipe, id=name) for name, recipe in recipes.items()]


def tied(x: generate.Inputs) -> generate.Inputs:
    """Keys that depend on queries, values on keys, and memories on both: as in every layer."""
    k = x.k * (1 + 0.1 * x.q.tanh().mean())
    v = x.v * (1 + k.mean())
    init = None if x.init is None else tuple(w * (1 + 0.1 * v.mean()) for w in x.init)
    return dataclasses.replace(x, k=k, v=v, init=init)


def first_gradient(
    recipe: rc.Recipe, leaves: generate.Inputs, *, create_graph: bool, method: str
) -> dict[str, Tensor]:
    y, state = generate.run(recipe, tied(leaves), method=method)
    # A scale that is carried beside the memory is no function of its own.
    scaled = recipe.memory.read.normalize == "floor"
    total = y.square().sum() + (0.0 if scaled else generate.loss(y, state))
    named = leaves.tensors()
    if not total.requires_grad:
        return {name: torch.zeros_like(a) for name, a in named.items()}
    found = torch.autograd.grad(
        total,
        list(named.values()),
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(named, found, strict=True))


def second_gradient(
    total: Tensor, inputs: list[Tensor], recipe: rc.Recipe, method: str
) -> tuple[Tensor, ...] | None:
    """Gradients of a sum of gradients; ``None`` where the promised sentence is raised."""
    try:
        return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    except rc.RecipeError as error:
        sentence = str(error)
    if method == "reference":
        assert "kind='spectral'" in sentence
    else:
        assert select(recipe, method).engine.name in ONCE_ENGINES
    assert re.search(ONCE, sentence)
    return None


def check_create_graph(recipe: rc.Recipe, x: generate.Inputs, method: str) -> None:
    """The first gradient is the plain one; the second is a slope of the first, or the sentence."""
    plain = first_gradient(recipe, x.leaves(), create_graph=False, method=method)
    leaves = x.leaves()
    slopes = first_gradient(recipe, leaves, create_graph=True, method=method)
    wrong, name = generate.worst({n: a.detach() for n, a in slopes.items()}, plain)
    assert wrong < ROUNDING, f"gradient of {name} under create_graph: {wrong:.1e}"

    g = torch.Generator().manual_seed(5)

    def direction(a: Tensor) -> Tensor:
        # A memory of zeros is where links have kinks: stay there.
        return torch.randn(a.shape, generator=g, dtype=a.dtype) * a.detach()

    weights = {n: torch.randn(a.shape, generator=g, dtype=a.dtype) for n, a in slopes.items()}
    ways = {n: direction(a) for n, a in leaves.tensors().items()}
    total = sum(((a * weights[n]).sum() for n, a in slopes.items()), torch.zeros(()))
    if not total.requires_grad:
        return
    named = leaves.tensors()
    bends = second_gradient(total, list(named.values()), recipe, method)
    if bends is None:
        return
    if any(not getattr(part, "smooth", True) for part in generate.parts_of(recipe)):
        return  # a gradient that stands in for the slope
    found = sum(float((b * ways[n]).sum()) for b, n in zip(bends, named, strict=True))
    size = sum(float(b.norm() * ways[n].norm()) for b, n in zip(bends, named, strict=True))

    def at(step: float) -> float:
        moved = x.put({n: a + step * ways[n] for n, a in x.tensors().items()}).leaves()
        here = first_gradient(recipe, moved, create_graph=False, method=method)
        return sum(float((a * weights[n]).sum()) for n, a in here.items())

    slope = float("nan")
    for h in (1e-4, 1e-5, 1e-7):  # a kink inside the step is met by a smaller one
        slope = (at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h)
        if abs(found - slope) < 1e-5 * max(1.0, abs(slope), size):
            return
    raise AssertionError(f"second derivative {found:.8g}, slope of the gradient {slope:.8g}")


def check_inference(recipe: rc.Recipe, x: generate.Inputs, method: str) -> None:
    """The same numbers in inference mode, whole and token by token, and out of it again."""
    y, state = generate.run(recipe, x, method=method)
    with torch.no_grad():
        quiet, _ = generate.run(recipe, x, method=method)
        names = {gate.name for gate in recipe.retention.gates() if "decay" not in gate.name}
        names |= {name for part in recipe.context.within for name in part.reads}
        asked = {name: x.gates[name] for name in names}
        seen = rc.read(recipe, x.q, gates=asked, state=state, params=x.params)
    with torch.inference_mode():
        inside = x.map(torch.clone)
        whole, after = generate.run(recipe, inside, method=method)
        pieces, _ = generate.split(recipe, inside, list(range(1, x.T)), [method])
        gates = {name: inside.gates[name] for name in names}
        read = rc.read(recipe, inside.q, gates=gates, state=after, params=inside.params)
    outside, _ = generate.run(recipe, inside, method=method)
    for found in (quiet, whole, pieces, outside):
        assert generate.error(found, y) < ROUNDING
    assert generate.error(read, seen) < ROUNDING


def check_autocast(recipe: rc.Recipe, x: generate.Inputs) -> None:
    """Float32 stays float32: a memory in half precision would forget."""
    single = x.map(Tensor.float)
    y, state = generate.run(recipe, single)
    with torch.autocast("cpu", torch.bfloat16):
        cast, after = generate.run(recipe, single)
        late, _ = generate.run(recipe, single, causal=bool(recipe.context.within))
    late_plain, _ = generate.run(recipe, single, causal=bool(recipe.context.within))
    assert torch.equal(cast, y)
    assert torch.equal(late, late_plain)
    assert all(a.equal(b) for a, b in zip(after.tensors(), state.tensors(), strict=True))


def check_copies(recipe: rc.Recipe, x: generate.Inputs) -> None:
    """Copies and pickles of a recipe and of a state go on as the originals do."""
    cut = x.T // 2
    _, state = generate.run(recipe, x.cut(0, cut))
    assert not any(a.requires_grad for a in state.tensors()), "nobody asked for a graph"
    y, _ = generate.run(recipe, x.cut(cut, x.T), state=state)
    for again in (copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))):
        twin, kept = again(recipe), again(state)
        assert twin == recipe
        assert torch.equal(generate.run(twin, x.cut(cut, x.T), state=kept)[0], y)


def check_subset(recipe: rc.Recipe, x: generate.Inputs, index: int) -> None:
    """A gradient does not depend on which other inputs ask for one."""
    _, _, slopes = generate.gradients(recipe, x)
    names = sorted(slopes)
    for name in random.Random(index).sample(names, min(2, len(names))):
        leaf = x.tensors()[name].clone().requires_grad_()
        y, state = generate.run(recipe, x.put({name: leaf}))
        total = generate.loss(y, state)
        if not total.requires_grad:
            assert not slopes[name].any()
            continue
        (slope,) = torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)
        assert generate.error(slope, slopes[name]) < ROUNDING, name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "recipe"), every(PRESETS))
def test_create_graph_changes_no_gradient(name: str, recipe: rc.Recipe, method: str) -> None:
    check_create_graph(recipe, inputs(recipe, name), method)


@pytest.mark.parametrize(("name", "recipe"), every(PRESETS))
def test_inference_mode_runs(name: str, recipe: rc.Recipe) -> None:
    for method in METHODS:
        check_inference(recipe, inputs(recipe, name), method)


@pytest.mark.parametrize(("name", "recipe"), every(PRESETS))
def test_autocast_copies_and_subsets(name: str, recipe: rc.Recipe) -> None:
    x = inputs(recipe, name)
    check_autocast(recipe, x)
    check_copies(recipe, x)


@pytest.mark.parametrize(("name", "recipe"), every(DRAWN))
def test_random_recipes_in_every_mode(name: str, recipe: rc.Recipe) -> None:
    x = inputs(recipe, name)
    if generate.ill_posed(recipe):
        return
    check_create_graph(recipe, x, METHODS[int(name) % 2])
    check_inference(recipe, x, METHODS[int(name) % 2])
    check_autocast(recipe, x)
    check_copies(recipe, x)
    check_subset(recipe, x, int(name))


# -- layers and models -----------------------------------------------------------------------------


def layer_of(name: str) -> rc.MemoryLayer:
    torch.manual_seed(0)
    return rc.zoo.get(name).build(d_model=32, heads=2)


@pytest.mark.parametrize("name", PRESETS)
def test_a_layer_in_every_mode(name: str) -> None:
    layer, g = layer_of(name), torch.Generator().manual_seed(1)
    x = torch.randn(1, 6, 32, generator=g)
    y, _ = layer(x)
    with torch.inference_mode():
        whole, _ = layer(x)
        kept, pieces = None, []
        for t in range(x.shape[1]):
            piece, kept = layer(x[:, t : t + 1], kept)
            pieces.append(piece)
    assert generate.error(whole, y) < SINGLE
    assert generate.error(torch.cat(pieces, dim=1), y) < SINGLE
    assert torch.equal(copy.deepcopy(layer)(x)[0], y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], y)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = layer(x)
    assert cast.isfinite().all()


@pytest.mark.parametrize("name", PRESETS)
def test_a_layers_gradient_under_create_graph_is_its_gradient(name: str) -> None:
    """In a layer, everything a memory is given depends on the same tokens and weights."""
    layer = layer_of(name).double()
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    found = [
        torch.autograd.grad(
            layer(x)[0].square().sum(),
            wanted,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        for create_graph in (False, True)
    ]
    for plain, again in zip(*found, strict=True):
        assert generate.error(again, plain) < ROUNDING


def test_generate_under_inference_mode() -> None:
    """A deep memory, a kernel memory with an MLP, and one that decodes by its own path."""
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
            found = model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, expected), name


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda a: f(a).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


# Torch compiles rules of its own on the first dual tensor, by means that it has deprecated.
TORCH_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@TORCH_WARNS
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_are_refused_in_a_sentence(transform: str) -> None:
    recipe = rc.Recipe()
    x = generate.inputs(recipe, B=2, T=3, K=4, V=4)
    layer = layer_of("delta_net")

    def recalled(k: Tensor) -> Tensor:
        return rc.recall(recipe, x.q, k, x.v, x.gates)[0]

    def reads(q: Tensor) -> Tensor:
        return rc.read(recipe, q, init=torch.zeros(2, 4, 4, dtype=torch.float64))

    tokens = torch.randn(2, 1, 4, 32)
    for f, a in ((recalled, x.k), (reads, x.q), (lambda a: layer(a)[0], tokens)):
        a = a if transform == "vmap" else a[:, :3].flatten(0, 1) if a is tokens else a
        with pytest.raises(RuntimeError, match=r"inside the transforms of torch\.func"):
            TRANSFORMS[transform](f, a)


@TORCH_WARNS
def test_forward_mode_derivatives_are_refused_in_a_sentence() -> None:
    recipe = rc.Recipe()
    x = generate.inputs(recipe, B=1, T=3, K=4, V=4)
    layer = layer_of("delta_net")
    with torch.autograd.forward_ad.dual_level():
        k = torch.autograd.forward_ad.make_dual(x.k, torch.ones_like(x.k))
        with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            rc.recall(recipe, x.q, k, x.v, x.gates)
        tokens = torch.randn(1, 3, 32)
        with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
            layer(torch.autograd.forward_ad.make_dual(tokens, torch.ones_like(tokens)))
        layer(tokens)  # without a tangent nothing is asked for


@pytest.mark.slow
def test_many_random_recipes_in_every_mode() -> None:
    for index, recipe in generate.valid(ALL, seed=8):
        if generate.ill_posed(recipe):
            continue
        x = inputs(recipe, str(index))
        for method in METHODS:
            check_create_graph(recipe, x, method)
            check_inference(recipe, x, method)
        check_autocast(recipe, x)
        check_subset(recipe, x, index)
