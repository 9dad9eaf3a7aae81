"""Memories over product keys as loops over tokens, with a search among all slots."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.test_equivalences import METHODS, TOL, normal, outer
from tests.zoo.test_systems import D, around, finish, gate, layer
from torch import Tensor

import recollect as rc

N = 41


def search(x: Tensor, a: Tensor, b: Tensor, top_k: int) -> Tensor:
    """Features of one key ``[K]`` from sub-keys ``[n, K/2]``: all n² scores, sorted."""
    n, half = a.shape
    scores = {(i, j): a[i] @ x[:half] + b[j] @ x[half:] for i in range(n) for j in range(n)}
    best = sorted(scores, key=lambda slot: -float(scores[slot].detach()))[:top_k]
    weights = torch.stack([scores[slot] for slot in best]).softmax(0)
    phi = torch.zeros(n * n, dtype=x.dtype)
    for (i, j), weight in zip(best, weights, strict=True):
        phi = phi + weight * torch.eye(n * n, dtype=x.dtype)[n * i + j]
    return phi


def lifted(x: Tensor, sub_keys: Tensor, top_k: int) -> Tensor:
    """`search` for every ``[B, T, H]``."""
    rows = [
        search(x[b, t, h], *sub_keys[h], top_k)
        for b in range(x.shape[0])
        for t in range(x.shape[1])
        for h in range(x.shape[2])
    ]
    return torch.stack(rows).unflatten(0, x.shape[:3])


def small() -> rc.MemoryLayer:
    """The layer with 4 sub-keys per half, whose loop is quick."""
    recipe = rc.Recipe(features=rc.features.ProductKeys(n=4, top_k=3))
    torch.manual_seed(0)
    mixer = rc.MemoryLayer(D, 2, recipe, rc.zoo.get("product_key_memory").options).double()
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return mixer


def loop(mixer: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """M = M − η (M φ(k) − v) φ(k)ᵀ, y = M φ(q)."""
    top_k, sub_keys = mixer.recipe.features.top_k, mixer.params["sub_keys"].bias
    q, k, v = around(mixer, x)
    q, k = (a * (a.square().sum(-1, keepdim=True) + 1e-12).rsqrt() * 2 for a in (q, k))  # √K = 2
    q, k = lifted(q, sub_keys, top_k), lifted(k, sub_keys, top_k)
    eta = gate(mixer, "lr", x).sigmoid()[..., None, None]
    M, outputs = outer(v[:, 0], k[:, 0]) * 0, []
    for t in range(x.shape[1]):
        error = torch.einsum("bhvf,bhf->bhv", M, k[:, t]) - v[:, t]
        M = M - eta[:, t] * outer(error, k[:, t])
        outputs.append(torch.einsum("bhvf,bhf->bhv", M, q[:, t]))
    return torch.stack(outputs, 1), M


def test_the_layer_is_the_loop() -> None:
    mixer, x = small(), normal(2, N, D, seed=30)
    assert rc.select_engine(mixer.recipe).engine.name == "linear"
    y, state = mixer(x)
    memory, M = loop(mixer, x)
    torch.testing.assert_close(y, finish(mixer, memory, x), **TOL)
    torch.testing.assert_close(state.memory.weights[0], M, **TOL)


def test_gradients_are_those_of_the_loop() -> None:
    mixer, x = small(), normal(1, 19, D, seed=30).requires_grad_()
    weights = [x, *mixer.parameters()]
    gradients = torch.autograd.grad(mixer(x)[0].square().sum(), weights)
    want = torch.autograd.grad(finish(mixer, loop(mixer, x)[0], x).square().sum(), weights)
    for one, other in zip(gradients, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)
    (slope,) = torch.autograd.grad(mixer(x)[0].square().sum(), mixer.params["sub_keys"].bias)
    assert slope.any()


@pytest.mark.parametrize("split", [(1,) * 9 + (N - 9,), (17, 24), (40, 1)])
def test_splits_padding_and_documents(split: tuple[int, ...]) -> None:
    mixer, x = layer("product_key_memory"), normal(2, N, D, seed=30)
    y, want = mixer(x)
    parts, state = [], None
    for piece in x.split(split, dim=1):
        part, state = mixer(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
    torch.testing.assert_close(state.memory.weights[0], want.memory.weights[0], **TOL)
    mask = torch.ones(2, N)
    mask[0, :7], mask[1, 30:] = 0, 0
    padded, _ = mixer(x, None, mask)
    for row, valid in enumerate(mask.bool()):
        expected, _ = mixer(x[row : row + 1, valid])
        torch.testing.assert_close(padded[row : row + 1, valid], expected, **TOL)
    packed, _ = mixer(x[:1], cu_seqlens=torch.tensor([0, 16, N]))
    for first, last in ((0, 16), (16, N)):
        torch.testing.assert_close(packed[:, first:last], mixer(x[:1, first:last])[0], **TOL)


def test_the_state_has_all_slots() -> None:
    """4 value channels times 256 slots per head, however few a token writes."""
    mixer = layer("product_key_memory")
    _, state = mixer(normal(1, 3, D, seed=30))
    assert state.memory.weights[0].shape == (1, 2, 4, 256)
    assert int((state.memory.weights[0] != 0).any(2).sum(-1).max()) <= 3 * 8


@pytest.mark.parametrize(("n", "top_k", "K"), [(5, 3, 6), (3, 7, 4), (2, 4, 3), (6, 1, 5)])
def test_the_search_by_halves_finds_the_best_of_all_slots(n: int, top_k: int, K: int) -> None:
    features, size = rc.features.ProductKeys(n=n, top_k=top_k), (K + 1) // 2
    x, sub_keys = normal(2, 7, 2, K, seed=1), normal(2, 2, n, size, seed=2)
    phi = features.phi(x.unsqueeze(3), {"sub_keys": sub_keys}, "key", torch.arange(7)[None])
    even = torch.nn.functional.pad(x, (0, 2 * size - K))
    torch.testing.assert_close(phi.squeeze(3), lifted(even, sub_keys, top_k), **TOL)


@METHODS
def test_distinct_slots_do_not_interfere(method: str) -> None:
    """One slot per token and rate 1: a key returns the last value of its slot."""
    recipe = rc.Recipe(
        features=rc.features.ProductKeys(n=2, top_k=1),
        algorithm=rc.algorithm.GradientDescent(lr=1.0),
    )
    corners = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]).double().view(1, 4, 1, 2)
    sub_keys = torch.tensor([1.0, -1.0]).double().view(1, 1, 2, 1).expand(1, 2, 2, 1)
    v = normal(1, 8, 1, 3, seed=5)
    k = torch.cat([corners, corners], 1)
    y, state = rc.recall(recipe, k, k, v, params={"sub_keys": sub_keys}, engine=method)
    torch.testing.assert_close(y, v, **TOL)
    reads = rc.read(recipe, corners, state=state, params={"sub_keys": sub_keys})
    torch.testing.assert_close(reads, v[:, 4:], **TOL)


def test_more_slots_than_there_are_is_refused() -> None:
    with pytest.raises(rc.RecipeError, match="chooses among n² = 4 slots"):
        rc.features.ProductKeys(n=2, top_k=5)
