"""Every preset with products of bfloat16: as accurate as it is said to be, in all of its products.

The oracle is what tensor cores do, done to torch's kernels by `dispatched.Rounding`, which knows
nothing of the library. Its numbers differ from ours by the order of sums alone, so that a product
that one of them overlooks stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.precision.dispatched import Rounding, Unrounded
from torch import Tensor

import recollect as rc

OFTEN = (
    "softmax_attention",
    "fox",
    "kernel_regression_attention",
    "linear_attention",
    "gla",
    "mamba",
    "mamba2",
    "gated_delta_net",
    "rwkv7",
    "rls",
    "geometric_rls",
    "mesa_net",
    "delta_former",
    "titans",
    "yaad",
    "deep_transformer",
)
NO_PRODUCTS = ("lru", "rg_lru")  # every entry of the memory moves by itself
LEAPS = {"elastic_net_proximal": 2e-1}  # beyond its soft threshold a slope is another
ADDED = ("fox", "atlas", "atlas_per_token", "atlas_plus_plus")
"""Plain calls with products of their own: fox has its decays among the factors, and Newton–Schulz
makes three iterations of one Gram matrix, which rounding would spoil."""
T, PROMPT = 24, 21


def layers() -> list[str]:
    return [name for name in rc.zoo.names() if rc.zoo.get(name).options.persistent == 0]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a preset: outputs, decoded tokens, all gradients in one, and the state."""

    y: Tensor
    decoded: Tensor
    slope: Tensor
    state: Any


def run(name: str, precision: str | None, mode: AbstractContextManager[Any]) -> Run:
    """Forward, backward and decoding of a preset's memory alone."""
    torch.manual_seed(0)
    preset = rc.zoo.get(name)
    layer = preset.build(d_model=16, num_heads=2)
    with torch.no_grad():
        made = layer.memory_inputs(torch.randn(1, T, 16))
    leaves = [x.detach().clone().requires_grad_() for x in (made.q, made.k, made.v)]
    gates = {n: x.detach().clone().requires_grad_() for n, x in made.gates.items()}
    params = {n: x.detach().clone().requires_grad_() for n, x in made.params.items()}
    init = layer.initial_memory
    if init is not None:
        init = tuple(x.detach().clone().requires_grad_() for x in init)
    given = [*leaves, *gates.values(), *params.values(), *(init or ())]

    def recall(span: slice, **more: Any) -> tuple[Tensor, Any]:
        q, k, v = (x[:, span] for x in leaves)
        now = {n: x[:, span] for n, x in gates.items()}
        return rc.recall(preset.recipe, q, k, v, now, params=params, precision=precision, **more)

    with mode:
        y, _ = recall(slice(0, T), initial_memory=init)
        slopes = torch.autograd.grad(
            (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(),
            given, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        with torch.no_grad():
            _, state = recall(slice(0, PROMPT), initial_memory=init)
            decoded = []
            for t in range(PROMPT, T):
                token, state = recall(slice(t, t + 1), state=state)
                decoded.append(token)
    slope = torch.cat([x.flatten() for x in slopes])
    return Run(y=y.detach(), decoded=torch.cat(decoded, 1), slope=slope, state=state)


def apart(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def every(names: Sequence[str]) -> list[Any]:
    return [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", every(layers()))
def test_products_of_bfloat16(name: str) -> None:
    recipe = rc.zoo.get(name).recipe
    engine, watch = rc.select_engine(recipe).engine, Unrounded()
    exact = run(name, None, nullcontext())
    found = run(name, "bf16", watch)
    if engine.needs_digits(recipe) is not None or name in NO_PRODUCTS:
        assert watch.products == 0 or engine.needs_digits(recipe) is not None
        assert torch.equal(found.y, exact.y)
        assert torch.equal(found.slope, exact.slope)
        assert torch.equal(found.decoded, exact.decoded)
        return
    assert watch.products > 0
    assert not watch.found, watch.found
    said = run(name, "float32", Rounding())
    kept = [*found.state.tensors()]
    assert {x.dtype for x in kept if x.is_floating_point()} <= {torch.float32, torch.float64}
    # docs/gpu.md: outputs, decoded tokens, and the gradient as a whole.
    for part, far in (("y", 2e-2), ("decoded", 4e-2), ("slope", LEAPS.get(name, 1e-1))):
        mine, theirs, plain = (getattr(x, part) for x in (found, said, exact))
        off = apart(mine, plain)
        assert 2**-13 < off <= far, f"{part}: {off:.1e} from float32"
        if name not in ADDED:
            # Fused attention gives what it read in bfloat16, too.
            assert apart(mine, theirs) <= (off if engine.name == "kernel" else off / 2), part


@pytest.mark.parametrize("name", [n for n in rc.zoo.names() if n not in layers()])
def test_memories_that_are_only_read(name: str) -> None:
    """Feed-forward networks: their pairs are learned, their products as asked for."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=16, num_heads=2)
    layer.out = None  # a projection, and no product of the memory's
    x, watch = torch.randn(1, T, 16), Unrounded()
    plain, _ = layer(x)
    layer.precision = "bf16"
    with watch:
        y, _ = layer(x.requires_grad_())
        y.square().sum().backward()
    assert watch.products > 0
    assert not watch.found
    assert 2**-13 < apart(y.detach(), plain.detach()) <= 2e-2


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "softmax_attention"])
def test_nobody_asks_and_nothing_is_entered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a precision the way is the one of before: nothing is caught anywhere."""

    def entered(precision: str) -> None:
        raise AssertionError(precision)

    monkeypatch.setattr("recollect.choices.matmul_precision._enter", entered)
    run(name, None, nullcontext())
    with pytest.raises(AssertionError, match="bf16"):
        run(name, "bf16", nullcontext())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rls", "gated_delta_net", "titans"])
def test_errors_do_not_grow_with_the_sequence(name: str) -> None:
    """The last quarter of 4,096 tokens that resemble each other, in bfloat16 as in docs/gpu.md."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=64, num_heads=2)
    x = torch.randn(1, 4096, 64).cumsum(1) / torch.arange(1, 4097).sqrt()[:, None]
    with torch.no_grad():
        made = layer.memory_inputs(x)
        exact, _ = layer.learn(made, None)
        layer.precision = "bf16"
        y, _ = layer.learn(made, None)
    assert 2**-13 < apart(y[:, -1024:], exact[:, -1024:]) <= 2e-2
