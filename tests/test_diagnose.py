"""`diagnose`: norms, surprise and steps against plain computations, and detection of faults."""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path

import pytest
import torch
from tests.contracts.generate import presets
from torch import Tensor, nn

import recollect as rc
from recollect.layer.options import GateOptions, LayerOptions

D, HEADS, B, T = 16, 2, 2, 24
# Curves are stored in float32.
TOL = {"atol": 1e-5, "rtol": 1e-5}


def tokens(length: int = T, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, D, generator=g, dtype=torch.float64)


def build(recipe: rc.Recipe | str, options: LayerOptions | None = None) -> rc.MemoryLayer:
    torch.manual_seed(0)
    if isinstance(recipe, str):
        return rc.zoo.get(recipe).build(D, HEADS).double()
    return rc.MemoryLayer(D, HEADS, recipe, options).double()


def test_delta_net_by_hand() -> None:
    """W_t = W_(t−1) − η e kᵀ: the surprise is ½‖e‖², the step η‖k‖² = η, the norm ‖W_t‖."""
    layer, x = build("delta_net"), tokens()
    result = rc.diagnose(layer, x)
    inputs = layer.memory_inputs(x)
    k, v, gates = inputs.k, inputs.v, inputs.gates
    W = torch.zeros(B, HEADS, v.shape[-1], k.shape[-1], dtype=torch.float64)
    norms, surprise = [W.flatten(2).norm(dim=-1).mean(0)], []
    for t in range(T):
        e = torch.einsum("bhvk,bhk->bhv", W, k[:, t]) - v[:, t]
        surprise.append(0.5 * e.square().sum(-1).mean(0))
        W = W - gates["lr"][:, t, :, None, None] * e.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        norms.append(W.flatten(2).norm(dim=-1).mean(0))
    assert result.positions.tolist() == list(range(T + 1))
    torch.testing.assert_close(result.memory["W"].double(), torch.stack(norms), **TOL)
    torch.testing.assert_close(result.loss.double(), torch.stack(surprise), **TOL)
    torch.testing.assert_close(result.step.double(), gates["lr"].mean(0), **TOL)
    assert result.first_fault is None
    assert result.engine == "linear"
    assert not result.slots


def test_effective_ranks_are_those_of_the_singular_values() -> None:
    """One association has rank 1; K orthogonal ones of equal size have rank K."""
    layer, x = build("delta_net"), tokens()
    diagnosis = rc.diagnose(layer, x)
    inputs = layer.memory_inputs(x)
    _, state = rc.recall(layer, inputs.q, inputs.k, inputs.v, inputs.gates, output_final_state=True)
    ranks = torch.zeros(B, HEADS, dtype=torch.float64)
    for b in range(B):
        for head in range(HEADS):
            values = (
                torch.linalg.eigvalsh(state.weights[0][b, head] @ state.weights[0][b, head].mT)
                .clamp_min(0)
                .sqrt()
            )
            p = values[values > 0] / values.sum()
            ranks[b, head] = (-(p * p.log()).sum()).exp()
    torch.testing.assert_close(
        diagnosis.rank["W"][-1].double(), ranks.mean(0), rtol=1e-4, atol=1e-4
    )
    assert diagnosis.rank["W"][0].tolist() == [0, 0]
    torch.testing.assert_close(diagnosis.rank["W"][1], torch.ones(HEADS), **TOL)
    assert diagnosis.max_rank == {"W": 8}
    deep = rc.diagnose(build("titans"), tokens())
    assert deep.max_rank.keys() == deep.rank.keys() == deep.memory.keys()
    for name, rank in deep.rank.items():
        assert ((rank >= 0) & (rank <= deep.max_rank[name] + 1e-4)).all()


def test_ranks_are_measured_at_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = build("delta_net"), tokens(11)
    ranks = rc.diagnose(layer, x).rank["W"]
    monkeypatch.setattr(sys.modules["recollect.explanation.diagnose"], "MAX_RANKS", 4)
    measured = [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 11]
    assert torch.equal(rc.diagnose(layer, x).rank["W"], ranks[measured])
    for T, measured in ((4, [0, 1, 2, 3, 4]), (8, [0, 0, 2, 2, 4, 4, 6, 6, 8])):
        assert torch.equal(rc.diagnose(layer, x[:, :T]).rank["W"], ranks[measured])


