"""Checks of the declarations of a memory: linear, chain, output map, bias, bases, residual."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from recollect.choices.memory.base import Memory, Read, Stack
from recollect.choices.memory.maps import activation, append_ones
from recollect.choices.memory.norms import NORM_EPS
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import require
from recollect.testing.declared import normal, require_equal
from recollect.testing.inputs import draw_params

__all__ = ["check_memory"]


def check_memory(memory: Memory) -> str | None:
    """``linear`` is W x only; a chain is its maps and bases, its activation and ``output_map``.

    A memory without ``needs_init`` has a gradient at zero.
    """
    if memory.degree is not None:
        return "it keeps associations and has no weights"
    if memory.has_field("read"):  # the read rule is not part of the prediction
        memory = dataclasses.replace(memory, read=Read())  # type: ignore[call-arg]
    title = memory.title
    weights = [normal(1, 1, *shape, seed=3 + i) for i, shape in enumerate(memory.shapes(4, 4))]
    sizes = Recipe().axes(4, 4) | memory.axes(4, 4, 4)
    g = torch.Generator().manual_seed(3)
    params = draw_params(memory, sizes, g)
    x = normal(1, 1, 5, 4, seed=12)
    prediction = memory.bind(4, 4)(weights, x, x, params)
    require(
        prediction.shape == x.shape,
        f"{title}: forward gives {tuple(prediction.shape)} and not [..., V]",
    )
    if memory.linear:
        W, is_elementwise = weights[0], memory.is_elementwise
        product = "w ⊙ x" if is_elementwise else "W x"
        require_equal(
            prediction,
            W.unsqueeze(-2) * x if is_elementwise else x @ W.mT,
            f"{title} declares linear, which is M(W; x) = {product}, and its forward is {{error}} "
            "off",
        )
    if not memory.needs_init:
        zeros = [torch.zeros_like(w).requires_grad_() for w in weights]
        outputs = memory.bind(4, 4)(zeros, x, x, params)
        slopes = torch.autograd.grad(outputs.sum(), zeros, materialize_grads=True)
        require(
            any(bool(slope.any()) for slope in slopes),
            f"{title} declares needs_init=False, and a memory of zeros has no gradient",
        )
    if not isinstance(memory, Stack):
        return None
    bias = any(linear_map.bias for linear_map in memory.maps(4, 4))
    require(memory.bias == bias, f"{title} declares bias={memory.bias}, and its maps do not")
    if memory.base_params:
        shapes = {name: tuple(x.shape[1:]) for name, x in params.items()}
        base_shapes = [shapes.get(name) for name in memory.base_params]
        require(
            base_shapes == [tuple(W.shape[2:]) for W in weights],
            f"{title} declares base_params={memory.base_params!r}, and there has to be a param of "
            "its shape for every map, in the maps' order",
        )
    if memory.chain_activation is not None:
        bases = [params[name] for name in memory.base_params] or [torch.zeros(())] * len(weights)
        maps = [W + base for W, base in zip(weights, bases, strict=True)]
        h = x
        for index, (W, linear_map) in enumerate(zip(maps, memory.maps(4, 4), strict=True)):
            inputs = activation(memory.chain_activation)(h) if index else h
            h = append_ones(inputs, linear_map.bias) @ W.mT
        require_equal(
            prediction,
            memory.output_map(h, x, params),
            f"{title} declares chain_activation={memory.chain_activation!r}, which is its maps "
            "with that activation between them and output_map after the last, and compute is "
            "{error} off",
        )
        if not memory.has_output_map:
            require_equal(
                memory.output_map(h, x, params),
                x + h if memory.residual else h,
                f"{title} declares has_output_map=False, and its output_map does more than add the "
                "raw key: it is {error} off",
            )
        if memory.output_norm == "layer":
            axes = {param.name: param.axes for param in memory.params()}
            require(
                all(axes.get(f"norm_{name}") == ("V",) for name in ("weight", "bias")),
                f"{title} declares output_norm='layer', and has no params norm_weight and "
                "norm_bias of axes ('V',)",
            )
            weight, shift = (params[f"norm_{name}"].unsqueeze(1) for name in ("weight", "bias"))
            normed = weight * functional.layer_norm(h, h.shape[-1:], eps=NORM_EPS) + shift
            sentence = f"{title} declares output_norm='layer', and compute is {{error}} off"
            require_equal(prediction, x + normed if memory.residual else normed, sentence)
    change = memory.bind(4, 4)(weights, x, x + 1.0, params) - prediction
    require_equal(
        change,
        torch.full_like(prediction, float(memory.residual)),
        f"{title} declares residual={memory.residual}, and what the raw key adds is {{error}} off",
    )
    return None
