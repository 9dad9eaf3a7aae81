"""Parity with flash-linear-attention's plain PyTorch references, if that package is installed.

Its ``naive`` modules are loaded from their files, because the package needs a GPU compiler. Each
module is first compared with its paper's equation, written here as a loop over tokens in float64;
then ours is compared with both. Theirs compute in float32, so 1e-4 of the norm is rounding; ours
equals the loop to 1e-10.

The references used here compute their equations, with two exceptions that are tested below
(`test_slips_of_the_references`): a chunked HGRN that accepts only sequences of one chunk, and a
chunked RWKV-6 without the scale of its recurrent version.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc

_FLA_SPEC = importlib.util.find_spec("fla")
if (
    _FLA_SPEC is None
    or not _FLA_SPEC.submodule_search_locations
    or not importlib.util.find_spec("einops")
):
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)
OPS = Path(_FLA_SPEC.submodule_search_locations[0]) / "ops"

B, T, H, K, V = 2, 64, 2, 8, 6
SINGLE, EXACT = 1e-4, 1e-10


def theirs(path: str) -> ModuleType:
    """Return a module of flash-linear-attention, by its file."""
    name = "fla_" + path.replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, OPS / f"{path}.py")
    if spec is None or spec.loader is None or not (OPS / f"{path}.py").exists():
        pytest.skip(f"this version of flash-linear-attention has no {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def uniform(low: float, high: float, *shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


Q, RAW, X = normal(B, T, H, K, seed=1), normal(B, T, H, K, seed=2), normal(B, T, H, V, seed=3)
KEY = functional.normalize(RAW, dim=-1)
BETA = uniform(0.05, 0.95, B, T, H, seed=4)
LOG = uniform(-0.5, -0.01, B, T, H, seed=5)
LOG_K = uniform(-0.5, -0.01, B, T, H, K, seed=6)
SCALE = K**-0.5  # their implementation scales the query


def off(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual.double() - expected).norm() / expected.norm())


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def loop(step: Callable[[Tensor, int], Tensor], q: Tensor = Q) -> Tensor:
    """y_t = S_t q_t for S_t = step(S_(t−1), t) ``[V, K]``, from zero."""
    S = torch.zeros(B, H, V, K, dtype=torch.float64)
    outputs = []
    for t in range(T):
        S = step(S, t)
        outputs.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1)


def ours(name: str, k: Tensor, v: Tensor = X, q: Tensor = Q, **numbers: Any) -> Tensor:
    params = numbers.pop("params", None)
    recipe = rc.zoo.get(name).recipe
    return rc.recall(recipe, q, k, v, numbers, params=params)[0]


def agree(actual: Tensor, equation: Tensor, result: Tensor) -> None:
    """Compare their implementation with its equation, and ours with the equation."""
    assert off(actual, equation) < SINGLE
    assert off(result, equation) < EXACT
    assert off(actual, result) < SINGLE


def scalar(x: Tensor, t: int) -> Tensor:
    return x[:, t][..., None, None]


# -- decays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["recurrent", "chunk", "parallel"])
def test_simple_gla(form: str) -> None:
    """Simple GLA, a scalar decay from the token: S_t = α_t S_(t−1) + v_t k_tᵀ (Mamba-2's form)."""
    run = getattr(theirs("simple_gla/naive"), f"naive_{form}_simple_gla")
    result, _ = run(Q, RAW, X, LOG)
    want = SCALE * loop(lambda S, t: scalar(LOG.exp(), t) * S + outer(X[:, t], RAW[:, t]))
    ours_y = SCALE * ours("mamba2", RAW, lr=torch.ones_like(LOG), log_decay=LOG)
    agree(result, want, ours_y)


def test_retention() -> None:
    """RetNet eqs. 5 and 8: S_t = γ S_(t−1) + v_t k_tᵀ, γ_h = 1 − 2^(−5−h)."""
    run = theirs("retention/naive").naive_retention
    result = heads_first(run(*map(heads_first, (Q, RAW, X))))
    gamma = 1 - 2.0 ** (-5 - torch.arange(H).double())
    want = SCALE * loop(lambda S, t: gamma[:, None, None] * S + outer(X[:, t], RAW[:, t]))
    agree(result, want, SCALE * ours("retnet", RAW, params={"decay": gamma}))


def test_gla() -> None:
    """GLA eq. 3: S_t = S_(t−1) Diag(α_t) + v_t k_tᵀ."""
    result, _ = theirs("gla/naive").naive_recurrent_gla(Q, RAW, X, LOG_K)
    want = SCALE * loop(
        lambda S, t: S * LOG_K[:, t].exp().unsqueeze(-2) + outer(X[:, t], RAW[:, t])
    )
    agree(result, want, SCALE * ours("gla", RAW, log_decay=LOG_K))


def test_hgrn() -> None:
    """HGRN: h_t = α_t ⊙ h_(t−1) + x_t, a vector memory; RG-LRU's recurrence with fixed writes."""
    decay, x = uniform(-1.0, -0.01, B, T, V, seed=11), normal(B, T, V, seed=12)
    result, _ = theirs("hgrn/naive").naive_recurrent_hgrn(x, decay)
    h, outputs = torch.zeros(B, V, dtype=torch.float64), []
    for t in range(T):
        h = decay[:, t].exp() * h + x[:, t]
        outputs.append(h)
    ones = torch.ones(B, T, 1, V, dtype=torch.float64)
    ours_y = ours(
        "rg_lru",
        ones,
        v=x.unsqueeze(2),
        q=ones,
        lr=ones,
        log_decay=decay.unsqueeze(2),
        params={"decay_scale": torch.ones(1, V, dtype=torch.float64)},
    )
    agree(result, torch.stack(outputs, 1), ours_y.squeeze(2))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_linear_attention(form: str) -> None:
    module = theirs("linear_attn/naive")
    if form == "recurrent":
        result, _ = module.naive_recurrent_linear_attn(Q, RAW, X)
    else:
        result = module.naive_chunk_linear_attn(*(x.float() for x in (Q, RAW, X)))
    want = SCALE * loop(lambda S, t: S + outer(X[:, t], RAW[:, t]))
    agree(result, want, SCALE * ours("linear_attention", RAW))


# -- the delta rule ------------------------------------------------------------------------------


def erased(S: Tensor, k: Tensor, beta: Tensor, v: Tensor) -> Tensor:
    """S (I − β k kᵀ) + β v kᵀ."""
    eye = torch.eye(K, dtype=torch.float64)
    rate = beta[..., None, None]
    return S @ (eye - rate * outer(k, k)) + rate * outer(v, k)


@pytest.mark.parametrize("form", ["recurrence", "chunkwise", "parallel"])
def test_delta_rule(form: str) -> None:
    """Schlag et al. 2021; Yang et al. 2024: S_t = S_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ."""
    run = getattr(theirs("delta_rule/naive"), f"delta_rule_{form}")
    sizes = {"parallel": {"BM": 32, "BN": 16}}.get(form, {})
    inputs = [heads_first(x).float() for x in (Q, KEY, X, BETA)]
    result = heads_first(run(*inputs, **sizes)[0])
    want = SCALE * loop(lambda S, t: erased(S, KEY[:, t], BETA[:, t], X[:, t]))
    agree(result, want, SCALE * ours("delta_net", KEY, lr=BETA))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_gated_delta_rule(form: str) -> None:
    """Gated DeltaNet eq. 10: the delta rule on α_t S_(t−1)."""
    run = getattr(theirs("gated_delta_rule/naive"), f"naive_{form}_gated_delta_rule")
    result, _ = run(q=Q, k=KEY, v=X, beta=BETA, g=LOG)
    want = SCALE * loop(
        lambda S, t: erased(scalar(LOG.exp(), t) * S, KEY[:, t], BETA[:, t], X[:, t])
    )
    agree(result, want, SCALE * ours("gated_delta_net", KEY, lr=BETA, log_decay=LOG))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gated_delta_product(n: int, gated: bool) -> None:
    """DeltaProduct eqs. 3–4: n delta steps per token with β to 2, one decay before them."""
    k = functional.normalize(normal(B, T, H, n, K, seed=21), dim=-1)
    v, beta = normal(B, T, H, n, V, seed=22), uniform(0.0, 2.0, B, T, H, n, seed=23)

    def flat(x: Tensor) -> Tensor:  # [B, T, H, n, ...] -> [B, T n, H, ...]
        return x.movedim(3, 2).flatten(1, 2)

    run = theirs("gated_delta_product/naive").naive_recurrent_gated_delta_product
    result, _ = run(
        Q, flat(k), flat(v), LOG if gated else None, flat(beta), SCALE, num_householder=n
    )

    def step(S: Tensor, t: int) -> Tensor:
        S = scalar(LOG.exp(), t) * S if gated else S
        for j in range(n):
            S = erased(S, k[:, t, :, j], beta[:, t, :, j], v[:, t, :, j])
        return S

    recipe = rc.zoo.get("gated_delta_product" if gated else "delta_product").recipe
    recipe = recipe.replace(algorithm=rc.algorithm.GradientDescent(updates_per_token=n))
    squeeze = (lambda x: x.squeeze(3)) if n == 1 else (lambda x: x)
    gates = {"lr": squeeze(beta)} | ({"log_decay": LOG} if gated else {})
    ours_y, _ = rc.recall(recipe, Q, squeeze(k), squeeze(v), gates)
    agree(result, SCALE * loop(step), SCALE * ours_y)


# -- RWKV ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_rwkv6(form: str) -> None:
    """Finch: y_t = (S_(t−1) + diag(u) k_t v_tᵀ) r_t, then S_t = diag(w_t) S_(t−1) + k_t v_tᵀ."""
    u = normal(H, K, seed=31)
    inputs = [heads_first(x) for x in (Q, RAW, X, LOG_K)]
    if form == "recurrent":
        run = theirs("rwkv6/recurrent_naive").naive_recurrent_rwkv6
        result = heads_first(run(*inputs, u, scale=1.0)[0])
    else:
        run = theirs("rwkv6/chunk_naive").naive_chunk_rwkv6
        result = heads_first(run(*inputs, u.float(), chunk_size=16))
    S, outputs = torch.zeros(B, H, V, K, dtype=torch.float64), []
    for t in range(T):
        now = S + outer(X[:, t], u * RAW[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", now, Q[:, t]))
        S = S * LOG_K[:, t].exp().unsqueeze(-2) + outer(X[:, t], RAW[:, t])
    ours_y = ours("rwkv6", RAW, log_decay=LOG_K, params={"bonus": u})
    agree(result, torch.stack(outputs, 1), ours_y)


@pytest.mark.parametrize("form", ["recurrence", "chunkwise"])
def test_rwkv7(form: str) -> None:
    """RWKV-7, as a diagonal plus low rank: S_t = S_(t−1)(diag(w_t) − κ̂ (a ⊙ κ̂)ᵀ) + v_t k̃_tᵀ."""
    kappa = functional.normalize(normal(B, T, H, K, seed=41), dim=-1)
    a = uniform(0.0, 1.0, B, T, H, K, seed=42)
    inputs = [heads_first(x).float() for x in (Q, RAW, X, -kappa, a * kappa, LOG_K)]
    run = getattr(theirs("generalized_delta_rule/dplr/naive"), f"dplr_{form}")
    result = heads_first(run(*inputs)[0])

    def step(S: Tensor, t: int) -> Tensor:
        move = torch.diag_embed(LOG_K[:, t].exp()) - outer(kappa[:, t], a[:, t] * kappa[:, t])
        return S @ move + outer(X[:, t], RAW[:, t])

    no_bonus = {"bonus": torch.zeros(H, K, dtype=torch.float64)}
    ours_y = ours("rwkv7", RAW, log_decay=LOG_K, probe=kappa, erase=a, params=no_bonus)
    agree(result, SCALE * loop(step), SCALE * ours_y)


def test_identity_plus_low_rank() -> None:
    """RWKV-7 without decay: S_t = S_(t−1)(I − κ̂ (a ⊙ κ̂)ᵀ) + v_t k_tᵀ."""
    kappa = functional.normalize(normal(B, T, H, K, seed=43), dim=-1)
    a = uniform(0.0, 1.0, B, T, H, K, seed=44)
    inputs = [heads_first(x).float() for x in (Q, RAW, X, -kappa, a * kappa)]
    run = theirs("generalized_delta_rule/iplr/naive").iplr_recurrence
    result = heads_first(run(*inputs)[0])

    def step(S: Tensor, t: int) -> Tensor:
        erase = torch.einsum("bhvk,bhk->bhv", S, kappa[:, t])
        return S - outer(erase, a[:, t] * kappa[:, t]) + outer(X[:, t], RAW[:, t])

    none = {"bonus": torch.zeros(H, K, dtype=torch.float64)}
    ours_y = ours(
        "rwkv7", RAW, log_decay=torch.zeros_like(LOG_K), probe=kappa, erase=a, params=none
    )
    agree(result, SCALE * loop(step), SCALE * ours_y)


# -- differences between their code and their equations --------------------------------------------


def test_slips_of_the_references() -> None:
    """Evidence for the module's docstring; a repair in a later version is detected."""
    hgrn = theirs("hgrn/naive")
    x, decay = normal(1, 64, 4, seed=51), uniform(-1.0, -0.01, 1, 64, 4, seed=52)
    full, _ = hgrn.naive_recurrent_hgrn(x, decay)
    one, _ = hgrn.naive_chunk_hgrn(x, decay, chunk_size=64)
    assert off(one, full.double()) < SINGLE
    with pytest.raises(RuntimeError):
        hgrn.naive_chunk_hgrn(x, decay, chunk_size=16)
    u = normal(H, K, seed=53)
    inputs = [heads_first(y) for y in (Q, RAW, X, LOG_K)]
    scaled, _ = theirs("rwkv6/recurrent_naive").naive_recurrent_rwkv6(*inputs, u)
    chunked = theirs("rwkv6/chunk_naive").naive_chunk_rwkv6(*inputs, u.float(), chunk_size=16)
    assert off(chunked * SCALE, scaled.double()) < SINGLE
    assert off(chunked, scaled.double()) > 0.5
