"""The reference over infinitely many features, against loops and against explicit features."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc

F, Read, Matrix = rc.features, rc.memory.Read, rc.memory.Matrix
Probe, L2, Dot = rc.bias.Probe, rc.bias.L2, rc.bias.DotProduct
EXACT = 1e-12
# Taylor's series of exp to order 22 leaves out 1/23! at |x| ≤ 1, below rounding; a layer norm of a
# small hidden vector magnifies rounding by up to 1e4.
SERIES = 1e-10

KERNELS: dict[str, tuple[F.Kernel, Callable[[float], float]]] = {
    "linear": (F.LinearKernel(), lambda x: x),
    "round": (F.Round(decimals=1), lambda x: round(x, 1)),
    "relu": (F.ReluKernel(), lambda x: max(x, 0.0)),
    "exp": (F.Exponential(temperature=0.7), lambda x: math.exp(x / 0.7)),
    "solu": (F.Solu(temperature=2.0), lambda x: x * math.exp(x / 2.0)),
}


def delta_former(
    first: str, second: str, *, heads: int = 1, at: str = "token", norms: tuple[str, str]
) -> rc.Recipe:
    probe = Probe(at=at, kernel=KERNELS[first][0], heads=heads, normalize=norms[0])
    return rc.Recipe(
        memory=Matrix(read=Read(normalize=norms[1])),
        features=KERNELS[second][0],
        bias=L2(probe=probe),
    )


def loop(
    x: generate.Inputs, first: str, second: str, norms: tuple[str, str], heads: int, at: str
) -> Tensor:
    """AM 41, 42, 94, 95 and 111, one number at a time, from an empty memory."""
    one, two = KERNELS[first][1], KERNELS[second][1]
    B, T, H, V = x.v.shape
    y = torch.zeros(B, T, x.q.shape[2], V, dtype=torch.float64)
    G = x.q.shape[2] // H
    for b, h in itertools.product(range(B), range(H)):
        u: list[Tensor] = []
        for t in range(T):
            k = x.k[b, : t + 1, h]
            if at == "key":
                probes = [x.k[b, t, h]]
            else:
                w = x.gates["probe"][b, t, h]
                probes = list(w) if heads > 1 else [w]
            weights = [1.0] if heads == 1 else x.params["mix"][h].tolist()
            erased = torch.zeros(V, dtype=torch.float64)
            for a, w in zip(weights, probes, strict=True):
                scores = [one(float(w @ k[i])) for i in range(t)]
                total = sum(scores) if norms[0] == "sum" and t else 1.0
                for score, row in zip(scores, u, strict=True):
                    erased = erased + a * score / total * row
            if norms[0] == "rms":
                erased = erased / torch.sqrt(erased.square().mean() + 1e-6)
            alpha, beta = x.gates["lr"][b, t, h], x.gates["erase"][b, t, h]
            u.append(alpha * x.v[b, t, h] - beta * erased)
            for g in range(G):
                scores = [two(float(x.q[b, t, h * G + g] @ k[i])) for i in range(t + 1)]
                total = sum(scores) if norms[1] == "sum" else 1.0
                for score, row in zip(scores, u, strict=True):
                    y[b, t, h * G + g] += score / total * row
    return y


@pytest.mark.parametrize(
    ("first", "second", "norms"),
    [
        *((a, b, ("none", "none")) for a in KERNELS for b in KERNELS),
        ("exp", "exp", ("sum", "sum")),
        ("exp", "round", ("sum", "none")),
        ("solu", "exp", ("none", "sum")),
        ("relu", "exp", ("rms", "sum")),
    ],
)
@pytest.mark.parametrize("heads", [1, 3])
def test_the_delta_rule_is_the_papers_loop(
    first: str, second: str, norms: tuple[str, str], heads: int
) -> None:
    recipe = delta_former(first, second, heads=heads, norms=norms)
    x = generate.inputs(recipe, B=1, T=6, H=2, G=2, K=4, V=3, zero=True)
    y, _ = generate.run_recall(recipe, x, engine="reference")
    torch.testing.assert_close(y, loop(x, first, second, norms, heads, "token"), atol=EXACT, rtol=0)


def test_a_probe_at_the_key_needs_no_gate() -> None:
    recipe = delta_former("exp", "exp", at="key", norms=("sum", "sum"))
    x = generate.inputs(recipe, B=1, T=6, H=1, K=4, V=3, zero=True)
    assert set(x.gates) == {"lr", "erase"}
    y, _ = generate.run_recall(recipe, x, engine="reference")
    torch.testing.assert_close(
        y, loop(x, "exp", "exp", ("sum", "sum"), 1, "key"), atol=EXACT, rtol=0
    )


# -- explicit features: the same recipes with the exponential's series in two dimensions ---------

ORDER = 22
GD, Momentum = rc.algorithm.GradientDescent, rc.algorithm.Momentum
Window, Decay, Keep = rc.context.Window, rc.retention.Decay, rc.retention.Keep
EXPLICIT = {
    ", ".join(map(str, (name, bias.title, context.horizon, decay, rule.title, rule.batch_size))): (
        rc.Recipe(
            memory=memory,
            features=F.Exponential(temperature=1.0),
            bias=bias,
            context=context,
            retention=Keep() if decay is None else Decay(when=decay),
            algorithm=rule,
        )
    )
    for name, memory in (
        ("matrix", Matrix()),
        ("mlp", rc.memory.MLP(expansion=2)),
        ("three maps", rc.memory.MLP(depth=3, expansion=1, norm="layer", residual=False)),
        ("gated", rc.memory.GatedMLP(expansion=2)),
    )
    for bias, context, decay, rule in (
        (Dot(), rc.context.Online(), None, GD()),
        (L2(), rc.context.Online(), "before", GD()),
        (L2(), rc.context.Online(), "after", GD(batch_size=3)),
        (L2(), Window(size=3), None, GD(batch_size=2)),
        (Dot(), Window(size=2), "after", Momentum(batch_size=4)),
        (L2(), Window(size=4, gated=False), "after", Momentum()),
        (rc.bias.Huber(), rc.context.Online(), None, GD()),
    )
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_rows_are_explicit_features(name: str) -> None:
    recipe = EXPLICIT[name]
    explicit = recipe.replace(features=F.Taylor(order=ORDER, temperature=1.0))
    x = generate.inputs(recipe, B=2, T=7, H=2, G=1, K=2, V=2)
    leaves = x.with_grad()
    assert leaves.init is not None
    widths = recipe.row_widths(2)
    keys, rows, rest = (
        leaves.init[0], leaves.init[1 : 1 + len(widths)], leaves.init[1 + len(widths) :]
    )  # fmt: skip
    phi = explicit.features.phi(
        keys.transpose(0, 1)[None], {}, "key", torch.zeros(1, keys.shape[1], dtype=torch.long)
    )  # [1, m, H, F]
    first = [torch.einsum("hmo,mhf->hof", u, phi[0]) for u in rows]
    init = (*first, *rest)
    y, _ = generate.run_recall(recipe, leaves, engine="reference")
    twin, _ = rc.recall(
        explicit, leaves.q, leaves.k, leaves.v, leaves.gates,
        params=leaves.params, initial_memory=init, engine="reference",
    )  # fmt: skip
    assert generate.relative_error(y, twin) < SERIES
    named = leaves.tensors()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    result, expected = (
        torch.autograd.grad(
            (z * weights).sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        for z in (y, twin)
    )
    for what, a, b in zip(named, result, expected, strict=True):
        assert generate.relative_error(a, b) < SERIES, what


NORMALISED = rc.Recipe(
    memory=Matrix(read=Read(normalize="sum")),
    features=F.Exponential(),
    bias=Dot(),
    algorithm=GD(lr=1.0),
)


@pytest.mark.parametrize("decay", [None, Decay()])
def test_a_normalised_read_is_a_memory_of_ones(decay: Decay | None) -> None:
    """Against finite features, whose normaliser is one more value channel."""
    recipe = NORMALISED.replace(retention=Keep() if decay is None else decay)
    recipe = recipe.replace(features=F.Exponential(temperature=1.0))
    x = generate.inputs(recipe, T=7, K=2, V=3, zero=True)
    twin = recipe.replace(features=F.Taylor(order=ORDER, temperature=1.0))
    y, _ = generate.run_recall(recipe, x, engine="reference")
    z, _ = rc.recall(twin, x.q, x.k, x.v, x.gates, engine="reference")
    assert generate.relative_error(y, z) < SERIES


def test_empty_memory_reads_zero() -> None:
    recipe = delta_former("exp", "exp", norms=("sum", "sum"))
    x = generate.inputs(recipe, B=1, T=3, H=1, zero=True)
    _, state = generate.run_recall(recipe, x.slice_tokens(0, 0), engine="reference")
    assert not rc.read(recipe, x.q, state=state).any()


def test_a_bundle_of_pairs_is_read_like_associations() -> None:
    """init = keys and rows: the memory that a dot product would have written from them."""
    recipe = NORMALISED.replace(memory=Matrix())
    x = generate.inputs(recipe, B=1, T=5, H=2, K=4, V=3, zero=True)
    _, state = generate.run_recall(recipe, x)
    pairs = (x.k[0].transpose(0, 1), x.v[0].transpose(0, 1))
    y = rc.read(recipe, x.q, initial_memory=pairs)
    torch.testing.assert_close(y, rc.read(recipe, x.q, state=state), atol=EXACT, rtol=0)
