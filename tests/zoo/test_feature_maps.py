"""Rows on lifted keys against their papers' formulas: a kernel for each pair of tokens, in a loop.

Through `recall`, and through the layer with its weights applied by hand, whole and token by token.
float64, 1e-10: both sides differ by rounding only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc

B, T, H, K, V = 2, 70, 2, 6, 4
TOL = {"atol": 1e-10, "rtol": 1e-10}
# Engines are compared with the reference by `tests/contracts`.
METHODS = pytest.mark.parametrize(
    "method", ["auto", pytest.param("reference", marks=pytest.mark.slow)]
)
Kernel = Callable[[Tensor, Tensor, dict[str, Tensor], int, int], Tensor]
"""s(q, k) of one pair ``[K], [K]`` and one head's params, at tokens t and i."""


def performer(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    size = q.shape[0]
    q, k = q / size**0.25, k / size**0.25
    w = p["directions"]
    return ((w @ q - q @ q / 2).exp() * (w @ k - k @ k / 2).exp()).mean()


def rfa(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    w = p["directions"] * p["bandwidth"]
    return (w @ (q - k)).cos().mean()


def cosformer(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    return q.relu() @ k.relu() * math.cos(math.pi / 2 * (t - i) / 2048)


def hedgehog(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    def phi(x: Tensor, side: int) -> Tensor:
        z = p["feature_map"][side] @ x + p["feature_shift"][side]
        both = torch.cat([z.exp(), (-z).exp()])
        return both / both.sum()

    return phi(q, 0) @ phi(k, 1)


def based(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    x = q @ k / math.sqrt(q.shape[0])
    return 1 + x + x * x / 2


def rebased(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    def sketch(x: Tensor, side: int) -> Tensor:
        x = x - x.mean()
        x = x / (x.square().mean() + 1e-5).sqrt()
        return p["feature_scale"][side] * x + p["feature_shift"][side]

    return (sketch(q, 0) @ sketch(k, 1)) ** 2 / q.shape[0]


@functools.cache
def cosines(size: int) -> Tensor:
    """Row j is √(2/K) cos(π (2n + 1) j / 2K), the first one √½ of it: the discrete cosines."""
    rows = [
        [
            math.sqrt((1 if j == 0 else 2) / size)
            * math.cos(math.pi * (2 * n + 1) * j / (2 * size))
            for n in range(size)
        ]
        for j in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def dijiang(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    c = cosines(q.shape[0])
    return (p["feature_weight"] ** 2 * (p["frequencies"] * (c @ (q + k))).exp()).sum()


def polysketchformer(q: Tensor, k: Tensor, p: dict[str, Tensor], t: int, i: int) -> Tensor:
    one, two = p["sketch"]
    sketches = [(one @ x) * (two @ x) / math.sqrt(one.shape[0]) for x in (q, k)]
    return (sketches[0] @ sketches[1]) ** 2


KERNELS: dict[str, Kernel] = {
    f.__name__: f
    for f in (performer, rfa, cosformer, hedgehog, based, rebased, dijiang, polysketchformer)
}
ROWS = [*KERNELS, "dpfp"]


def average(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Return Σ_(i≤t) s(q_t, k_i) v_i / Σ_(i≤t) s(q_t, k_i), and 0 if all s are 0."""
    y = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            p = {name: x[h] for name, x in params.items()}
            for t in range(q.shape[1]):
                s = torch.stack([kernel(q[b, t, h], k[b, i, h], p, t, i) for i in range(t + 1)])
                if s.sum() != 0:
                    y[b, t, h] = s @ v[b, : t + 1, h] / s.sum()
    return y


def fast_weights(q: Tensor, k: Tensor, v: Tensor, lr: Tensor) -> Tensor:
    """Schlag's update: v̄ = W φ(k), W += β (v − v̄) ⊗ φ(k), y = W φ(q)."""

    def phi(x: Tensor) -> Tensor:
        r = torch.cat([x.relu(), (-x).relu()])
        lifted = torch.stack([r[i] * r[(i + 1) % len(r)] for i in range(len(r))])
        return lifted / lifted.sum() if lifted.sum() > 0 else lifted

    y = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            W = torch.zeros(v.shape[-1], 2 * q.shape[-1], dtype=torch.float64)
            for t in range(q.shape[1]):
                key = phi(k[b, t, h])
                W = W + lr[b, t, h] * torch.outer(v[b, t, h] - W @ key, key)
                y[b, t, h] = W @ phi(q[b, t, h])
    return y


def normal(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def random_params(name: str) -> dict[str, Tensor]:
    """Return params away from the special initial values."""
    g = torch.Generator().manual_seed(5)
    recipe = rc.zoo.get(name).recipe
    start = rc.initial_params(recipe, H=H, K=K, V=V, generator=g, dtype=torch.float64)
    return {n: p + 0.1 * normal(*p.shape, seed=6) for n, p in start.items()}


@METHODS
@pytest.mark.parametrize("name", KERNELS)
def test_rows_are_averages_by_their_kernel(name: str, method: str) -> None:
    """70 tokens cross the boundary of a chunk."""
    length = 70 if method == "auto" else 25
    q, k = (functional.normalize(normal(1, length, H, K, seed=s), dim=-1) for s in (1, 2))
    v, params = normal(1, length, H, V, seed=3), random_params(name)
    y, _ = rc.recall(rc.zoo.get(name).recipe, q, k, v, params=params, engine=method)
    torch.testing.assert_close(y, average(KERNELS[name], q, k, v, params), **TOL)


@METHODS
def test_dpfp_is_schlags_fast_weight_programmer(method: str) -> None:
    q, k = normal(B, T, H, K, seed=1), normal(B, T, H, K, seed=2)
    k[0, 3] = 0
    v, lr = normal(B, T, H, V, seed=3), torch.sigmoid(normal(B, T, H, seed=4))
    y, _ = rc.recall(rc.zoo.get("dpfp").recipe, q, k, v, {"lr": lr}, engine=method)
    torch.testing.assert_close(y, fast_weights(q, k, v, lr), **TOL)


# -- through the layer -------------------------------------------------------------------------

D, N = 12, 9
LENGTHS = {"rfa": 1.0, "polysketchformer": 1.0, "dijiang": math.sqrt(D / H)}


def build(name: str) -> rc.MemoryLayer:
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(D, H).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return layer


def by_hand(name: str, layer: rc.MemoryLayer, x: Tensor) -> Tensor:
    """Compute the layer as in its docstring, from its weights."""
    u = x @ layer.qkv.weight.T
    assert layer.conv is not None
    w, taps = layer.conv.width, layer.conv.weight
    padded = torch.cat([u.new_zeros(u.shape[0], w - 1, u.shape[2]), u], dim=1)
    u = sum(taps[j] * padded[:, j : j + u.shape[1]] for j in range(w))
    u = u * torch.sigmoid(u)
    q, k, v = (part.unflatten(-1, (H, D // H)) for part in u.chunk(3, dim=-1))
    if name in LENGTHS:
        q, k = (LENGTHS[name] * a / a.square().sum(-1, keepdim=True).sqrt() for a in (q, k))
    if name == "dpfp":
        rate = layer.gates["lr"]
        lr = torch.sigmoid(x @ rate.weight.T + rate.bias)
        y = fast_weights(q, k, v, lr)
    else:
        params = {n: number.bias for n, number in layer.params.items()}
        y = average(KERNELS[name], q, k, v, params)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.norm.weight
    z = x @ layer.output_gate.weight.T
    return (y.flatten(2) * z * torch.sigmoid(z)) @ layer.out.weight.T


@pytest.mark.parametrize("name", ROWS)
def test_layers_are_their_formula_and_decode(name: str) -> None:
    layer, x = build(name), normal(2, N, D, seed=8)
    with torch.no_grad():
        want = by_hand(name, layer, x)
        y, _ = layer(x)
        # Norms are clamped by 1e-12, added to ‖x‖², and layers normalise several times.
        torch.testing.assert_close(y, want, atol=1e-9, rtol=1e-9)
        state, steps = None, []
        for t in range(N):
            step, state = layer(x[:, t : t + 1], state)
            steps.append(step)
        torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ROWS)
def test_layers_under_masks_and_packing(name: str) -> None:
    """Positions and features are those of each sequence run separately."""
    layer, x = build(name), normal(1, N, D, seed=8)
    with torch.no_grad():
        first, second = by_hand(name, layer, x[:, :4]), by_hand(name, layer, x[:, 4:])
        packed, _ = layer(x, cu_seqlens=torch.tensor([0, 4, N]))
        torch.testing.assert_close(packed, torch.cat([first, second], 1), atol=1e-9, rtol=1e-9)
        rows = torch.stack([x[0], torch.cat([normal(4, D, seed=9), x[0, 4:]])])
        mask = torch.ones(2, N)
        mask[1, :4] = 0
        padded, _ = layer(rows, attention_mask=mask)
        torch.testing.assert_close(padded[:1], by_hand(name, layer, x), atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(padded[1:, 4:], second, atol=1e-9, rtol=1e-9)


def test_normalised_linear_attention_under_an_output_norm() -> None:
    """Qin et al. (The devil in linear transformer): a norm of the output, no denominator."""
    recipe = rc.Recipe(
        features=rc.features.EluPlusOne(),
        bias=rc.bias.DotProduct(),
        algorithm=rc.algorithm.GradientDescent(lr=1.0),
    )
    options = rc.LayerOptions(
        conv_size=0, conv_activation="none", qk_norm="none", output_gate="none"
    )
    torch.manual_seed(0)
    layer, x = rc.MemoryLayer(D, H, recipe, options).double(), normal(2, N, D, seed=8)
    q, k, v = (
        (x @ layer.qkv.weight.T).chunk(3, dim=-1)[j].unflatten(-1, (H, D // H)) for j in range(3)
    )
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    y = torch.einsum("bthk,bshk,ts,bshv->bthv", q, k, torch.ones(N, N).double().tril(), v)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(layer(x)[0], y.flatten(2) @ layer.out.weight.T, **TOL)


def test_silu_is_a_gated_identity() -> None:
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)
    phi = rc.features.Silu().phi(x, {}, "key", torch.zeros(1))
    torch.testing.assert_close(phi, x / (1 + (-x).exp()), **TOL)
