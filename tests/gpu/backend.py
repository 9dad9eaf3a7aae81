"""Presets on the pretended GPU with flash-linear-attention, whose functions are rewritten here.

``python -m tests.gpu.backend NAME...`` prints, for each preset, the functions that the layer
called, and the distances of its outputs, decoded tokens and gradients from those on the CPU, which
calls nothing of the package. The functions here are loops over tokens with the package's arguments:
the test checks the selected function, its arguments, and the code around it. `tests.gpu.operators`
compares the package's kernels with the definition. A separate process, like `tests.gpu.measure`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.gpu import pretend
from tests.gpu.measure import Stretches
from tests.gpu.passes import decode, distance, passes
from torch import Tensor

import recollect as rc
from recollect.engines.fla import calls, choose, recurrences

WIDTH, HEADS, TOKENS, PROMPT = 16, 2, 22, 18
"""More tokens than `choose.MAX_RECURRENT_TOKENS`, so that prompts run in chunks."""

Step = Callable[[Tensor, int], Tensor]
Result = tuple[Tensor, Tensor | None]


# -- the package's functions, token by token -------------------------------------------------------


def _loop(q: Tensor, v: Tensor, step: Step, read: Step | None, more: Mapping[str, Any]) -> Result:
    """y_t = S_t q_t (or the result of ``read`` for S_(t−1)) with S ``[B, H, K, V]``."""
    assert more["scale"] == 1.0
    S, outputs = more["initial_state"], []
    for t in range(q.shape[1]):
        initial, S = S, step(S, t)
        output = torch.einsum("bhk,bhkv->bhv", q[:, t].float(), S)
        outputs.append(output if read is None else read(initial, t))
    return torch.stack(outputs, 1).to(v.dtype), S if more["output_final_state"] else None


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k.float().unsqueeze(-1) * v.float().unsqueeze(-2)


def _decayed(S: Tensor, g: Tensor | None, t: int) -> Tensor:
    if g is None:
        return S
    assert bool(pretend.host(g).isfinite().all()), "a decay of −inf is NaN in the package"
    return S * (g[:, t].exp().unsqueeze(-1) if g.dim() == 4 else g[:, t].exp()[..., None, None])


def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, **more: Any) -> Result:
    return _loop(q, v, lambda S, t: _decayed(S, g, t) + _outer(k[:, t], v[:, t]), None, more)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **more: Any) -> Result:
    assert g.shape == k.shape
    return simple_gla(q, k, v, g, **more)


def fused_recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **more: Any) -> Result:
    return gla(q, k, v, gk, **more)


def rwkv6(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **more: Any) -> Result:
    assert u.shape == k.shape[2:]

    def read(S: Tensor, t: int) -> Tensor:
        now = S + _outer(u * k[:, t], v[:, t])
        return torch.einsum("bhk,bhkv->bhv", q[:, t].float(), now)

    return _loop(q, v, lambda S, t: _decayed(S, w, t) + _outer(k[:, t], v[:, t]), read, more)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, **more: Any
) -> Result:
    def step(S: Tensor, t: int) -> Tensor:
        S = _decayed(S, g, t)
        error = v[:, t].float() - torch.einsum("bhkv,bhk->bhv", S, k[:, t].float())
        return S + _outer(k[:, t], beta[:, t].unsqueeze(-1) * error)

    return _loop(q, v, step, None, more)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **more: Any) -> Result:
    return gated_delta_rule(q, k, v, None, beta, **more)


def product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, n: int, **more: Any
) -> Result:
    assert q.shape[1] * n == k.shape[1]
    idle = torch.zeros_like(q).unsqueeze(2).expand(-1, -1, n - 1, -1, -1)
    all_q = torch.cat([idle, q.unsqueeze(2)], 2).flatten(1, 2)
    if g is not None:
        rest = torch.zeros_like(g).unsqueeze(2).expand(-1, -1, n - 1, -1)
        g = torch.cat([g.unsqueeze(2), rest], 2).flatten(1, 2)
    y, S = gated_delta_rule(all_q, k, v, g, beta, **more)
    return y[:, n - 1 :: n], S


def dplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, **more: Any) -> Result:
    def step(S: Tensor, t: int) -> Tensor:
        read = torch.einsum("bhkv,bhk->bhv", S, a[:, t].float())
        return _decayed(S, gk, t) + _outer(b[:, t], read) + _outer(k[:, t], v[:, t])

    return _loop(q, v, step, None, more)


def hgrn(x: Tensor, g: Tensor, initial_state: Tensor, output_final_state: bool) -> Result:
    h, outputs = initial_state, []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1), h if output_final_state else None


def mesa(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    D, E, outputs = more["h_kk_init"], more["h_kv_init"], []
    for t in range(q.shape[1]):
        weighed = beta[:, t].unsqueeze(-1) * k[:, t]
        D = _decayed(D, g, t) + _outer(weighed, k[:, t])
        E = _decayed(E, g, t) + _outer(weighed, v[:, t])
        z = torch.linalg.solve(D + torch.diag_embed(lamb), q[:, t].unsqueeze(-1))
        outputs.append((z.mT @ E).squeeze(-2))
    return torch.stack(outputs, 1), D, E


def forgetting(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    sums = g.cumsum(1).transpose(1, 2)  # [B, H, T]
    logits = torch.einsum("bthk,bshk->bhts", q, k) * scale + sums[..., None] - sums[..., None, :]
    later = torch.ones_like(logits).triu(1) > 0
    return torch.einsum("bhts,bshv->bthv", logits.masked_fill(later, -1e30).softmax(-1), v)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "chunk_simple_gla": simple_gla,
    "chunk_gla": gla,
    "chunk_rwkv6": rwkv6,
    "chunk_delta_rule": delta_rule,
    "chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kda": gated_delta_rule,
    "chunk_gated_delta_product": product,
    "chunk_dplr_delta_rule": dplr,
    "fused_recurrent_hgrn": hgrn,
    "chunk_mesa_net": mesa,
    "parallel_forgetting_attn": forgetting,
    "fused_recurrent_simple_gla": simple_gla,
    "fused_recurrent_gla": fused_recurrent_gla,
    "fused_recurrent_rwkv6": rwkv6,
    "fused_recurrent_delta_rule": delta_rule,
    "fused_recurrent_gated_delta_rule": gated_delta_rule,
    "fused_recurrent_kda": gated_delta_rule,
    "fused_recurrent_dplr_delta_rule": dplr,
}


# -- the program -----------------------------------------------------------------------------------


def measure(name: str) -> dict[str, Any]:
    """Return the functions that a preset's layer calls on the device, and its errors."""
    called: dict[str, list[str]] = {"cpu": [], "training": [], "decoding": []}
    now = "cpu"

    def requested(module: str, function: str) -> Callable[..., Any]:
        del module
        if function not in called[now]:
            called[now].append(function)
        return FUNCTIONS[function]

    recurrences.function = calls.function = requested  # type: ignore[assignment]
    preset = rc.zoo.get(name)
    torch.manual_seed(0)
    cpu = preset.build(d_model=WIDTH, num_heads=HEADS)
    moved = pretend.put_module(cpu)
    x = torch.randn(1, TOKENS, WIDTH)
    y, slopes = passes(cpu, x.clone(), Stretches(counts=False))
    pieces = [x[:, :PROMPT], *x[:, PROMPT:].split(1, 1)]
    single = decode(cpu, pieces, Stretches(counts=False))
    now = "training"
    y_there, slopes_there = passes(moved, pretend.put(x), Stretches(counts=True))
    now = "decoding"
    decoded = decode(moved, [pretend.put(piece) for piece in pieces], Stretches(counts=True))
    return {
        "name": name,
        "called": called,
        "y": distance(y_there, y),
        "gradient": max(distance(slopes_there[n], slope) for n, slope in slopes.items()),
        "decoded": distance(decoded, single),
    }


def main(names: list[str]) -> None:
    """Measure presets."""
    warnings.simplefilter("ignore")
    choose.DEVICES.add(pretend.NAME)
    choose.installed = lambda: True
    torch.set_float32_matmul_precision("high")  # the backend is selected on CUDA only
    pretend.bits = 23  # products are exact, because the results are compared with the CPU's
    for name in names:
        print(json.dumps(measure(name)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    # Autograd has a thread per device, which torch cannot end for a device written in Python.
    os._exit(0)
