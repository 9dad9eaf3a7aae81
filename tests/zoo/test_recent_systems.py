"""Systems of 2025 and 2026 as loops over tokens, from the weights of their layers.

Each loop is written from the equations of the paper, in float64. Outputs and the final memory agree
to 1e-10, at an odd length, in any split, token by token, with padding and with packed documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.zoo.test_equivalences import TOL, normal, outer
from tests.zoo.test_systems import D, around, finish, gate, layer
from torch import Tensor
from torch.nn import functional

import recollect as rc

N = 41
Loop = Callable[[rc.MemoryLayer, Tensor], tuple[Tensor, Tensor]]
"""Outputs of the memory ``[B, T, H, V]`` and its weights ``[B, H, V, K]`` after the last token."""


def zeros(module: rc.MemoryLayer, x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], module.num_heads, module.value_dim, module.head_dim)


def read(M: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bhvk,bhk->bhv", M, q)


def column(number: Tensor, t: int) -> Tensor:
    return number[:, t][..., None, None]


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt()


def decay(module: rc.MemoryLayer, x: Tensor, name: str = "log_decay") -> Tensor:
    """α = sigmoid(linear(x))."""
    return gate(module, name, x).sigmoid()


def unit_inputs(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = around(module, x)
    return unit(q), unit(k), v


def kimi_delta_attention(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """S = (I − β k kᵀ) Diag(α) S + β k vᵀ, eq. 1 of Kimi Linear, transposed."""
    (q, k, v), alpha, beta = (
        unit_inputs(module, x),
        decay(module, x),
        gate(module, "lr", x).sigmoid(),
    )
    M, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        M = M * alpha[:, t].unsqueeze(-2)
        erased = outer(read(M, k[:, t]), k[:, t])
        M = M - column(beta, t) * erased + column(beta, t) * outer(v[:, t], k[:, t])
        outputs.append(read(M, q[:, t]))
    return torch.stack(outputs, 1), M


def comba(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """S = α S − β (α S p − v) kᵀ with p = d k, o = S (q − D k)."""
    (q, k, v), alpha, beta = (
        unit_inputs(module, x),
        decay(module, x),
        gate(module, "lr", x).sigmoid(),
    )
    d = module.gates["erase"].bias.sigmoid()[:, None]
    M, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        M = column(alpha, t) * M
        M = M - column(beta, t) * outer(read(M, d * k[:, t]) - v[:, t], k[:, t])
        outputs.append(read(M, q[:, t] - module.ties.factors["q"] * k[:, t]))
    return torch.stack(outputs, 1), M


def efla(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """dS/ds = −k kᵀ S + k vᵀ over a time β, transposed, by the matrix exponential."""
    (q, k, v), beta = around(module, x), gate(module, "lr", x).sigmoid()
    M, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        # (M, v) as rows of one state: its generator is [[−k kᵀ, 0], [kᵀ, 0]].
        size = k.shape[-1]
        generator = k.new_zeros(*k.shape[:1], k.shape[2], size + 1, size + 1)
        generator[..., :size, :size] = -outer(k[:, t], k[:, t])
        generator[..., size, :size] = k[:, t]
        flow = torch.linalg.matrix_exp(column(beta, t) * generator)
        M = (torch.cat([M, v[:, t].unsqueeze(-1)], -1) @ flow)[..., :size]
        outputs.append(read(M, q[:, t]))
    return torch.stack(outputs, 1), M


def momentum_delta_rule(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """M = μ M + η k (α p S − v), S = α S − (1 − μ) β M, o = (q − D k) S, transposed, p = k."""
    (q, k, v), alpha = unit_inputs(module, x), decay(module, x)
    eta, beta, mu = (gate(module, name, x).sigmoid() for name in ("lr", "outer_lr", "momentum"))
    mu = (1 - 1e-6) * mu  # below 1
    S, M, outputs = zeros(module, x), zeros(module, x), []
    for t in range(x.shape[1]):
        error = column(alpha, t) * outer(read(S, k[:, t]), k[:, t]) - outer(v[:, t], k[:, t])
        M = column(mu, t) * M + 2 * column(eta, t) * error
        S = column(alpha, t) * S - column((1 - mu) * beta, t) * M
        outputs.append(read(S, q[:, t] - module.ties.factors["q"] * k[:, t]))
    return torch.stack(outputs, 1), S


def gated_kalmanet(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """H = γ H + k kᵀ, U = γ U + v kᵀ, y = U (H + 0.02 ‖H‖_F I)⁻¹ q."""
    (q, k, v), gamma = unit_inputs(module, x), decay(module, x)
    U, outputs = zeros(module, x), []
    H = U.new_zeros(*U.shape[:2], U.shape[-1], U.shape[-1])
    for t in range(x.shape[1]):
        H = column(gamma, t) * H + outer(k[:, t], k[:, t])
        U = column(gamma, t) * U + outer(v[:, t], k[:, t])
        ridge = 0.02 * (torch.linalg.matrix_norm(H) + 1e-6)
        system = H + ridge[..., None, None] * torch.eye(H.shape[-1], dtype=H.dtype)
        outputs.append(read(U, torch.linalg.solve(system, q[:, t])))
    return torch.stack(outputs, 1), U


def oja(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """S = S Diag(α), S = S + β (x − S c) cᵀ, o = Sᵀ q, with inputs x and codes c."""
    (q, code, inputs), alpha = unit_inputs(module, x), decay(module, x)
    beta = gate(module, "lr", x).sigmoid()
    S, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        S = S * alpha[:, t].unsqueeze(-2)
        S = S + column(beta, t) * outer(inputs[:, t] - read(S, code[:, t]), code[:, t])
        outputs.append(read(S.mT, q[:, t]))
    return torch.stack(outputs, 1), S


def kalman_linear_attention(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """η = a η/(a² + p Λ) + w k v, Λ = Λ/(a² + p Λ) + w k², y = Σ_n q_n η_n/Λ_n."""
    q, k, v = unit_inputs(module, x)
    w = functional.softplus(gate(module, "observation_precision", x))
    a = module.gates["log_decay"].bias.sigmoid()
    p = functional.softplus(module.gates["process_noise"].bias) + 1e-6
    eta, precision, outputs = zeros(module, x), torch.ones_like(k[:, 0]), []
    for t in range(x.shape[1]):
        predicted = a**2 + p * precision
        eta = (a / predicted).unsqueeze(-2) * eta + column(w, t) * outer(v[:, t], k[:, t])
        precision = precision / predicted + w[:, t].unsqueeze(-1) * k[:, t] ** 2
        outputs.append(read(eta / precision.unsqueeze(-2), q[:, t]))
    return torch.stack(outputs, 1), eta / precision.unsqueeze(-2)


def gated_delta_net_2(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """S = (I − k (b ⊙ k)ᵀ) Diag(α) S + k (w ⊙ v)ᵀ, transposed."""
    (q, k, v), alpha = unit_inputs(module, x), decay(module, x)
    b, w = (gate(module, name, x).sigmoid() for name in ("probe", "lr"))
    M, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        M = M * alpha[:, t].unsqueeze(-2)
        error = w[:, t] * v[:, t] - read(M, b[:, t] * k[:, t])
        M = M + outer(error, k[:, t])
        outputs.append(read(M, q[:, t]))
    return torch.stack(outputs, 1), M


def q_delta(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """S = α S − β (α S (k + λ q) − v) kᵀ."""
    (q, k, v), alpha, beta = (
        unit_inputs(module, x),
        decay(module, x),
        gate(module, "lr", x).sigmoid(),
    )
    feedback = gate(module, "probe", x).sigmoid().unsqueeze(-1)
    M, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        M = column(alpha, t) * M
        error = read(M, k[:, t] + feedback[:, t] * q[:, t]) - v[:, t]
        M = M - column(beta, t) * outer(error, k[:, t])
        outputs.append(read(M, q[:, t]))
    return torch.stack(outputs, 1), M


def preconditioned(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """A = a A + b k², P = 1.5^(−r/(1 + |r|)) with r = log(A + 1e-6) − c, write at P ⊙ k."""
    (q, k, v), alpha, beta = (
        unit_inputs(module, x),
        decay(module, x),
        gate(module, "lr", x).sigmoid(),
    )
    a, b = decay(module, x, "log_moment_decay"), gate(module, "moment_rate", x).sigmoid()
    alpha = alpha if alpha.dim() == 4 else alpha.unsqueeze(-1)
    M, A, outputs = zeros(module, x), torch.zeros_like(k[:, 0]), []
    for t in range(x.shape[1]):
        A = a[:, t, :, None] * A + b[:, t, :, None] * k[:, t] ** 2
        r = (A + 1e-6).log() - module.ties.factors["k"]
        P = (-math.log(1.5) * r / (1 + r.abs())).exp()
        M = M * alpha[:, t].unsqueeze(-2)
        error = read(M, k[:, t]) - v[:, t]
        M = M - column(beta, t) * outer(error, P * k[:, t])
        outputs.append(read(M, q[:, t]))
    return torch.stack(outputs, 1), M


def erase_then_delta(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """S' = α S (I − a u uᵀ), S = S' (I − β k kᵀ) + β v kᵀ."""
    projected = x @ module.qkv.weight.T
    w, taps = module.conv.width, module.conv.weight
    padded = functional.pad(projected, (0, 0, w - 1, 0))
    mixed = sum(taps[j] * padded[:, j : j + x.shape[1]] for j in range(w))
    q, keys, v = functional.silu(mixed).split(module.qkv_sizes, -1)  # type: ignore[union-attr,arg-type]
    q, v = (unit(q.unflatten(-1, (module.num_heads, -1))), v.unflatten(-1, (module.num_heads, -1)))
    u, k = unit(keys.unflatten(-1, (module.num_heads, 2, -1))).unbind(3)
    rates, alpha = gate(module, "lr", x).sigmoid(), decay(module, x)
    a, beta = rates.unbind(-1)
    M, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        M = column(alpha, t) * M
        M = M - column(a, t) * outer(read(M, u[:, t]), u[:, t])
        M = M - column(beta, t) * outer(read(M, k[:, t]) - v[:, t], k[:, t])
        outputs.append(read(M, q[:, t]))
    return torch.stack(outputs, 1), M


def mamba3_gates(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Δ, α = exp(−Δ a), λ and the angles Σ Δ θ."""
    delta = functional.softplus(gate(module, "lr", x))
    start = module.gates["lr"].initial()
    a = functional.softplus(-gate(module, "log_decay", x)) / start
    alpha, mix = (-delta * a).exp(), gate(module, "window", x).sigmoid()
    theta = module.phase.bias + (x @ module.phase.weight.T).unflatten(-1, module.phase.bias.shape)
    return delta, alpha, mix, (theta * (delta / start).unsqueeze(-1)).cumsum(1)


