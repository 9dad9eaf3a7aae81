"""Parity with transformers' plain PyTorch: Mamba's scan, xLSTM's mLSTM, Griffin's RG-LRU.

As for flash-linear-attention, each is first compared with a loop of its paper's equation.
"""

from __future__ import annotations

import pytest
import torch
from tests.parity.test_fla import EXACT, SINGLE, normal, off, outer, uniform
from torch import Tensor
from torch.nn import functional

import recollect as rc

pytest.importorskip("transformers", minversion="5.0")

B, T, H, K, V = 2, 64, 2, 8, 6


def test_mambas_selective_scan() -> None:
    """Mamba algorithm 2: h = exp(Δ A) h + Δ B x, y = C h + D x, and the last state."""
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    size, n = 12, 16
    x, dt = normal(B, size, T, seed=1), uniform(0.01, 1.0, B, size, T, seed=2)
    A, D = -uniform(0.1, 4.0, size, n, seed=3), normal(size, seed=4)
    b, c = normal(B, n, T, seed=5), normal(B, n, T, seed=6)
    scan = getattr(mamba, "mamba_selective_scan", None)
    if scan is None:
        pytest.skip("this version of transformers has no plain selective scan")
    inputs = [t.float() for t in (x, dt, A, b, c, D)]
    result, last = getattr(scan, "__wrapped__", scan)(*inputs, return_last_state=True)
    h, outputs = torch.zeros(B, size, n, dtype=torch.float64), []
    for t in range(T):
        step = dt[:, :, t, None]
        h = (step * A).exp() * h + step * b[:, None, :, t] * x[:, :, t, None]
        outputs.append((h * c[:, None, :, t]).sum(-1) + D * x[:, :, t])
    want = torch.stack(outputs, -1)
    assert off(result, want) < SINGLE
    assert off(last, h) < SINGLE

    def tokens(a: Tensor) -> Tensor:  # [B, D, T] -> [B, T, 1, D]
        return a.transpose(1, 2).unsqueeze(2)

    gates = {"lr": tokens(dt), "log_decay": -tokens(dt)}
    params = {"decay_scale": -A.unsqueeze(0)}
    y, state = rc.recall(
        rc.zoo.get("mamba").recipe, tokens(c), tokens(b), tokens(x), gates, params=params
    )
    ours_y = y.squeeze(2).transpose(1, 2) + D[:, None] * x
    assert off(ours_y, want) < EXACT
    assert off(state.weights[0].squeeze(1), h) < EXACT
    assert off(result, ours_y) < SINGLE


def _mlstm(name: str) -> object:
    module = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    result = getattr(module, name, None)
    if result is None:
        pytest.skip("this version of transformers takes its mLSTM from another package")
    return result


@pytest.mark.parametrize(
    "name", ["mlstm_recurrent_sequence_native", "mlstm_chunkwise_native_autograd"]
)
def test_mlstm(name: str) -> None:
    """xLSTM eqs. 19–27 with their stabiliser.

    Theirs adds 1e-6 to the stabilised denominator, whose floor exp(−m) is smaller than that once a
    gate passes 14: as it comes it is off by 1e-3 here, without that constant it is the equation.
    """
    run = _mlstm(name)
    q, k, v = normal(B, H, T, K, seed=11), normal(B, H, T, K, seed=12), normal(B, H, T, V, seed=13)
    i, f = 5 * normal(B, H, T, seed=14), 5 * normal(B, H, T, seed=15)
    inputs = [x.float() for x in (q, k, v, i, f)]

    def called(**options: float) -> Tensor:
        result = run(*inputs, **options)  # type: ignore[operator]
        return result[0] if isinstance(result, tuple) else result

    actual = called(eps=0.0)
    log_f = functional.logsigmoid(f)
    C, n = torch.zeros(B, H, V, K, dtype=torch.float64), torch.zeros(B, H, K, dtype=torch.float64)
    m, outputs = torch.zeros(B, H, dtype=torch.float64), []
    for t in range(T):
        new = torch.maximum(log_f[..., t] + m, i[..., t])
        write, keep = (i[..., t] - new).exp()[..., None], (log_f[..., t] + m - new).exp()[..., None]
        C = keep[..., None] * C + write[..., None] * outer(v[:, :, t], k[:, :, t])
        n, m = keep * n + write * k[:, :, t], new
        query = q[:, :, t] * K**-0.5
        below = torch.maximum((n * query).sum(-1).abs(), (-m).exp())
        outputs.append(torch.einsum("bhvk,bhk->bhv", C, query) / below[..., None])
    want = torch.stack(outputs, 2)
    assert off(actual, want) < SINGLE
    assert off(called(), want) > 3 * SINGLE

    def swap(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    ours_y, _ = rc.recall(
        rc.zoo.get("mlstm").recipe,
        swap(q) * K**-0.5,
        swap(k),
        swap(v),
        {"log_lr": swap(i), "log_decay": swap(log_f)},
    )
    assert off(swap(ours_y), want) < EXACT
    assert off(actual, swap(ours_y)) < SINGLE


def test_rg_lru() -> None:
    """Griffin eqs. 1–4. Their implementation does not scale the first token's input."""
    module = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    size, heads = 8, 2
    config = module.RecurrentGemmaConfig(
        lru_width=size, num_attention_heads=heads, hidden_size=size, num_hidden_layers=1
    )
    lru = module.RecurrentGemmaRglru(config)
    with torch.no_grad():
        for i, weight in enumerate(lru.parameters()):
            weight.copy_(0.5 * normal(*weight.shape, seed=20 + i))
    x = normal(B, T, size, seed=30)
    with torch.no_grad():
        result = lru(x.float(), torch.arange(T).expand(B, T))
    weights = {name: p.detach().double() for name, p in lru.named_parameters()}
    blocks = x.unflatten(-1, (heads, -1))

    def gate(name: str) -> Tensor:
        z = torch.einsum("bthi,hio->btho", blocks, weights[f"{name}_gate_weight"])
        return (z + weights[f"{name}_gate_bias"]).flatten(2).sigmoid()

    r, i = gate("recurrent"), gate("input")
    log_a = -8 * functional.softplus(weights["recurrent_param"]) * r
    scale = (1 - (2 * log_a).exp()).sqrt()
    scale[:, 0] = 1
    h, outputs = torch.zeros(B, size, dtype=torch.float64), []
    for t in range(T):
        h = log_a[:, t].exp() * h + scale[:, t] * i[:, t] * x[:, t]
        outputs.append(h)
    want = torch.stack(outputs, 1)
    assert off(result, want) < SINGLE
    ones = torch.ones(B, T, 1, size, dtype=torch.float64)
    ours_y, _ = rc.recall(
        rc.zoo.get("rg_lru").recipe,
        ones,
        ones,
        x.unsqueeze(2),
        {"lr": (scale * i).unsqueeze(2), "log_decay": (-8 * r).unsqueeze(2)},
        params={"decay_scale": functional.softplus(weights["recurrent_param"]).unsqueeze(0)},
    )
    assert off(ours_y.squeeze(2), want) < EXACT
    assert off(result, ours_y.squeeze(2)) < SINGLE