@pytest.mark.parametrize("name", ["gated_delta_net", "gla", "mamba", "mamba2", "retnet"])
def test_a_memory_that_only_decays_is_halved_after_its_half_life(name: str) -> None:
    layer, x = build(name), tokens()
    diagnosis = rc.diagnose(layer, x)
    inputs = layer.memory_inputs(x)
    assert diagnosis.half_life is not None
    if name == "gated_delta_net":
        expected = -math.log(2) / inputs.gates["log_decay"].mean(0)
        torch.testing.assert_close(diagnosis.half_life.double(), expected, **TOL)
    if name == "gla":
        expected = -math.log(2) / inputs.gates["log_decay"].mean((0, -1))
        torch.testing.assert_close(diagnosis.half_life.double(), expected, **TOL)
    assert (diagnosis.half_life > 0).all()
    assert rc.diagnose(build("delta_net"), x).half_life is None


def test_surprise_is_the_norm_of_the_error() -> None:
    layer, x = build("delta_net"), tokens()
    diagnosis = rc.diagnose(layer, x)
    inputs = layer.memory_inputs(x)
    assert diagnosis.error is not None
    torch.testing.assert_close(
        diagnosis.error[0].double(), inputs.v[:, 0].norm(dim=-1).mean(0), **TOL
    )


def test_a_deep_memory_with_momentum_and_inner_batches() -> None:
    """Norms are taken at boundaries; surprise is measured at the memory of the batch's start."""
    recipe = rc.Recipe(
        memory=rc.memory.MLP(norm="layer"),
        bias=rc.bias.Huber(threshold=2.0),
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.Momentum(batch_size=5, lr=0.05),
    )
    layer, x = build(recipe), tokens()
    result = rc.diagnose(layer, x)
    assert result.positions.tolist() == [0, 5, 10, 15, 20]
    assert list(result.memory) == ["W2", "W1"]
    inputs = layer.memory_inputs(x)
    q, k, v, gates, params = inputs.q, inputs.k, inputs.v, inputs.gates, inputs.params
    state = None
    for p, (start, stop) in enumerate(((0, 5), (5, 10), (10, 15), (15, 20))):
        cut = slice(start, stop)
        origin = {"initial_memory": layer.initial_memory} if state is None else {"state": state}
        prediction = rc.read(recipe, k[:, cut], params=params, **origin)  # type: ignore[arg-type]
        e = prediction - v[:, cut]
        near = e.norm(dim=-1) <= 2
        loss = torch.where(near, 0.5 * e.square().sum(-1), 2 * e.abs().sum(-1))
        torch.testing.assert_close(result.loss[cut].double(), loss.mean(0), **TOL)
        _, state = rc.recall(
            recipe,
            *(q[:, cut], k[:, cut], v[:, cut]),
            {name: gate[:, cut] for name, gate in gates.items()},
            params=params,
            **origin,  # type: ignore[arg-type]
        )
        assert state is not None
        error = torch.where(near.unsqueeze(-1), e, 2 * e.sign())
        gone = prediction - rc.read(recipe, k[:, cut], state=state, params=params)
        step = (gone * error).sum(-1) / error.square().sum(-1)
        torch.testing.assert_close(result.step[cut].double(), step.mean(0), **TOL)
        for name, w in zip(("W2", "W1"), state.weights, strict=True):
            size = w.flatten(2).norm(dim=-1).mean(0)
            torch.testing.assert_close(result.memory[name][p + 1].double(), size, **TOL)
        total = sum(w.square().sum((-2, -1)) for w in state.algorithm_state["momentum"])
        assert isinstance(total, Tensor)
        size = total.sqrt().mean(0)
        torch.testing.assert_close(result.slots["momentum"][p + 1].double(), size, **TOL)
    # The last batch is open: its tokens are read, and not written.
    assert result.loss[20:].isfinite().all()
    assert result.step[20:].isnan().all()


