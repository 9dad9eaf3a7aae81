"""Every mode in which torch can run a recipe or a layer: exact, or a sentence that says why not.

What these checks hold to the plain call is held to the reference and to finite differences by
`recollect.testing.recipes`; second derivatives are held to finite differences here.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import re

import torch
from torch import Tensor, nn

from recollect.engines.select import select_engine
from recollect.functional.read import read
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import error, loss, require, run, split, worst
from recollect.testing.engines import check_single_gradients
from recollect.testing.inputs import Inputs
from recollect.testing.recipes import kinked, read_gates

__all__ = [
    "check_autocast",
    "check_copies",
    "check_create_graph",
    "check_inference",
    "check_layer",
    "check_layer_gradients",
    "check_subset",
]

ROUNDING = 1e-9
SINGLE = 2e-4
HALF = 0.1  # projections in bfloat16, of 8 bits: three times the worst preset
# What cannot be differentiated twice says this, in these engines only.
ONCE = r"can be differentiated once, not its gradient again: use "
ONCE_ENGINES = {"least_squares", "kernel"}


def tied(x: Inputs) -> Inputs:
    """Keys that depend on queries, values on keys, and memories on both: as in every layer."""
    k = x.k * (1 + 0.1 * x.q.tanh().mean())
    v = x.v * (1 + k.mean())
    init = None if x.init is None else tuple(w * (1 + 0.1 * v.mean()) for w in x.init)
    return dataclasses.replace(x, k=k, v=v, init=init)


def first_gradient(
    recipe: Recipe, leaves: Inputs, *, create_graph: bool, engine: str
) -> dict[str, Tensor]:
    y, state = run(recipe, tied(leaves), engine=engine)
    # A scale that is carried beside the memory is no function of its own.
    scaled = recipe.memory.read.normalize == "floor"
    total = y.square().sum() + (0.0 if scaled else loss(y, state))
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
    total: Tensor, inputs: list[Tensor], recipe: Recipe, engine: str
) -> tuple[Tensor, ...] | None:
    """Gradients of a sum of gradients; ``None`` where the promised sentence is raised."""
    try:
        return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    except RecipeError as error:
        sentence = str(error)
    if engine == "reference":
        known = "kind='spectral'" in sentence
    else:
        known = select_engine(recipe, engine).engine.name in ONCE_ENGINES
    require(known and re.search(ONCE, sentence), f"its gradient has no gradient: {sentence}")
    return None


def check_create_graph(recipe: Recipe, x: Inputs, engine: str) -> None:
    """The first gradient is the plain one; the second is a slope of the first, or the sentence."""
    plain = first_gradient(recipe, x.leaves(), create_graph=False, engine=engine)
    leaves = x.leaves()
    slopes = first_gradient(recipe, leaves, create_graph=True, engine=engine)
    wrong, name = worst({n: a.detach() for n, a in slopes.items()}, plain)
    require(wrong < ROUNDING, f"the gradient of {name} under create_graph is off by {wrong:.1e}")

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
    bends = second_gradient(total, list(named.values()), recipe, engine)
    if bends is None:
        return
    if kinked(recipe):
        return
    bends = [b.detach() for b in bends]
    found = sum(float((b * ways[n]).sum()) for b, n in zip(bends, named, strict=True))
    size = sum(float(b.norm() * ways[n].norm()) for b, n in zip(bends, named, strict=True))

    def at(step: float) -> float:
        moved = x.put({n: a + step * ways[n] for n, a in x.tensors().items()}).leaves()
        gradient = first_gradient(recipe, moved, create_graph=False, engine=engine)
        return sum(float((a.detach() * weights[n]).sum()) for n, a in gradient.items())

    slope = float("nan")
    for h in (1e-4, 1e-5, 1e-7):  # a kink inside the step is met by a smaller one
        slope = (at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h)
        if abs(found - slope) < 1e-5 * max(1.0, abs(slope), size):
            return
    raise AssertionError(
        f"the second derivative is {found:.8g} where the slope of the gradient is {slope:.8g}"
    )


def check_inference(recipe: Recipe, x: Inputs, engine: str) -> None:
    """The same numbers in inference mode, whole and token by token, and out of it again."""
    y, state = run(recipe, x, engine=engine)
    with torch.no_grad():
        y_no_grad, _ = run(recipe, x, engine=engine)
        names = read_gates(recipe)
        asked = {name: x.gates[name] for name in names}
        seen = read(recipe, x.q, gates=asked, state=state, params=x.params)
    with torch.inference_mode():
        inside = x.map(torch.clone)
        y_inference, inference_state = run(recipe, inside, engine=engine)
        pieces, _ = split(recipe, inside, list(range(1, x.T)), [engine])
        gates = {name: inside.gates[name] for name in names}
        late = read(recipe, inside.q, gates=gates, state=inference_state, params=inside.params)
    outside, _ = run(recipe, inside, engine=engine)
    for what, found, expected in (
        ("under no_grad", y_no_grad, y),
        ("in inference mode", y_inference, y),
        ("token by token in inference mode", pieces, y),
        ("of inputs made in inference mode", outside, y),
        ("of rc.read in inference mode", late, seen),
    ):
        wrong = error(found, expected)
        require(wrong < ROUNDING, f"outputs {what} by {engine} are off by {wrong:.1e}")


def check_autocast(recipe: Recipe, x: Inputs) -> None:
    """Float32 stays float32: a memory in half precision would forget."""
    single = x.map(Tensor.float)
    y, state = run(recipe, single)
    with torch.autocast("cpu", torch.bfloat16):
        cast, after = run(recipe, single)
        late, _ = run(recipe, single, causal=bool(recipe.context.restrictions))
    late_plain, _ = run(recipe, single, causal=bool(recipe.context.restrictions))
    alike = all(a.equal(b) for a, b in zip(after.tensors(), state.tensors(), strict=True))
    require(alike and torch.equal(cast, y), "autocast changes float32 outputs or states")
    require(torch.equal(late, late_plain), "autocast changes what is read")


def check_copies(recipe: Recipe, x: Inputs) -> None:
    """Copies and pickles of a recipe and of a state go on as the originals do."""
    cut = x.T // 2
    _, state = run(recipe, x.cut(0, cut))
    graph = any(a.requires_grad for a in state.tensors())
    require(not graph, "a state carries a graph that nobody asked for")
    y, _ = run(recipe, x.cut(cut, x.T), state=state)
    for again in (copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))):
        twin, kept = again(recipe), again(state)
        require(twin == recipe, "a copy of the recipe is another recipe")
        alike = torch.equal(run(twin, x.cut(cut, x.T), state=kept)[0], y)
        require(alike, "a copy of the state goes on differently")


def check_subset(recipe: Recipe, x: Inputs, index: int) -> None:
    """A gradient does not depend on which other inputs ask for one."""
    names = sorted(x.tensors())
    some = random.Random(index).sample(names, min(2, len(names)))
    check_single_gradients(recipe, x, some, ROUNDING)


def check_layer(layer: nn.Module, x: Tensor) -> None:
    """A layer in inference mode, whole and token by token, copied, pickled, and under autocast.

    Args:
        layer: a layer ``(x, state) -> (y, state)``.
        x: tokens ``[B, T, D]`` in float32.
    """
    y, _ = layer(x)
    with torch.inference_mode():
        whole, _ = layer(x)
        kept, pieces = None, []
        for t in range(x.shape[1]):
            piece, kept = layer(x[:, t : t + 1], kept)
            pieces.append(piece)
    for what, found in (("whole", whole), ("token by token", torch.cat(pieces, dim=1))):
        wrong = error(found, y)
        require(wrong < SINGLE, f"a layer's outputs in inference mode, {what}, are off by {wrong}")
    for again in (copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))):
        require(torch.equal(again(layer)(x)[0], y), "a copy of the layer computes something else")
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = layer(x)
    wrong = error(cast.float(), y)
    require(wrong < HALF, f"a layer's outputs under autocast are off by {wrong}")


def check_layer_gradients(layer: nn.Module, x: Tensor) -> None:
    """A layer's gradient under create_graph is its gradient.

    In a layer, everything a memory is given depends on the same tokens and weights.

    Args:
        layer: a layer in float64.
        x: tokens ``[B, T, D]`` in float64.
    """
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
        wrong = error(again, plain)
        require(wrong < ROUNDING, f"a layer's gradient under create_graph is off by {wrong:.1e}")
