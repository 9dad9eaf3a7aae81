"""Cases of an MLP memory and of titans-pytorch, with equal work outside of the memory.

titans-pytorch is timed with two settings. With ``chunk_size=1, batch_size=b`` every token has its
own gates, as in the paper and in recollect. With ``chunk_size=b, batch_size=b`` b tokens share one
set of gates. The case of recollect uses the projections, the gates and the initial weights of the
module of titans-pytorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recollect.benchmarks.cases.recall import Shape, forward_backward
from recollect.benchmarks.results import Case
from recollect.choices.algorithm.descent import Momentum
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe

__all__ = ["mlp_recipe", "titans_case"]


def mlp_recipe(batch_size: int) -> Recipe:
    """Return an MLP memory with momentum and decay in inner batches."""
    algorithm = Momentum(batch_size=batch_size)
    return Recipe(memory=MLP(residual=False), retention=Decay(), algorithm=algorithm)


def titans_case(
    shape: Shape, *, name: str, batch_size: int, chunk_size: int | None = None, backward: bool
) -> Case:
    """Return a case of the module of titans-pytorch, or of recollect in its place.

    ``chunk_size`` is the number of tokens that share their gates in titans-pytorch. ``None`` times
    recollect between the projections of the module. A backward pass computes the gradients of
    inputs and weights.
    """
    if shape.H != 1:
        raise ValueError("the suite 'titans' times one memory: omit --heads or set it to 1")

    def make() -> Callable[[], object]:
        module = _neural_memory(batch_size, chunk_size or 1, shape.K).to(shape.device)
        x = torch.randn(shape.B, shape.T, shape.K, generator=torch.Generator().manual_seed(1))
        x = x.to(shape.device).requires_grad_()
        recipe = mlp_recipe(batch_size)

        def forward() -> Tensor:
            return module(x)[0] if chunk_size else _recall(recipe, module, x)

        if backward:
            return forward_backward(forward, [x, *module.parameters()])
        return torch.no_grad()(forward)

    return Case(name=name, make=make)


def _neural_memory(batch_size: int, chunk_size: int, dim: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from titans_pytorch import NeuralMemory
        except ImportError:
            raise RuntimeError(
                "the suite 'titans' compares with titans-pytorch: pip install titans-pytorch"
            ) from None
    torch.manual_seed(0)
    return NeuralMemory(
        dim=dim,
        chunk_size=chunk_size,
        batch_size=batch_size,
        momentum=True,
        mem_model_norm_add_residual=False,
        qk_rmsnorm=True,
        default_model_kwargs={"depth": 2, "expansion_factor": 4.0},
        # The default biases halve the weights at every token: after 256, they are subnormal.
        init_adaptive_step_bias=-3.0,
        init_decay_bias=-5.0,
    )


def _recall(recipe: Recipe, module: Any, x: Tensor) -> Tensor:
    """Return the module's output with ``chunk_size=1``, computed by `recollect.recall`."""
    to_store, to_read = module.store_norm(x), module.retrieve_norm(x)
    q = module.q_norm(module.split_heads(module.to_queries(to_read))).transpose(1, 2)
    k = module.k_norm(module.split_kv_heads(module.to_keys(to_store))).transpose(1, 2)
    v = module.split_kv_heads(module.to_values(to_store)).transpose(1, 2)
    gates = {
        # Its loss is the mean of the squared errors of the K channels, ours is half of their sum.
        "lr": module.to_adaptive_step[0](to_store).sigmoid() * 2 / x.shape[-1],
        "log_decay": (1 - module.to_decay_factor[0](to_store).sigmoid()).log(),
        "momentum": module.to_momentum[0](to_store).sigmoid(),
    }
    weights = [w.transpose(-1, -2) for w in module.memory_model_parameters]
    # The module computes its final state at every call. The default of `recall` does, too.
    y, _ = recall(recipe, q, k, v, gates, initial_memory=weights)
    return module.combine_heads(module.merge_heads(y.transpose(1, 2)))
