"""float32 over long sequences: decays down to −20 per token and channel, gates in [−20, 20].

The norm-wise error against the float64 call is below 1e-4, without NaN.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.common.problem import Problem, resolve_rates
from recollect.functional.binding import bind
from recollect.functional.lowering import lower
from recollect.state.state import initial_state

LIMIT = 1e-4
LENGTHS = pytest.mark.parametrize("T", [300, pytest.param(8192, marks=pytest.mark.slow)])
CHANNELS = (
    *("retnet_xpos", "dfw", "gla", "gateloop", "hgrn2", "lru", "rg_lru", "mamba", "mamba2"),
    *("rwkv6", "rwkv7", "gated_delta_net", "gated_delta_product", "longhorn_diagonal", "leaky_lms"),
    "mlstm",
)


def extreme(name: str, T: int) -> tuple[rc.Recipe, generate.Inputs]:
    """Log decays uniform in [−20, 0], a third of them near 0; other numbers as in the contracts."""
    recipe = rc.zoo.get(name).recipe
    V = 16 if recipe.memory.is_elementwise else 8
    x = generate.inputs(recipe, B=1, T=T, H=2, K=16, V=V, seed=1)
    g = torch.Generator().manual_seed(2)
    for gate, value in x.gates.items():
        if gate.startswith("log_decay"):
            strong = -20 * torch.rand(value.shape, generator=g, dtype=torch.float64)
            weak = -1e-3 * torch.rand(value.shape, generator=g, dtype=torch.float64)
            value.copy_(torch.where(torch.rand(value.shape, generator=g) < 0.35, weak, strong))
        elif gate == "probe":
            value.copy_(torch.nn.functional.normalize(value, dim=-1))
    for param, value in x.params.items():
        if param == "decay":  # static: from e^−20 to almost 1
            fill = torch.linspace(-20, -1e-3, value.numel(), dtype=torch.float64)
            value.copy_(fill.exp().view_as(value))
        elif param == "decay_scale":
            value.fill_(1.0)
    # Equal numbers in both precisions.
    return recipe, x.map_tensors(lambda a: a.float().double())


@LENGTHS
@pytest.mark.parametrize("name", CHANNELS)
def test_float32_precision(name: str, T: int) -> None:
    recipe, x = extreme(name, T)
    with torch.no_grad():
        want, end = generate.run_recall(recipe, x)
        actual, last = generate.run_recall(recipe, x.map_tensors(Tensor.float))
    assert torch.isfinite(actual).all()
    assert generate.relative_error(actual, want) < LIMIT * min(1.0, float(want.norm()))
    for name_, exact in generate.flatten_state(end).items():
        result = generate.flatten_state(last)[name_].double()
        assert float((result - exact).norm()) <= LIMIT * max(float(exact.norm()), 1e-30), name_


@LENGTHS
@pytest.mark.parametrize("name", CHANNELS)
def test_gradients_in_float32_are_finite(name: str, T: int) -> None:
    recipe, x = extreme(name, min(T, 2048))
    _, _, slopes = generate.gradients(recipe, x.map_tensors(Tensor.float))
    for what, slope in slopes.items():
        assert torch.isfinite(slope).all(), what


def numerator_and_denominator(x: generate.Inputs) -> tuple[Tensor, Tensor]:
    """Return C q and n·q of mLSTM in its stabilised scale, before the division."""
    recipe = rc.zoo.get("mlstm").recipe
    B, T, H = x.k.shape[:3]
    dtype, device = x.q.dtype, x.q.device
    K, V = x.k.shape[-1], x.v.shape[-1]
    bound = bind(recipe, H=H, K=K, V=V)
    state = initial_state(bound, B=B, dtype=dtype, device=device)
    problem = Problem(
        bound=bound,
        q=x.q.unsqueeze(3),
        k=x.k,
        v=x.v,
        rates=resolve_rates(bound, x.gates, {}, B=B, T=T, dtype=dtype, device=device),
        params={},
        state=state,
    )
    lowered = lower(problem)
    y, _ = bound.engine.run(lowered.problem)
    scale = lowered.scale.double()[..., None, None]
    return y[..., :-1].double(), torch.cat([y[..., -1:].double(), scale], dim=-1)


@LENGTHS
@pytest.mark.parametrize("reach", [20.0, 2.0])
def test_mlstm_numerator_and_denominator(T: int, reach: float) -> None:
    """Gates over all of [−20, 20]: numerator, denominator and quotient are within 1e-4."""
    recipe = rc.zoo.get("mlstm").recipe
    x = generate.inputs(recipe, B=1, T=T, H=2, K=16, V=16, seed=3, zero=True)
    g = torch.Generator().manual_seed(4)

    def gate() -> Tensor:
        return reach * (2 * torch.rand(1, T, 2, generator=g, dtype=torch.float64) - 1)

    gates = {"log_lr": gate(), "log_decay": torch.nn.functional.logsigmoid(gate())}
    x = dataclasses.replace(x, gates=gates, init=None).map_tensors(lambda a: a.float().double())
    single = x.map_tensors(Tensor.float)
    with torch.no_grad():
        want, actual = numerator_and_denominator(x), numerator_and_denominator(single)
        full, _ = generate.run_recall(recipe, x)
        result, _ = generate.run_recall(recipe, single)
    for what, exact, close in zip(("numerator", "denominator"), want, actual, strict=True):
        assert torch.isfinite(close).all(), what
        off = float((close - exact).norm() / exact.norm())
        assert off < LIMIT, (what, off)
    assert torch.isfinite(result).all()
    assert float((result.double() - full).norm() / full.norm()) < LIMIT