@pytest.mark.parametrize("name", presets())
def test_every_architecture(name: str) -> None:
    layer = build(name)
    if not isinstance(layer, rc.MemoryLayer):
        with pytest.raises(rc.RecipeError, match="not FeedForward"):
            rc.diagnose(layer, tokens(6))
        return
    length = layer.recipe.algorithm.batch_size + 2
    result = rc.diagnose(layer, tokens(max(length, 6)))
    assert result.first_fault is None
    assert result.loss.isfinite().all()
    assert result.heads == layer.num_kv_heads
    assert bool(result.memory) == bool(layer.recipe.shapes(layer.head_dim, layer.value_dim))
    assert all(norm.isfinite().all() for norm in result.memory.values())
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["engine"] == result.engine
    assert str(result).startswith(f"engine {result.engine}, {HEADS} heads")


@pytest.mark.parametrize(
    "recipe",
    [
        rc.Recipe(algorithm=rc.algorithm.GradientDescent(updates_per_token=2)),
        rc.Recipe(
            bias=rc.bias.Huber(form="coordinate", per="value"),
            algorithm=rc.algorithm.GradientDescent(updates_per_token=2),
        ),
        rc.Recipe(
            memory=rc.memory.Matrix(read=rc.memory.Read(normalize="floor")),
            bias=rc.bias.DotProduct(),
            algorithm=rc.algorithm.GradientDescent(lr="log_input"),
        ),
        rc.Recipe(memory=rc.memory.Vector(), algorithm=rc.algorithm.Adam()),
        rc.Recipe(retention=rc.retention.Ball(radius="input")),
        rc.Recipe(bias=rc.bias.DotProduct(), context=rc.context.Prefix()),
        rc.Recipe(context=rc.context.Window(size=3), features=rc.features.Polynomial(degree=2)),
    ],
)
def test_every_kind_of_recipe(recipe: rc.Recipe) -> None:
    result = rc.diagnose(build(recipe), tokens(8))
    assert result.first_fault is None
    assert result.loss.isfinite().all()
    assert result.findings is not None


def test_steps_that_overshoot_are_reported() -> None:
    fast = LayerOptions(gate_options={"lr": GateOptions(low=2.4, high=2.6, init=2.5)})
    result = rc.diagnose(build(rc.Recipe(), fast), tokens(12))
    assert ((result.step > 2.4) & (result.step < 2.6)).all()
    assert sum("overshoot" in line for line in result.findings) == HEADS
    slow = LayerOptions(gate_options={"lr": GateOptions(high=1e-4, init=1e-5)})
    lines = rc.diagnose(build(rc.Recipe(), slow), tokens(12)).findings
    assert sum("next to nothing is written" in line for line in lines) == HEADS


def test_memory_that_decays_is_reported() -> None:
    """An initial norm of 3.86 decays to a seventieth in 33 tokens without writes."""
    recipe = rc.Recipe(
        memory=rc.memory.MLP(norm="layer"),
        retention=rc.retention.Decay(alpha=0.013 ** (1 / 33)),
        algorithm=rc.algorithm.GradientDescent(lr=1e-3),
    )
    result = rc.diagnose(build(recipe), tokens(33))
    first, last = result.memory["W1"][0, 0], result.memory["W1"][-1, 0]
    assert 1e-2 * first < last < 5e-2 * first
    findings = [line for line in result.findings if "head 0: the norm of W1 decays" in line]
    assert len(findings) == 1 and "within 33 tokens" in findings[0]
    assert "nothing to report" not in str(result)


def test_memory_that_grows_and_decays_is_reported() -> None:
    """From zero over a maximum to zero: the first and last norm alone would not show it."""
    layer, x = build(rc.Recipe(retention=rc.retention.Decay(alpha=0.8))), tokens(40)
    x[:, 4:] = 0  # no keys and values after this token
    result = rc.diagnose(layer, x)
    assert result.memory["W"][0].max() == 0
    assert any("head 1: the norm of W decays" in line for line in result.findings)
    diagnosis = rc.diagnose(build(rc.Recipe(retention=rc.retention.Decay(alpha=0.8))), tokens(40))
    assert not any("decays from" in line for line in diagnosis.findings)


