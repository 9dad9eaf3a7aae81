"""State-space models, RWKV, mLSTM and related systems against their papers' equations.

Each equation is written out as a loop over tokens, in the paper's variables and, if the paper has
them, in complex numbers. The recurrence runs through `recall`, and ties, shifts and angles through
the layer. In float64 and to 1e-10: both sides differ by rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.zoo.test_equivalences import (
    ALPHA,
    CHANNEL,
    KEY,
    LR,
    METHODS,
    RAW,
    TOL,
    B,
    H,
    K,
    Q,
    T,
    V,
    X,
    erased,
    normal,
    outer,
    run,
    shaped,
    uniform,
    zoo,
)
from torch import Tensor
from torch.nn import functional

import recollect as rc

ROWS = uniform(0.7, 1.0, B, T, H, V, seed=21)
D, N = 8, 40


def layer(name: str, heads: int = 2, **overrides: object) -> rc.MemoryLayer:
    torch.manual_seed(0)
    result = rc.zoo.get(name).build(D, heads, **overrides).double()  # type: ignore[arg-type]
    with torch.no_grad():  # away from the special values at which learning starts
        for weight in result.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return result


def around(module: rc.MemoryLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a layer without a shift, before ties and norms, from its weights."""
    u = x @ module.qkv.weight.T
    if module.conv is not None:
        w, a = module.conv.width, module.conv.weight
        padded = functional.pad(u, (0, 0, w - 1, 0))
        u = sum(a[j] * padded[:, j : j + x.shape[1]] for j in range(w))  # type: ignore[assignment]
    if module.options.conv_activation == "silu":
        u = functional.silu(u)
    q, k, v = u.split(module.qkv_sizes, -1)
    return tuple(  # type: ignore[return-value]
        part.unflatten(-1, (module.num_kv_heads, -1)) if part.shape[-1] else part
        for part in (q, k, v)
    )


def gate(module: rc.MemoryLayer, name: str, x: Tensor) -> Tensor:
    """A number's argument z at tokens x, from its weights."""
    number = module.gates[name]
    h = x if number.down is None else x @ number.down.T
    return (h @ number.weight.T).unflatten(-1, number.shape) + number.bias


def finish(module: rc.MemoryLayer, y: Tensor, x: Tensor) -> Tensor:
    """The layer's norm, gate and output map."""
    if module.norm is not None:
        y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.norm.weight
    y = y.flatten(2)
    if module.output_gate is not None:
        activation = torch.sigmoid if module.options.output_gate == "sigmoid" else functional.silu
        down, gate = module.output_gate_down, module.output_gate
        z = (x if down is None else x @ down.weight.T) @ gate.weight.T
        y = y * activation(z if gate.bias is None else z + gate.bias)
    return y @ module.out.weight.T


def tokens() -> Tensor:
    return normal(2, N, D, seed=30)


# -- decays --------------------------------------------------------------------------------------


@METHODS
def test_dfw(method: str) -> None:
    def step(M: Tensor, t: int) -> Tensor:
        return outer(ROWS[:, t], CHANNEL[:, t]) * M + outer(X[:, t], KEY[:, t])

    result = zoo("dfw", method, log_decay=CHANNEL.log(), log_decay_value=ROWS.log())
    torch.testing.assert_close(result, run(step), **TOL)


