"""Memories of several speeds as loops over tokens, from the weights of the layers (Behrouz et al.).

Each loop is written from the paper's equations, in float64, with gradients by autograd. Inner
batches have a few tokens instead of 16, 64, 256 and 1,024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.blocks.test_self_modifying import self_referential
from tests.zoo.test_systems import D, around, finish, gate
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.blocks import build
from recollect.blocks.mixers import RecipeMixer

N = 13
LEVELS = (2, 3, 5)


def resized(leaf: RecipeMixer) -> RecipeMixer:
    """A recipe with smaller inner batches, and without a convolution."""
    algorithm: Any = leaf.recipe.algorithm
    sizes = {16: 4, **dict(zip((64, 256, 1024), LEVELS, strict=True))}
    if algorithm.batch_size not in sizes:
        return leaf
    changed = replace(algorithm, batch_size=sizes[algorithm.batch_size])
    options = replace(leaf.options, conv_size=0)
    return replace(leaf, recipe=leaf.recipe.replace(algorithm=changed), options=options)


def layer(name: str) -> Any:
    torch.manual_seed(0)
    result = build(rc.zoo.get(name).mixer.map_leaves(resized), D, 2).double()
    with torch.no_grad():  # away from the special values at which learning starts
        for weight in result.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return result


def times(W: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhoi,bhi->bho", W, x)


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()


def level(module: rc.MemoryLayer, x: Tensor, size: int) -> Tensor:
    """θ ← θ − Σ_t η_t r_t ρ_t ∇½‖MLP(k_t) − v_t‖² after each chunk (eq. 71), which reads θ."""
    q, k, v = around(module, x)
    q, k = unit(q), unit(k)
    n = min(size, 8)
    multiple = gate(module, "lr", x).sigmoid()  # of the limit 2/n
    eta = multiple * 2 / n
    assert module.memory is not None
    theta = [w.expand(x.shape[0], *w.shape) for w in module.memory()]
    outputs: list[Tensor] = []
    for first in range(0, x.shape[1], size):
        total = [torch.zeros_like(w) for w in theta]
        discounts: list[Tensor] = []
        for t in range(first, min(first + size, x.shape[1])):
            W2, W1 = theta
            outputs.append(q[:, t] + times(W1, functional.gelu(times(W2, q[:, t]))))
            overlap = torch.zeros_like(eta[:, t])
            for i, u in enumerate(discounts):
                cosine = functional.cosine_similarity(k[:, t], k[:, first + i], dim=-1)
                overlap = overlap + cosine.abs() * u
            discounts.append(1 - overlap / n)
            z = times(W2, k[:, t])
            h = functional.gelu(z)
            error = k[:, t] + times(W1, h) - v[:, t]
            phi = torch.exp(-0.5 * z * z) / (2 * torch.pi) ** 0.5
            slope = 0.5 * (1 + torch.erf(z / 2**0.5)) + z * phi
            delta = slope * torch.einsum("bho,bhoi->bhi", error, W1)
            squares = [a.square().sum(-1) for a in (error, h, delta, k[:, t])]
            rho = squares[0] / (
                squares[0] * squares[1] + squares[2] * squares[3] + 1e-6 * squares[0]
            )
            rate = (eta[:, t] * discounts[-1].clamp_min(0) * rho)[..., None, None]
            pairs = ((delta, k[:, t]), (error, h))
            total = [
                s + rate * d[..., None] * a[..., None, :]
                for s, (d, a) in zip(total, pairs, strict=True)
            ]
        if first + size <= x.shape[1]:
            theta = [w - s for w, s in zip(theta, total, strict=True)]
    return finish(module, torch.stack(outputs, 1), x)


def expected(name: str, module: Any, x: Tensor) -> Tensor:
    """The first part, then a chain of levels (eq. 70)."""
    first = module.parts["0"]
    if name == "hope":
        x = torch.stack([self_referential(first, row, 4) for row in x])
    else:
        x = first(x)[0]
    for index, size in enumerate(LEVELS, start=1):
        x = level(module.parts[str(index)], x, size)
    return x


@pytest.mark.parametrize("name", ["hope", "hope_attention"])
def test_the_layer_is_the_loop_of_its_equations(name: str) -> None:
    module = layer(name)
    x = torch.randn(2, N, D, dtype=torch.float64).requires_grad_()
    y, _ = module(x)
    loop = expected(name, module, x)
    torch.testing.assert_close(y, loop, atol=1e-10, rtol=1e-10)
    leaves, direction = [x, *module.parameters()], torch.randn_like(y)
    ours = torch.autograd.grad((y * direction).sum(), leaves)
    theirs = torch.autograd.grad((loop * direction).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", ["hope", "hope_attention"])
@torch.no_grad()
def test_splits_decoding_padding_and_packing(name: str) -> None:
    module, x = layer(name), torch.randn(2, N, D, dtype=torch.float64)
    y, _ = module(x)
    state, outputs = None, []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, N)):
        part, state = module(x[:, start:stop], state)
        outputs.append(part)
    torch.testing.assert_close(torch.cat(outputs, 1), y, atol=1e-10, rtol=1e-10)
    mask = torch.ones(2, N)
    mask[0, :5] = 0
    padded = module(torch.where(mask[..., None] == 0, torch.nan, x), None, mask)[0]
    torch.testing.assert_close(padded[:1, 5:], module(x[:1, 5:])[0], atol=1e-10, rtol=1e-10)
    packed = module(x[:1], None, None, torch.tensor([0, 6, N]))[0]
    single = [module(x[:1, :6])[0], module(x[:1, 6:])[0]]
    torch.testing.assert_close(packed, torch.cat(single, 1), atol=1e-10, rtol=1e-10)