def test_first_overflow_is_named() -> None:
    """Steps of 8 on one head make its memory diverge; the other is unchanged."""
    fast = LayerOptions(gate_options={"lr": GateOptions(low=0.0, high=16.0, init=(0.5, 8.0))})
    layer = build(rc.Recipe(), fast).float()
    for parameter in (layer.gates["lr"].weight,):
        nn.init.zeros_(parameter)
    x = tokens(1).float().expand(B, 200, D)
    k = layer.memory_inputs(x).k
    result = rc.diagnose(layer, x)
    fault = result.first_fault
    assert fault is not None
    assert (fault.head, fault.gate) == (1, "lr")
    assert fault.quantity in ("memory W", "output")
    # The error grows 7-fold with every token whose key repeats: from 1 to 3e38 in 46 tokens.
    assert fault.token is not None
    assert 40 < fault.token < 56
    # The square overflows before the error: the surprise is +inf and not NaN.
    assert not result.loss[: fault.token - 1].isnan().any()
    assert result.loss[fault.token + 1 :].isnan().all()
    assert "lr = 8" in str(fault)
    assert str(fault) in str(result)
    y = layer(x[:, : fault.token])[0]
    assert y.isfinite().all()
    torch.testing.assert_close(k[:, 50], k[:, 51])


def test_overflow_of_a_rate_without_a_gate() -> None:
    torch.manual_seed(0)
    recipe = rc.Recipe(
        memory=rc.memory.MLP(depth=2), algorithm=rc.algorithm.GradientDescent(batch_size=8, lr=4.0)
    )
    result = rc.diagnose(rc.MemoryLayer(32, 2, recipe), 3 * torch.randn(2, 64, 32))
    assert result.first_fault is not None
    assert result.first_fault.gate is None
    assert "smaller steps" in result.first_fault.cause


def test_inputs_are_checked_first() -> None:
    layer, x = build("gated_delta_net"), tokens()
    x[1, 7, 3] = torch.nan
    fault = rc.diagnose(layer, x).first_fault
    assert fault is not None
    assert (fault.quantity, fault.row, fault.token, fault.head) == ("x", 1, 7, None)

    layer = build("gated_delta_net")
    with torch.no_grad():
        layer.out.weight[0, 0] = torch.inf
    fault = rc.diagnose(layer, tokens()).first_fault
    assert fault is not None
    assert fault.quantity == "param out.weight"

    # A gate that overflows at one token and head, from finite weights.
    log_rate = rc.Recipe(
        bias=rc.bias.DotProduct(), algorithm=rc.algorithm.GradientDescent(lr="log_input")
    )
    layer, x = build(log_rate).float(), tokens().float()
    with torch.no_grad():
        layer.gates["log_lr"].weight.zero_()
        layer.gates["log_lr"].weight[1] = 1e38
    x[:, :, :] = 0
    x[1, 5] = 100.0
    result = rc.diagnose(layer, x)
    fault = result.first_fault
    assert fault is not None
    assert (fault.quantity, fault.row, fault.token, fault.head) == ("gate log_lr", 1, 5, 1)
    assert fault.gate == "log_lr"
    assert result.loss.isnan().all()


def test_saturated_gates() -> None:
    options = LayerOptions(gate_options={"lr": GateOptions(init=(0.5, 0.9995))})
    layer = build(rc.Recipe(retention=rc.retention.Decay()), options)
    with torch.no_grad():
        for gate in layer.gates.values():
            gate.weight.zero_()
        layer.gates["log_decay"].bias.copy_(torch.tensor([3.0, 12.0]))
    result = rc.diagnose(layer, tokens())
    assert result.saturated["lr"].tolist() == [0, 1]
    # e^(−12) over 24 tokens keeps the memory, e^(−3) does not.
    assert result.saturated["log_decay"].tolist() == [0, 1]
    assert "head 1: gate 'lr' is saturated at 100%" in result.findings


def test_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = rc.diagnose(build("titans"), tokens(48)).plot("Titans at its start")
    png, svg = figure.save(tmp_path / "titans")
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    assert width == 1440
    assert height > 880  # three rows of panels
    assert "<svg" in svg.read_text()


def test_errors() -> None:
    layer = build("delta_net")
    with pytest.raises(ValueError, match=r"\[B, T, 16\] with B and T ≥ 1, not \[2, 0, 16\]"):
        rc.diagnose(layer, tokens(0))
    with pytest.raises(rc.RecipeError, match="not Linear"):
        rc.diagnose(nn.Linear(3, 3), tokens())  # type: ignore[arg-type]