@METHODS
def test_retnet_with_xpos(method: str) -> None:
    """Queries times γ^n ζ^(n/512) e^{inθ}, keys times γ^(−n) ζ^(−n/512) e^{inθ}, complex."""
    size = 6
    q, k = normal(B, T, H, size, seed=41), normal(B, T, H, size, seed=42)
    i, n = torch.arange(size // 2).double(), torch.arange(T).double()
    zeta = (2 * i / size + 0.4) / 1.4
    gamma = 1 - 2.0 ** (-5 - torch.arange(H).double())
    rotation = torch.exp(1j * n[:, None] * 10000 ** (-2 * i / size))[None, :, None]
    scale = (zeta[None] ** (n[:, None] / 512))[None, :, None] * (gamma[None] ** n[:, None])[
        None, :, :, None
    ]
    cq = torch.complex(*q.chunk(2, -1)) * rotation
    ck = torch.complex(*k.chunk(2, -1)) * rotation
    score = torch.einsum("bthc,bshc->bhts", cq * scale, (ck / scale).conj()).real
    want = torch.einsum("bhts,bshv->bthv", score.tril(), X)
    built = rc.zoo.get("retnet_xpos").build(H * size, H, value_dim=V).double()
    cos, sin = rotation.real, rotation.imag

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    decay = built.params["decay"](torch.zeros(1, 1, 1, dtype=torch.float64))
    result = zoo("retnet_xpos", method, q=rotated(q), k=rotated(k), params={"decay": decay})
    torch.testing.assert_close(result, want, **TOL)


def test_gateloop_is_a_complex_decay() -> None:
    """S_t = S_(t−1) Diag(α_t e^{iθ_t}) + v_t k_tᵀ and y_t = Re(S_t q̄_t), complex k and q."""
    result, x = layer("gateloop"), tokens()
    q, k, v = around(result, x)
    unit = [functional.normalize(part, dim=-1) for part in (q, k)]
    cq, ck = (torch.complex(*part.chunk(2, -1)) for part in unit)
    alpha = functional.logsigmoid(gate(result, "log_decay", x)).exp()
    theta = result.phase.bias + (x @ result.phase.weight.T).unflatten(-1, result.phase.bias.shape)
    a = alpha * torch.exp(1j * theta)
    S = torch.zeros(2, 2, result.value_dim, result.head_dim // 2, dtype=torch.complex128)
    outputs = []
    for t in range(N):
        S = S * a[:, t].unsqueeze(-2) + outer(v[:, t], ck[:, t])
        outputs.append(torch.einsum("bhvc,bhc->bhv", S, cq[:, t].conj()).real)
    want = finish(result, torch.stack(outputs, 1), x)
    torch.testing.assert_close(result(x)[0], want, **TOL)


def test_hgrn2_writes_the_complement_of_its_decay() -> None:
    result, x = layer("hgrn2"), tokens()
    q, _, v = around(result, x)
    f = functional.logsigmoid(gate(result, "log_decay", x)).exp()
    S = torch.zeros(2, 2, result.value_dim, result.head_dim, dtype=torch.float64)
    outputs = []
    for t in range(N):
        S = S * f[:, t].unsqueeze(-2) + outer(v[:, t], 1 - f[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
    torch.testing.assert_close(result(x)[0], finish(result, torch.stack(outputs, 1), x), **TOL)


# -- state-space models --------------------------------------------------------------------------


def test_lru_is_a_complex_vector() -> None:
    """h_t = λ ⊙ h_(t−1) + √(1 − |λ|²) ⊙ B u_t, λ = α e^{iθ}; read is (Re h, Im h) + D ⊙ v."""
    result, x = layer("lru"), tokens()
    _, _, v = around(result, x)
    size = result.params["decay"](x).detach()  # [H, V/2]
    lam = size * torch.exp(1j * result.phase.bias)
    rate = result.params["lr"](x)  # [H, V/2]
    u = torch.complex(*v.chunk(2, -1)) * rate * (1 - lam.abs() ** 2).sqrt()
    h = torch.zeros_like(u[:, 0])
    outputs = []
    for t in range(N):
        h = lam * h + u[:, t]
        outputs.append(torch.cat([h.real, h.imag], -1))
    want = finish(result, torch.stack(outputs, 1) + result.skip * v, x)
    torch.testing.assert_close(result(x)[0], want, **TOL)


def test_rg_lru() -> None:
    """Griffin eqs. 1–4: r, i = σ(·), a_t = exp(−c softplus(Λ) r_t), √(1 − a²) before the input."""
    result, x = layer("rg_lru"), tokens()
    _, _, v = around(result, x)
    r, i = (gate(result, name, x).sigmoid() for name in ("log_decay", "lr"))
    # The layer's squash runs from −8 up to 0: −8 (1 − σ(z)) = −8 σ(−z).
    r = 1 - r
    a = (-8 * functional.softplus(result.params["decay_scale"].bias) * r).exp()
    h, outputs = torch.zeros_like(v[:, 0]), []
    for t in range(N):
        h = a[:, t] * h + (1 - a[:, t] ** 2).sqrt() * i[:, t] * v[:, t]
        outputs.append(h)
    torch.testing.assert_close(result(x)[0], finish(result, torch.stack(outputs, 1), x), **TOL)


@pytest.mark.parametrize("heads", [1, 2])
def test_mamba_is_the_selective_scan(heads: int) -> None:
    """h = exp(Δ A) h + Δ B x, y = C h + D x (Mamba algorithm 2), with A = −exp(A_log)."""
    result, x = layer("mamba", heads), tokens()
    q, k, v = around(result, x)
    assert k.shape[-1] == 16
    delta = functional.softplus(gate(result, "lr", x))
    A = -result.params["decay_scale"].bias.exp()
    h, outputs = torch.zeros(2, heads, D // heads, 16, dtype=torch.float64), []
    for t in range(N):
        step = delta[:, t].unsqueeze(-1)
        h = (step * A).exp() * h + step * outer(v[:, t], k[:, t])
        outputs.append((h * q[:, t].unsqueeze(-2)).sum(-1))
    want = finish(result, torch.stack(outputs, 1) + result.skip * v, x)
    torch.testing.assert_close(result(x)[0], want, **TOL)


def test_mamba_starts_at_its_published_rates() -> None:
    """A_n = n + 1 (S4D-real) and Δ from 0.001 to 0.1."""
    result = rc.zoo.get("mamba").build(64, 1)
    scale = result.params["decay_scale"](torch.zeros(1, 1, 64))
    torch.testing.assert_close(scale, torch.arange(1.0, 17).expand(1, 64, 16), rtol=1e-3, atol=0)
    delta = functional.softplus(result.gates["lr"].bias.detach())
    assert float(delta.min()) == pytest.approx(0.001, rel=0.06)
    assert float(delta.max()) == pytest.approx(0.1, rel=1e-3)


def test_mamba2_has_one_delta() -> None:
    """h = exp(−a Δ) h + Δ B x, one learned a > 0 per head (SSD)."""
    result, x = layer("mamba2"), tokens()
    q, k, v = around(result, x)
    delta = functional.softplus(gate(result, "lr", x))
    start = result.gates["lr"].initial()
    a = functional.softplus(-result.gates["log_decay"].bias) / start
    S, outputs = torch.zeros(2, 2, result.value_dim, result.head_dim, dtype=torch.float64), []
    for t in range(N):
        step = delta[:, t][..., None, None]
        S = (-a[:, None, None] * step).exp() * S + step * outer(v[:, t], k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
    want = finish(result, torch.stack(outputs, 1) + result.skip * v, x)
    torch.testing.assert_close(result(x)[0], want, **TOL)


@METHODS
def test_an_entry_decay_is_its_factors(method: str) -> None:
    """Mamba's recipe with log α = −Δ ⊗ a equals the recipe with a decay per entry."""
    delta, a = uniform(0.0, 1.0, B, T, H, V, seed=51), uniform(0.0, 4.0, H, V, K, seed=52)
    factored = zoo("mamba", method, lr=delta, log_decay=-delta, params={"decay_scale": a})
    dense = rc.Recipe(
        bias=rc.bias.DotProduct(),
        retention=rc.retention.Decay(per="entry"),
        algorithm=rc.algorithm.GradientDescent(per="value"),
    )
    gates = {"lr": delta, "log_decay": -delta.unsqueeze(-1) * a}
    want, _ = rc.recall(dense, Q, KEY, X, gates, engine=method)
    torch.testing.assert_close(factored, want, **TOL)


def test_longhorn_of_its_layer() -> None:
    """S = (1 − Δ ⊗ k²) ⊙ S + (Δ ⊙ x) ⊗ k with Δ = β/(1 + β kᵀk) per channel."""
    result, x = layer("longhorn_diagonal"), tokens()
    q, k, v = around(result, x)
    beta = gate(result, "lr", x).sigmoid()
    delta = beta / (1 + beta * k.square().sum(-1, keepdim=True))
    S, outputs = torch.zeros(2, 2, result.value_dim, 16, dtype=torch.float64), []
    for t in range(N):
        S = (1 - outer(delta[:, t], k[:, t] ** 2)) * S + outer(delta[:, t] * v[:, t], k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
    want = finish(result, torch.stack(outputs, 1) + result.skip * v, x)
    torch.testing.assert_close(result(x)[0], want, **TOL)


@METHODS
def test_diagonal_longhorn_is_longhorn_of_one_channel(method: str) -> None:
    """With K = 1 the matrix is its diagonal."""
    q, k = Q[..., :1], RAW[..., :1]
    delta = 3 * LR
    want = zoo("longhorn", method, q=q, k=k, lr=delta)
    eta = (delta / (1 + delta * k.squeeze(-1) ** 2)).unsqueeze(-1).expand(B, T, H, V)
    decay = torch.log1p(-eta.unsqueeze(-1) * k.square().unsqueeze(-2))
    result = zoo("longhorn_diagonal", method, q=q, k=k, lr=eta, log_decay=decay)
    torch.testing.assert_close(result, want, **TOL)


# -- RWKV ----------------------------------------------------------------------------------------


@METHODS
def test_rwkv6(method: str) -> None:
    """y_t = r_t (diag(u) k_t v_t + S_(t−1)), S_t = diag(w_t) S_(t−1) + k_t v_t."""
    u = normal(H, K, seed=61)
    S, outputs = torch.zeros(B, H, K, V, dtype=torch.float64), []
    for t in range(T):
        kv = outer(RAW[:, t], X[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", Q[:, t], S + u[..., None] * kv))
        S = CHANNEL[:, t].unsqueeze(-1) * S + kv
    result = zoo("rwkv6", method, k=RAW, log_decay=CHANNEL.log(), params={"bonus": u})
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


@METHODS
def test_rwkv7(method: str) -> None:
    """S_t = S_(t−1)(diag(w_t) − κ̂_tᵀ(a_t ⊙ κ̂_t)) + v_tᵀ k̃_t, the official form."""
    kappa = functional.normalize(normal(B, T, H, K, seed=62), dim=-1)
    a, u = uniform(0, 1, B, T, H, K, seed=63), normal(H, K, seed=64)

    def step(M: Tensor, t: int) -> Tensor:
        move = torch.diag_embed(CHANNEL[:, t]) - outer(kappa[:, t], a[:, t] * kappa[:, t])
        return M @ move + outer(X[:, t], RAW[:, t])

    want = run(step) + (Q * u * RAW).sum(-1, keepdim=True) * X
    result = zoo(
        "rwkv7", method, k=RAW, log_decay=CHANNEL.log(), probe=kappa, erase=a, params={"bonus": u}
    )
    torch.testing.assert_close(result, want, **TOL)


@METHODS
def test_rwkv7_is_the_form_of_miras(method: str) -> None:
    """MIRAS table 1: M (I − β k kᵀ) Diag(α) + β v kᵀ is the official form at κ̂ = k, a = β α."""

    def step(M: Tensor, t: int) -> Tensor:
        return (M @ erased(KEY, LR, t)) * CHANNEL[:, t].unsqueeze(-2) + shaped(LR, t) * outer(
            X[:, t], KEY[:, t]
        )

    rate = LR.unsqueeze(-1)
    result = zoo(
        "rwkv7",
        method,
        v=rate * X,
        log_decay=CHANNEL.log(),
        probe=KEY,
        erase=rate * CHANNEL,
        params={"bonus": torch.zeros(H, K, dtype=torch.float64)},
    )
    torch.testing.assert_close(result, run(step), **TOL)


def mixed(module: rc.MemoryLayer, x: Tensor) -> dict[str, Tensor]:
    """Every stream of a token shift, from its weights, token by token."""
    shift = module.shift
    initial = functional.pad(x, (0, 0, 1, 0))[:, :-1]
    delta = initial - x
    result = {}
    for i, name in enumerate(shift.streams):
        mix = shift.mix[i]
        if shift.first is not None:
            mix = mix + torch.tanh((x + shift.first * delta) @ shift.down[i]) @ shift.up[i]
        result[name] = x + mix * delta
    return result


def shifted(module: rc.MemoryLayer, streams: dict[str, Tensor]) -> list[Tensor]:
    weights = module.qkv.weight.split(module.qkv_sizes)
    return [
        (streams[name] @ w.T).unflatten(-1, (module.num_kv_heads, -1))
        for name, w in zip("qkv", weights, strict=True)
    ]


def test_the_layer_of_rwkv6() -> None:
    """Shifts that depend on the token, w = exp(−exp(·)), bonus."""
    result, x = layer("rwkv6"), tokens()
    recorded = mixed(result, x)
    r, k, v = shifted(result, recorded)
    w = torch.exp(-torch.exp(gate(result, "log_decay", recorded["log_decay"])))
    u = result.params["bonus"].bias
    S, outputs = torch.zeros(2, 2, result.head_dim, result.value_dim, dtype=torch.float64), []
    for t in range(N):
        kv = outer(k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], S + u[..., None] * kv))
        S = w[:, t].unsqueeze(-1) * S + kv
    torch.testing.assert_close(
        result(x)[0], finish(result, torch.stack(outputs, 1), recorded["out"]), **TOL
    )


def test_the_layer_of_rwkv7() -> None:
    """κ̂ = k ⊙ ξ of unit length, k̃ = k ⊙ (1 + ξ'(a − 1)), log w = −e^(−1/2) σ(·), bonus."""
    result, x = layer("rwkv7"), tokens()
    recorded = mixed(result, x)
    r, k, v = shifted(result, recorded)
    a = gate(result, "erase", recorded["erase"]).sigmoid()
    # The squash of the decay runs from −e^(−1/2) up to 0: −e^(−1/2)(1 − σ(z)).
    w = torch.exp(
        -math.exp(-0.5) * (1 - gate(result, "log_decay", recorded["log_decay"]).sigmoid())
    )
    kappa = functional.normalize(k * result.ties.factors["probe"], dim=-1)
    write_key = k * (1 + result.ties.factors["k"] * (a - 1))
    u = result.params["bonus"].bias
    S, outputs = torch.zeros(2, 2, result.value_dim, result.head_dim, dtype=torch.float64), []
    for t in range(N):
        move = torch.diag_embed(w[:, t]) - outer(kappa[:, t], a[:, t] * kappa[:, t])
        S = S @ move + outer(v[:, t], write_key[:, t])
        bonus = (r[:, t] * u * write_key[:, t]).sum(-1, keepdim=True) * v[:, t]
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, r[:, t]) + bonus)
    want = finish(result, torch.stack(outputs, 1), recorded["out"])
    torch.testing.assert_close(result(x)[0], want, **TOL)


# -- mLSTM and products of Householder matrices --------------------------------------------------


@METHODS
def test_mlstm_without_a_stabiliser(method: str) -> None:
    """xLSTM eqs. 19–27 in real numbers, small enough to need no stabiliser."""
    i, f = normal(B, T, H, seed=71), ALPHA
    C = torch.zeros(B, H, V, K, dtype=torch.float64)
    n, outputs = torch.zeros(B, H, K, dtype=torch.float64), []
    for t in range(T):
        C = shaped(f, t) * C + shaped(i.exp(), t) * outer(X[:, t], RAW[:, t])
        n = f[:, t, :, None] * n + i[:, t, :, None].exp() * RAW[:, t]
        below = (n * Q[:, t]).sum(-1, keepdim=True).abs().clamp_min(1.0)
        outputs.append(torch.einsum("bhvk,bhk->bhv", C, Q[:, t]) / below)
    result = zoo("mlstm", method, k=RAW, log_lr=i, log_decay=f.log())
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


def test_mlstm_with_its_stabiliser() -> None:
    """The paper's stabilised form, eqs. 15–18 and 25–27, with gates that otherwise overflow."""
    i, f = 20 * normal(B, T, H, seed=72), 20 * normal(B, T, H, seed=73)
    log_f = functional.logsigmoid(f)
    C = torch.zeros(B, H, V, K, dtype=torch.float64)
    n, m = torch.zeros(B, H, K, dtype=torch.float64), torch.zeros(B, H, dtype=torch.float64)
    outputs = []
    for t in range(T):
        new = torch.maximum(log_f[:, t] + m, i[:, t])
        write, keep = (i[:, t] - new).exp(), (log_f[:, t] + m - new).exp()
        C = keep[..., None, None] * C + write[..., None, None] * outer(X[:, t], RAW[:, t])
        n, m = keep[..., None] * n + write[..., None] * RAW[:, t], new
        below = torch.maximum((n * Q[:, t]).sum(-1).abs(), (-m).exp())
        outputs.append(torch.einsum("bhvk,bhk->bhv", C, Q[:, t]) / below[..., None])
    result = zoo("mlstm", "auto", k=RAW, log_lr=i, log_decay=log_f)
    torch.testing.assert_close(result, torch.stack(outputs, 1), **TOL)


def test_the_layer_of_mlstm_divides_keys() -> None:
    result, x = layer("mlstm"), tokens()
    q, k, v = around(result, x)
    i, f = gate(result, "log_lr", x), gate(result, "log_decay", x).sigmoid()
    k = k / math.sqrt(result.head_dim)
    C, n = torch.zeros(2, 2, 4, 4, dtype=torch.float64), torch.zeros(2, 2, 4, dtype=torch.float64)
    outputs = []
    for t in range(N):
        C = f[:, t][..., None, None] * C + i[:, t].exp()[..., None, None] * outer(v[:, t], k[:, t])
        n = f[:, t][..., None] * n + i[:, t].exp()[..., None] * k[:, t]
        below = (n * q[:, t]).sum(-1, keepdim=True).abs().clamp_min(1.0)
        outputs.append(torch.einsum("bhvk,bhk->bhv", C, q[:, t]) / below)
    torch.testing.assert_close(result(x)[0], finish(result, torch.stack(outputs, 1), x), **TOL)


@METHODS
@pytest.mark.parametrize("gated", [False, True])
def test_delta_product(method: str, gated: bool) -> None:
    """M_t = α_t M_(t−1) Π_j (I − β_j k_j k_jᵀ) + Σ_j β_j v_j k_jᵀ Π_(i>j) (I − β_i k_i k_iᵀ)."""
    n = 2
    k = functional.normalize(normal(B, T, H, n, K, seed=81), dim=-1)
    v, beta = normal(B, T, H, n, V, seed=82), uniform(0.0, 2.0, B, T, H, n, seed=83)
    eye = torch.eye(K, dtype=torch.float64)

    def step(M: Tensor, t: int) -> Tensor:
        M = shaped(ALPHA, t) * M if gated else M
        factors = [eye - beta[:, t, :, j, None, None] * outer(k[:, t, :, j], k[:, t, :, j])
                   for j in range(n)]  # fmt: skip
        writes = [beta[:, t, :, j, None, None] * outer(v[:, t, :, j], k[:, t, :, j])
                  for j in range(n)]  # fmt: skip
        return M @ factors[0] @ factors[1] + writes[0] @ factors[1] + writes[1]

    gates = {"lr": beta} | ({"log_decay": ALPHA.log()} if gated else {})
    name = "gated_delta_product" if gated else "delta_product"
    torch.testing.assert_close(zoo(name, method, k=k, v=v, **gates), run(step), **TOL)


@METHODS
def test_delta_product_of_one_is_delta_net(method: str) -> None:
    recipe = rc.zoo.get("delta_product").recipe
    one = recipe.replace(algorithm=replace(recipe.algorithm, updates_per_token=1))  # type: ignore[type-var]
    assert one == rc.zoo.get("delta_net").recipe
    beta = uniform(0.0, 2.0, B, T, H, seed=84)
    y = rc.recall(one, Q, KEY, X, {"lr": beta}, engine=method)[0]
    torch.testing.assert_close(y, zoo("delta_net", method, lr=beta), **TOL)


def test_delta_products_rates_reach_two() -> None:
    result = rc.zoo.get("delta_product").build(D, 2)
    rates = result.gates["lr"]
    assert float(rates.activation(torch.tensor(50.0))) == pytest.approx(2.0)
    assert rates.shape == (2, 2)


# -- angles and shifts over a sequence -----------------------------------------------------------


def test_an_angle_of_zero_is_no_angle() -> None:
    result, x = layer("gateloop"), tokens()
    with torch.no_grad():
        result.phase.bias.zero_()
        result.phase.weight.zero_()
    plain, tail = result(x)
    assert not tail.phase.any()
    turned = result.phase
    with torch.no_grad():
        turned.bias.fill_(2 * math.pi)  # a whole turn per token
    torch.testing.assert_close(result(x)[0], plain, **TOL)


@pytest.mark.parametrize("name", ["gateloop", "lru", "rwkv6", "rwkv7"])
def test_states_of_angles_and_shifts_are_saved_and_reset(name: str) -> None:
    built, x = layer(name), tokens()
    _, state = built(x[:, :9])
    repeated = rc.LayerState.from_dict(state.to_dict())
    torch.testing.assert_close(built(x[:, 9:], repeated)[0], built(x[:, 9:], state)[0], **TOL)
    fresh = state.reset(torch.tensor([True, False]))
    result = built(x[:, 9:], fresh)[0]
    torch.testing.assert_close(result[0], built(x[:, 9:])[0][0], **TOL)
    torch.testing.assert_close(result[1], built(x[:, 9:], state)[0][1], **TOL)
    other = layer("gla")(x[:, :9])[1]
    with pytest.raises(ValueError, match="another layer"):
        built(x[:, 9:], other)


def test_angle_is_exact_after_many_tokens() -> None:
    """After 100,000 tokens the sum of float64 angles is off by less than 1e-6 of a turn."""
    result = layer("lru")
    x = torch.zeros(1, 100_000, D, dtype=torch.float64)
    _, end = result.phase(x, None)
    want = (100_000 * result.phase.bias.detach().double()).remainder(2 * math.pi)
    distance = (end[0] - want).remainder(2 * math.pi)
    distance = torch.minimum(distance, 2 * math.pi - distance).detach()
    assert float(distance.max()) < 1e-6
