"""Checks of every mode in which torch can run a recipe or a layer.

Results are compared with those of a plain call, which `recollect.testing.recipes` compares with the
reference and finite differences. Second derivatives are compared with finite differences here.
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
from recollect.state.state import State
from recollect.testing.compare import (
    finite_difference_error,
    gradients_of,
    random_projection,
    require,
    require_close,
    run_in_pieces,
    run_recall,
)
from recollect.testing.engines import check_single_gradients
from recollect.testing.inputs import Inputs
from recollect.testing.recipes import has_straight_through

__all__ = [
    "check_autocast",
    "check_copies",
    "check_create_graph",
    "check_inference",
    "check_layer",
    "check_layer_gradients",
    "check_subset",
]

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 2e-4
HALF_TOLERANCE = 0.1  # projections in bfloat16, of 8 bits: three times the worst preset
NO_DOUBLE_BACKWARD_MESSAGE = r"can be differentiated once, not its gradient again: use "
NO_DOUBLE_BACKWARD_ENGINES = {"least_squares", "kernel"}


def dependent_inputs(x: Inputs) -> Inputs:
    """Make keys depend on queries, values on keys, and memories on both, as in every layer."""
    k = x.k * (1 + 0.1 * x.q.tanh().mean())
    v = x.v * (1 + k.mean())
    init = None if x.init is None else tuple(w * (1 + 0.1 * v.mean()) for w in x.init)
    return dataclasses.replace(x, k=k, v=v, init=init)


def first_gradient(
    recipe: Recipe, leaves: Inputs, *, create_graph: bool, engine: str
) -> dict[str, Tensor]:
    """Return the gradient of a projection of outputs and state by the name of each input."""
    y, state = run_recall(recipe, dependent_inputs(leaves), engine=engine)
    # A state with a separate scale is no function of the inputs.
    has_scale = recipe.memory.read.normalize == "floor"
    total = y.square().sum() + (0.0 if has_scale else random_projection(y, state))
    return gradients_of(total, leaves, create_graph=create_graph)


def second_gradient(
    total: Tensor, leaves: Inputs, recipe: Recipe, engine: str
) -> dict[str, Tensor] | None:
    """Return the gradient of a sum of gradients; ``None`` if the documented error is raised."""
    try:
        return gradients_of(total, leaves)
    except RecipeError as error:
        sentence = str(error)
    if engine == "reference":
        is_documented = "kind='spectral'" in sentence
    else:
        selected = select_engine(recipe, engine).engine.name
        is_documented = selected in NO_DOUBLE_BACKWARD_ENGINES
    require(
        is_documented and re.search(NO_DOUBLE_BACKWARD_MESSAGE, sentence),
        f"its gradient has no gradient: {sentence}",
    )
    return None


def check_create_graph(recipe: Recipe, x: Inputs, engine: str) -> None:
    """The first gradient is the plain one. The second is a slope of the first, or is refused."""
    plain = first_gradient(recipe, x.with_grad(), create_graph=False, engine=engine)
    leaves = x.with_grad()
    slopes = first_gradient(recipe, leaves, create_graph=True, engine=engine)
    subject = "the gradient of {name} under create_graph is"
    require_close({n: a.detach() for n, a in slopes.items()}, plain, TOLERANCE, subject)

    g = torch.Generator().manual_seed(5)
    weights = {n: torch.randn(a.shape, generator=g, dtype=a.dtype) for n, a in slopes.items()}
    # Links may have kinks at a memory of zeros, which the direction does not change.
    directions = {
        name: torch.randn(a.shape, generator=g, dtype=a.dtype) * a.detach()
        for name, a in leaves.tensors().items()
    }
    total = sum(((a * weights[n]).sum() for n, a in slopes.items()), torch.zeros(()))
    if not total.requires_grad:
        return
    second = second_gradient(total, leaves, recipe, engine)
    if second is None or has_straight_through(recipe):
        return

    def project(step: float) -> float:
        tensors = {name: a + step * directions[name] for name, a in x.tensors().items()}
        moved = x.replace_tensors(tensors).with_grad()
        gradient = first_gradient(recipe, moved, create_graph=False, engine=engine)
        return sum(float((a.detach() * weights[name]).sum()) for name, a in gradient.items())

    derivative = sum(float((a.detach() * directions[n]).sum()) for n, a in second.items())
    size = sum(float(a.norm() * directions[name].norm()) for name, a in second.items())
    quotient = finite_difference_error(project, derivative, size, (1e-4, 1e-5, 1e-7))
    require(
        quotient is None,
        f"the second derivative is {derivative:.8g} where the slope of the gradient is "
        f"{quotient or 0.0:.8g}",
    )


def check_inference(recipe: Recipe, x: Inputs, engine: str) -> None:
    """Outputs in inference mode, of all tokens and token by token, and after it, are equal."""

    def read_all(inputs: Inputs, state: State) -> Tensor:
        gates = {name: inputs.gates[name] for name in recipe.read_gates}
        return read(recipe, inputs.q, gates=gates, state=state, params=inputs.params)

    y, state = run_recall(recipe, x, engine=engine)
    with torch.no_grad():
        y_no_grad, _ = run_recall(recipe, x, engine=engine)
        expected_reads = read_all(x, state)
    with torch.inference_mode():
        copies = x.map_tensors(torch.clone)
        y_inference, inference_state = run_recall(recipe, copies, engine=engine)
        y_pieces, _ = run_in_pieces(recipe, copies, list(range(1, x.T)), [engine])
        reads = read_all(copies, inference_state)
    y_outside, _ = run_recall(recipe, copies, engine=engine)
    for mode, result, expected in (
        ("under no_grad", y_no_grad, y),
        ("in inference mode", y_inference, y),
        ("token by token in inference mode", y_pieces, y),
        ("of inputs made in inference mode", y_outside, y),
        ("of rc.read in inference mode", reads, expected_reads),
    ):
        require_close(result, expected, TOLERANCE, f"outputs {mode} by {engine} are")


def check_autocast(recipe: Recipe, x: Inputs) -> None:
    """Float32 stays float32, since a memory in half precision would forget."""
    single, causal = x.map_tensors(Tensor.float), bool(recipe.context.restrictions)
    y, state = run_recall(recipe, single)
    expected_reads, _ = run_recall(recipe, single, causal=causal)
    with torch.autocast("cpu", torch.bfloat16):
        autocast_y, autocast_state = run_recall(recipe, single)
        reads, _ = run_recall(recipe, single, causal=causal)
    pairs = zip(autocast_state.tensors(), state.tensors(), strict=True)
    is_equal = torch.equal(autocast_y, y) and all(a.equal(b) for a, b in pairs)
    require(is_equal, "autocast changes float32 outputs or states")
    require(torch.equal(reads, expected_reads), "autocast changes the outputs of reads")


def check_copies(recipe: Recipe, x: Inputs) -> None:
    """Copies and pickles of a recipe and of a state give equal outputs."""
    cut = x.T // 2
    tail = x.slice_tokens(cut, x.T)
    _, state = run_recall(recipe, x.slice_tokens(0, cut))
    has_graph = any(a.requires_grad for a in state.tensors())
    require(not has_graph, "a state requires gradients, and no input does")
    y, _ = run_recall(recipe, tail, state=state)
    for make_copy in (copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))):
        recipe_copy = make_copy(recipe)
        require(recipe_copy == recipe, "a copy of the recipe is another recipe")
        copy_y, _ = run_recall(recipe_copy, tail, state=make_copy(state))
        require(torch.equal(copy_y, y), "a copy of the state gives other outputs")


def check_subset(recipe: Recipe, x: Inputs, index: int) -> None:
    """A gradient does not depend on which other inputs require one."""
    names = sorted(x.tensors())
    sample = random.Random(index).sample(names, min(2, len(names)))
    check_single_gradients(recipe, x, sample, TOLERANCE)


def check_layer(layer: nn.Module, x: Tensor) -> None:
    """A layer gives equal outputs in inference mode, token by token, copied, and under autocast."""
    y, _ = layer(x)
    with torch.inference_mode():
        y_inference, _ = layer(x)
        state, pieces = None, []
        for token in x.split(1, dim=1):
            piece, state = layer(token, state)
            pieces.append(piece)
    subject = "a layer's outputs in inference mode are"
    require_close(y_inference, y, FLOAT32_TOLERANCE, subject)
    subject = "a layer's outputs in inference mode, token by token, are"
    require_close(torch.cat(pieces, dim=1), y, FLOAT32_TOLERANCE, subject)
    for make_copy in (copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))):
        copy_y, _ = make_copy(layer)(x)
        require(torch.equal(copy_y, y), "a copy of the layer computes something else")
    with torch.autocast("cpu", torch.bfloat16):
        autocast_y, _ = layer(x)
    subject = "a layer's outputs under autocast are"
    require_close(autocast_y.float(), y, HALF_TOLERANCE, subject)


def check_layer_gradients(layer: nn.Module, x: Tensor) -> None:
    """The gradient of a layer in float64 under create_graph is its gradient.

    In a layer, all arguments of the memory depend on the same tokens and weights.
    """
    inputs = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    plain, with_graph = (
        torch.autograd.grad(
            layer(x)[0].square().sum(),
            inputs,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
        for create_graph in (False, True)
    )
    for result, expected in zip(with_graph, plain, strict=True):
        subject = "a layer's gradient under create_graph is"
        require_close(result, expected, TOLERANCE, subject)