def turned(part: Tensor, weight: Tensor, bias: Tensor, angle: Tensor) -> Tensor:
    """RMS norm, factors and biases, then a rotation of the first half of the channels."""
    size, part = angle.shape[-1], part * (part.square().mean(-1, keepdim=True)).rsqrt()
    part = part * weight + bias
    pair = torch.complex(part[..., :size], part[..., size : 2 * size]) * torch.exp(-1j * angle)
    return torch.cat([pair.real, pair.imag, part[..., 2 * size :]], -1)


def mamba3(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """h = α h + (1 − λ) Δ α B_(t−1) x_(t−1) + λ Δ B x, α = exp(−Δ a), B and C turned by Σ Δ θ."""
    (q, k, v), (delta, alpha, mix, angle) = around(module, x), mamba3_gates(module, x)
    rows = zip(module.qk_affine.weight.chunk(2), module.qk_affine.bias.chunk(2), strict=True)
    C, B = (turned(part, *row, angle) for part, row in zip((q, k), rows, strict=True))
    h, outputs, previous = zeros(module, x), [], torch.zeros_like(outer(v[:, 0], B[:, 0]))
    for t in range(x.shape[1]):
        now = outer(v[:, t], B[:, t])
        previous_step = column((1 - mix) * delta * alpha, t) * previous
        h = column(alpha, t) * h + previous_step + column(mix * delta, t) * now
        outputs.append(read(h, C[:, t]))
        previous = now
    return torch.stack(outputs, 1) + module.skip * v, h


def mamba3_mimo(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The trapezoidal rule for h = Σ_r B_r x_rᵀ with x_r = p_r ⊙ x, and y_r = hᵀ C_r + D ⊙ x_r."""
    (q, k, v), (delta, alpha, mix, angle) = around(module, x), mamba3_gates(module, x)
    R, heads = module.recipe.algorithm.updates_per_token, module.num_heads
    rows = (
        a.unflatten(0, (2, heads, R)).unbind(0)
        for a in (module.qk_affine.weight, module.qk_affine.bias)
    )
    C, B = (
        turned(part.unflatten(-1, (R, -1)), *row, angle.unsqueeze(3))
        for part, row in zip((q, k), zip(*rows, strict=True), strict=True)
    )
    values = v.unsqueeze(3) * module.mimo.values
    h, outputs, previous = zeros(module, x), [], torch.zeros_like(zeros(module, x))
    for t in range(x.shape[1]):
        now = torch.einsum("bhrv,bhrk->bhvk", values[:, t], B[:, t])
        previous_step = column((1 - mix) * delta * alpha, t) * previous
        h = column(alpha, t) * h + previous_step + column(mix * delta, t) * now
        outputs.append(torch.einsum("bhvk,bhrk->bhrv", h, C[:, t]))
        previous = now
    return torch.stack(outputs, 1) + module.skip.unsqueeze(1) * values, h


def complete(module: rc.MemoryLayer, y: Tensor, x: Tensor) -> Tensor:
    """The output of a layer; outputs y_r ``[B, T, H, R, V]`` are Σ_r o_r ⊙ y_r ⊙ silu(g_r ⊙ z)."""
    if module.mimo is None:
        return finish(module, y, x)
    z = (x @ module.output_gate.weight.T).unflatten(-1, (module.num_heads, 1, -1))
    y = (module.mimo.outputs * y * functional.silu(module.mimo.gates * z)).sum(3)
    return y.flatten(2) @ module.out.weight.T


def falcon(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """W = (1 − η λ) W + (η/B) Σ_i (v_i − W x_i) x_iᵀ, x_t = k_(t−1), η = β/(‖x_t‖² + λ)."""
    q, k, v = unit_inputs(module, x)
    keys = torch.cat([torch.zeros_like(k[:, :1]), k[:, :-1]], 1)
    beta, ridge = gate(module, "lr", x).sigmoid(), 0.01
    size = keys.square().sum(-1)
    eta = beta / ((size if beta.dim() == 3 else size.unsqueeze(-1)) + ridge)
    eta = eta if eta.dim() == 4 else eta.unsqueeze(-1)
    count = module.recipe.context.horizon or 1
    W, outputs = zeros(module, x), []
    for t in range(x.shape[1]):
        mean = torch.zeros_like(W)
        for i in range(max(0, t - count + 1), t + 1):
            mean = mean + outer(v[:, i] - read(W, keys[:, i]), keys[:, i]) / count
        W = (1 - eta[:, t].unsqueeze(-1) * ridge) * W + eta[:, t].unsqueeze(-1) * mean
        outputs.append(read(W, q[:, t]))
    return torch.stack(outputs, 1), W


LOOPS: dict[str, Loop] = {
    "kimi_delta_attention": kimi_delta_attention,
    "comba": comba,
    "efla": efla,
    "gated_delta_net_2": gated_delta_net_2,
    "q_delta": q_delta,
    "preconditioned_gated_delta_net": preconditioned,
    "preconditioned_kda": preconditioned,
    "erase_then_delta": erase_then_delta,
    "momentum_delta_rule": momentum_delta_rule,
    "gated_kalmanet": gated_kalmanet,
    "oja": oja,
    "kalman_linear_attention": kalman_linear_attention,
    "mamba3": mamba3,
    "mamba3_mimo": mamba3_mimo,
    "falcon_1": falcon,
    "falcon_2": falcon,
    "falcon_3": falcon,
}
NAMES = pytest.mark.parametrize("name", LOOPS)


def tokens(rows: int = 2) -> Tensor:
    return normal(rows, N, D, seed=30)


@NAMES
def test_the_layer_is_the_loop_of_the_paper(name: str) -> None:
    result, x = layer(name), tokens()
    y, state = result(x)
    memory, M = LOOPS[name](result, x)
    torch.testing.assert_close(y, complete(result, memory, x), **TOL)
    torch.testing.assert_close(state.memory.weights[0], M, **TOL)


def test_an_output_gate_of_low_rank() -> None:
    options = rc.LayerOptions(output_gate="sigmoid", output_gate_rank=3)
    module, x = layer("kimi_delta_attention", options=options), tokens()
    assert module.output_gate_down.weight.shape == (3, D)
    assert module.output_gate.bias.shape == (D,)
    memory, _ = kimi_delta_attention(module, x)
    torch.testing.assert_close(module(x)[0], finish(module, memory, x), **TOL)
    with pytest.raises(rc.RecipeError, match=r"output_gate_rank=3.* needs an output gate"):
        rc.LayerOptions(output_gate="none", output_gate_rank=3)


@NAMES
def test_gradients_are_those_of_the_loop(name: str) -> None:
    built, x = layer(name), tokens().requires_grad_()
    weights = [x, *built.parameters()]
    loss = built(x)[0].square().sum()
    want = complete(built, LOOPS[name](built, x)[0], x).square().sum()
    result = torch.autograd.grad(loss, weights, allow_unused=True)
    for one, other in zip(
        result, torch.autograd.grad(want, weights, allow_unused=True), strict=True
    ):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


@NAMES
@pytest.mark.parametrize("split", [(1,) * 9 + (N - 9,), (17, 24), (40, 1)])
def test_splits_and_tokens(name: str, split: tuple[int, ...]) -> None:
    result, x = layer(name), tokens()
    y, want = result(x)
    parts, state = [], None
    for piece in x.split(split, dim=1):
        part, state = result(piece, state)
        state = rc.LayerState.from_dict(state.to_dict())
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
    for one, other in zip(state.flatten()[1], want.flatten()[1], strict=True):
        torch.testing.assert_close(one, other, **TOL)


@NAMES
def test_padding_and_documents(name: str) -> None:
    result, x = layer(name), tokens()
    mask = torch.ones(2, N)
    mask[0, :7], mask[1, 30:] = 0, 0
    _, start = result(normal(2, 3, D, seed=31))
    y, state = result(x, start, mask)
    for row, valid in enumerate(mask.bool()):
        single, end = result(x[row : row + 1, valid], start.select(torch.tensor([row])))
        torch.testing.assert_close(y[row : row + 1, valid], single, **TOL)
        mine = state.select(torch.tensor([row])).flatten()[1]
        for one, other in zip(mine, end.flatten()[1], strict=True):
            torch.testing.assert_close(one, other, **TOL)
    _, start = result(normal(3, 3, D, seed=32))
    y, state = result(x[:1], start, cu_seqlens=torch.tensor([0, 16, 16, N]))
    for row, (first, last) in enumerate(((0, 16), (16, 16), (16, N))):
        single, end = result(x[:1, first:last], start.select(torch.tensor([row])))
        torch.testing.assert_close(y[:, first:last], single, **TOL)
        mine = state.select(torch.tensor([row])).flatten()[1]
        for one, other in zip(mine, end.flatten()[1], strict=True):
            torch.testing.assert_close(one, other, **TOL)


@NAMES
def test_earlier_states_of_a_recorded_call(name: str) -> None:
    result, x = layer(name), tokens()
    _, start = result(normal(2, 3, D, seed=31))
    calls: list[rc.layer.RecordedCall] = []
    result(x, start, calls=calls)
    state = calls[0].state_at(23)
    _, want = result(x[:, :23], start)
    for one, other in zip(state.flatten()[1], want.flatten()[1], strict=True):
        torch.testing.assert_close(one, other, **TOL)
