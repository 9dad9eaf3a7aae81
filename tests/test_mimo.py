"""Layers whose tokens have several inputs and outputs per head, from their parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.lm.training.weight_decay import decay_parameter_names

D, HEADS, N, T = 12, 4, 3, 7
TOL = {"atol": 1e-12, "rtol": 1e-12}


def layer(num_kv_heads: int, **options: object) -> rc.MemoryLayer:
    torch.manual_seed(0)
    algorithm = rc.algorithm.GradientDescent(updates_per_token=N)
    recipe = rc.Recipe(algorithm=algorithm, retention=rc.retention.Decay(when="before"))
    layer_options = rc.LayerOptions(mimo=True, value_skip=True, **options)  # type: ignore[arg-type]
    module = rc.MemoryLayer(D, HEADS, recipe, layer_options, num_kv_heads=num_kv_heads).double()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return module


def tokens() -> Tensor:
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("gate", ["silu", "sigmoid", "none"])
def test_outputs_are_gated_and_summed(num_kv_heads: int, gate: str) -> None:
    """y = Σ_j o_j ⊙ σ(g_j ⊙ z) ⊙ norm(M q_j + D ⊙ v_j), with v_j = p_j ⊙ v."""
    module, x = layer(num_kv_heads, output_gate=gate), tokens()
    inputs = module.memory_inputs(x)
    V, group = module.value_dim, HEADS // num_kv_heads
    assert inputs.q.shape == (2, T, HEADS * N, V)
    assert inputs.k.shape == inputs.v.shape == (2, T, num_kv_heads, N, V)
    # One value and one rate for all associations of a token.
    value = inputs.v / module.mimo.values
    torch.testing.assert_close(value, value[:, :, :, :1].expand_as(value), **TOL)
    rates = inputs.gates["lr"]
    assert rates.shape == (2, T, num_kv_heads, N) and rates.eq(rates[..., :1]).all()
    assert module.gates["lr"].weight.shape == (num_kv_heads, D)
    total = torch.zeros(2, T, HEADS, V, dtype=torch.float64)
    for head in range(HEADS):
        memory = head // group
        at = slice(memory, memory + 1)
        k, v = inputs.k[:, :, at], inputs.v[:, :, at]
        gates = {name: g[:, :, at] for name, g in inputs.gates.items()}
        for j in range(N):
            q = inputs.q[:, :, head * N + j].unsqueeze(2)
            y, _ = rc.recall(module.recipe, q, k, v, gates, engine="reference")
            y = y[:, :, 0] + module.skip[memory] * v[:, :, 0, j]
            y = functional.rms_norm(y, (V,), module.norm.weight, 1e-6)
            if gate != "none":
                z = (x @ module.output_gate.weight.T).unflatten(-1, (HEADS, V))[:, :, head]
                z = module.mimo.gates[head, j] * z
                y = y * (z.sigmoid() if gate == "sigmoid" else functional.silu(z))
            total[:, :, head] += module.mimo.outputs[head, j] * y
    y, _ = module(x)
    torch.testing.assert_close(y, total.flatten(2) @ module.out.weight.T, atol=1e-10, rtol=1e-10)


def test_heads_that_share_queries_and_keys() -> None:
    """Head h has query j of its group, and value j of its memory."""
    module, x = layer(4, key_group_size=2, qk_affine=True), tokens()
    inputs = module.memory_inputs(x)
    q, k = inputs.q.unflatten(2, (2, 2, N)), inputs.k.unflatten(2, (2, 2))
    assert q[:, :, :, 0].equal(q[:, :, :, 1]) and k[:, :, :, 0].equal(k[:, :, :, 1])
    assert not q[:, :, 0].equal(q[:, :, 1]) and not q[..., 0, :].equal(q[..., 1, :])
    first, _ = module(x)
    separate = layer(4, qk_affine=True)
    assert separate.qkv.weight.shape[0] == module.qkv.weight.shape[0] + 4 * N * module.head_dim
    assert first.shape == separate(x)[0].shape


def test_starts_as_a_mean() -> None:
    module = layer(4)
    module.reset_parameters()
    assert module.mimo.values.eq(1 / N).all() and module.mimo.outputs.eq(1 / N).all()
    assert module.mimo.gates.eq(1).all()
    assert layer(4, output_gate="none").mimo.gates is None


def test_cost_counts_the_queries() -> None:
    spec = layer(2).memory_spec
    assert (spec.num_kv_heads, spec.num_heads) == (2, HEADS * N)
    assert rc.LayerOptions.from_dict(spec.options.to_dict()) == spec.options


def test_weights_do_not_decay() -> None:
    names = set(decay_parameter_names(layer(4)))
    assert "qkv.weight" in names and not {name for name in names if name.startswith("mimo")}
