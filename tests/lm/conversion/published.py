"""Published models from their papers and sources: tensors, and forward passes in loops.

Everything is written for one sequence, token by token, in float64, and without recollect.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import logsigmoid, sigmoid, silu, softplus

Weights = Mapping[str, Tensor]
Layer = Callable[[Tensor, Weights, Mapping[str, Any], int], Tensor]

VOCAB, WIDTH, LAYERS, HIDDEN = 19, 48, 2, 20
BACKBONE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "intermediate_size": HIDDEN,
    "norm_eps": 3e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def unit(x: Tensor) -> Tensor:
    """Normalise keys and queries as the delta rules do: kernels add 1e-6 to the squared norm."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a causal depthwise convolution to ``x [T, D]``: ``weight [D, 1, w]``, newest last."""
    width = weight.shape[-1]
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros_like(x[0])
        for j in range(width):
            if t - width + 1 + j >= 0:
                row = row + weight[:, 0, j] * x[t - width + 1 + j]
        rows.append(row)
    return torch.stack(rows)


def projected(x: Tensor, w: Weights, name: str, *, conv: bool, activate: bool) -> Tensor:
    y = x @ w[f"{name}_proj.weight"].T
    if conv:
        y = short_conv(y, w[f"{name}_conv1d.weight"])
    return silu(y) if activate else y


def gla_layer(x: Tensor, w: Weights, config: Mapping[str, Any], index: int) -> Tensor:
    heads, conv = config["num_heads"], config["use_short_conv"]
    groups = heads // (config["num_kv_heads"] or heads)
    q, k, v = (projected(x, w, name, conv=conv, activate=conv) for name in "qkv")
    K, V = q.shape[-1] // heads, config["hidden_size"] * config["expand_v"] // heads
    gate = x @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
    log_decay = logsigmoid(gate) / 16
    outputs = torch.zeros(x.shape[0], heads, int(V), dtype=x.dtype)
    for h in range(heads):
        g = h // groups
        key = slice(g * K, (g + 1) * K)
        state = torch.zeros(K, int(V), dtype=x.dtype)
        for t in range(x.shape[0]):
            value = v[t, g * int(V) : (g + 1) * int(V)]
            state = log_decay[t, key].exp()[:, None] * state + torch.outer(k[t, key], value)
            outputs[t, h] = K**-0.5 * q[t, h * K : (h + 1) * K] @ state
    return gated_output(x, outputs, w, config)


def gated_output(x: Tensor, y: Tensor, w: Weights, config: Mapping[str, Any]) -> Tensor:
    """Apply the norm per head, the gate and the output map of GLA and RetNet."""
    fused = config["use_output_gate"] and config["fuse_norm"]
    norm = w["g_norm_swish_gate.weight" if fused else "g_norm.weight"]
    y = rms(y, norm, config["norm_eps"]).flatten(1)
    if config["use_output_gate"]:
        y = y * silu(x @ w["g_proj.weight"].T)
    return y @ w["o_proj.weight"].T


def delta_net_layer(x: Tensor, w: Weights, config: Mapping[str, Any], index: int) -> Tensor:
    heads, conv = config["num_heads"], config["use_short_conv"]
    q, k, v = (projected(x, w, name, conv=conv, activate=True) for name in "qkv")
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in (q, k, v))
    beta = sigmoid(x @ w["b_proj.weight"].T) * (2 if config["allow_neg_eigval"] else 1)
    y = delta_rule(unit(q), unit(k), v, beta, torch.zeros_like(k))
    return normed_output(x, y, w, config)


def log_decay(gate: Tensor, w: Weights) -> Tensor:
    """−e^A softplus(gate + b) for ``gate [T, H]`` or ``[T, H, K]``."""
    scale = w["A_log"].exp()
    return -(scale if gate.dim() == 2 else scale[:, None]) * softplus(gate)


def gated_deltanet_layer(x: Tensor, w: Weights, config: Mapping[str, Any], index: int) -> Tensor:
    q, k, v, beta = gated_delta_inputs(x, w, config)
    alpha = log_decay(x @ w["a_proj.weight"].T + w["dt_bias"], w)
    y = delta_rule(q, k, v, beta, alpha[:, :, None].expand_as(k))
    activation = sigmoid if config["output_gate_activation"] == "sigmoid" else silu
    return normed_output(x, y, w, config, activation)


def kda_layer(x: Tensor, w: Weights, config: Mapping[str, Any], index: int) -> Tensor:
    q, k, v, beta = gated_delta_inputs(x, w, config)
    gate = x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]
    y = delta_rule(q, k, v, beta, log_decay(gate.unflatten(-1, k.shape[1:]), w))
    gate = x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]
    y = rms(y, w["o_norm.weight"], config["norm_eps"]).flatten(1) * sigmoid(gate)
    return y @ w["o_proj.weight"].T


def gated_delta_inputs(
    x: Tensor, w: Weights, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and β; query and key heads are repeated for the heads of values."""
    heads, conv = config["num_heads"], config["use_short_conv"]
    groups = (config["num_v_heads"] or heads) // heads
    q, k, v = (projected(x, w, name, conv=conv, activate=True) for name in "qkv")
    q, k = (unit(y.unflatten(-1, (heads, -1))).repeat_interleave(groups, 1) for y in (q, k))
    beta = sigmoid(x @ w["b_proj.weight"].T) * (2 if config["allow_neg_eigval"] else 1)
    return q, k, v.unflatten(-1, (heads * groups, -1)), beta


def retnet_layer(x: Tensor, w: Weights, config: Mapping[str, Any], index: int) -> Tensor:
    """Each pair of channels (i, i + K/2) rotates by t · 10000^(−2i/K)."""
    heads, T = config["num_heads"], x.shape[0]
    q, k, v = (x @ w[f"{name}_proj.weight"].T for name in "qkv")
    q, k, v = (y.unflatten(-1, (heads, -1)) for y in (q, k, v))
    K = q.shape[-1]
    angle = 10000.0 ** (-torch.arange(0, K, 2, dtype=x.dtype) / K)
    rotation = torch.polar(torch.ones(T, K // 2, dtype=x.dtype), torch.arange(T)[:, None] * angle)

    def rotate(y: Tensor) -> Tensor:
        z = torch.complex(*y.chunk(2, -1)) * rotation[:, None]
        return torch.cat([z.real, z.imag], -1)

    q, k = rotate(q), rotate(k)
    y = torch.zeros_like(v)
    for h in range(heads):
        for t in range(T):
            for s in range(t + 1):
                weight = (1 - 2.0 ** (-5 - h)) ** (t - s) * (q[t, h] @ k[s, h]) * K**-0.5
                y[t, h] += weight * v[s, h]
    return gated_output(x, y, w, config)


def hgrn2_layer(x: Tensor, w: Weights, config: Mapping[str, Any], index: int) -> Tensor:
    """S_t = Diag(α) S_(t−1) + (1 − α) iᵀ, α = γ + (1 − γ) σ(f); a norm over all heads, ε = 1e-5."""
    K = config["expand_ratio"]
    q, alpha = silu(x @ w["q_proj.weight"].T), sigmoid(x @ w["f_proj.weight"].T)
    if config["use_lower_bound"]:
        alpha = w["lower_bound"] + (1 - w["lower_bound"]) * alpha
    v = (x @ w["i_proj.weight"].T).unflatten(-1, (q.shape[-1] // K, -1))
    y = torch.zeros_like(v)
    for h in range(v.shape[1]):
        channels = slice(h * K, (h + 1) * K)
        state = torch.zeros(K, v.shape[-1], dtype=x.dtype)
        for t in range(x.shape[0]):
            a = alpha[t, channels]
            state = a[:, None] * state + torch.outer(1 - a, v[t, h])
            y[t, h] = K**-0.5 * q[t, channels] @ state
    return rms(y.flatten(1), w["g_norm.weight"], 1e-5) @ w["o_proj.weight"].T


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """S_t = (I − β k kᵀ) Diag(α) S_(t−1) + β k vᵀ, o = K^(−1/2) S_tᵀ q, for ``[T, H, ·]``."""
    T, H, K = k.shape
    outputs = torch.zeros_like(v)
    for h in range(H):
        state = torch.zeros(K, v.shape[-1], dtype=v.dtype)
        for t in range(T):
            state = log_decay[t, h].exp()[:, None] * state
            error = v[t, h] - k[t, h] @ state
            state = state + beta[t, h] * torch.outer(k[t, h], error)
            outputs[t, h] = K**-0.5 * q[t, h] @ state
    return outputs


def normed_output(
    x: Tensor,
    y: Tensor,
    w: Weights,
    config: Mapping[str, Any],
    activation: Callable[[Tensor], Tensor] = silu,
) -> Tensor:
    y = rms(y, w["o_norm.weight"], config["norm_eps"]).flatten(1)
    if config["use_gate"]:
        y = y * activation(x @ w["g_proj.weight"].T)
    return y @ w["o_proj.weight"].T


def forward(ids: Tensor, state: Weights, config: Mapping[str, Any], layer: Layer) -> Tensor:
    """Return logits ``[T, vocab]`` in float64."""
    w = {name: x.double() for name, x in state.items()}
    x = w["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        block = {
            name.removeprefix(f"model.layers.{i}."): y
            for name, y in w.items()
            if name.startswith(f"model.layers.{i}.")
        }
        attn = {n.removeprefix("attn."): y for n, y in block.items() if n.startswith("attn.")}
        if "model.lower_bounds" in w:  # γ of this layer, 0 of the first one
            shares = w["model.lower_bounds"].softmax(0)
            attn["lower_bound"] = shares[: i + 1].sum(0) - shares[0]
        eps = config["norm_eps"]
        x = x + layer(rms(x, block["attn_norm.weight"], eps), attn, config, i)
        h = rms(x, block["mlp_norm.weight"], eps)
        hidden = silu(h @ block["mlp.gate_proj.weight"].T) * (h @ block["mlp.up_proj.weight"].T)
        x = x + hidden @ block["mlp.down_proj.weight"].T
    head = w["model.embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms(x, w["model.norm.weight"], config["norm_eps"]) @ head.T


# -- names and shapes, as the modules of flash-linear-attention 0.6 declare them ------------------


def gla_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads = config["hidden_size"], config["num_heads"]
    groups = heads // (config["num_kv_heads"] or heads)
    key, value = int(d * config["expand_k"]), int(d * config["expand_v"])
    sizes = {"q": key, "k": key // groups, "v": value // groups}
    shapes = {f"{name}_proj.weight": (size, d) for name, size in sizes.items()}
    if config["use_short_conv"]:
        width = config["conv_size"]
        shapes |= {f"{name}_conv1d.weight": (size, 1, width) for name, size in sizes.items()}
    shapes |= {
        "gk_proj.0.weight": (16, d),
        "gk_proj.1.weight": (key // groups, 16),
        "gk_proj.1.bias": (key // groups,),
    }
    return shapes | gated_shapes(config, value)


def gated_shapes(config: Mapping[str, Any], value: int) -> dict[str, tuple[int, ...]]:
    d, has_gate = config["hidden_size"], config["use_output_gate"]
    norm = "g_norm_swish_gate" if has_gate and config["fuse_norm"] else "g_norm"
    shapes = {"o_proj.weight": (d, value), f"{norm}.weight": (value // config["num_heads"],)}
    return shapes | ({"g_proj.weight": (value, d)} if has_gate else {})


def delta_net_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads = config["hidden_size"], config["num_heads"]
    key, value = int(d * config["expand_k"]), int(d * config["expand_v"])
    shapes = delta_shapes(config, key, value)
    return shapes | {"b_proj.weight": (heads, d)}


def gated_deltanet_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads = config["hidden_size"], config["num_v_heads"] or config["num_heads"]
    K, V = config["head_dim"], int(config["head_dim"] * config["expand_v"])
    shapes = delta_shapes(config, config["num_heads"] * K, heads * V)
    shapes |= {"a_proj.weight": (heads, d), "b_proj.weight": (heads, d), "o_norm.weight": (V,)}
    return shapes | {"A_log": (heads,), "dt_bias": (heads,)}


def kda_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads = config["hidden_size"], config["num_v_heads"] or config["num_heads"]
    K, V = config["head_dim"], int(config["head_dim"] * config["expand_v"])
    shapes = delta_shapes(config, config["num_heads"] * K, heads * V)
    shapes |= {"b_proj.weight": (heads, d), "o_norm.weight": (V,), "A_log": (heads,)}
    shapes |= {"f_proj.0.weight": (V, d), "f_proj.1.weight": (heads * K, V)}
    shapes |= {"g_proj.0.weight": (V, d), "g_proj.1.weight": (heads * V, V)}
    return shapes | {"g_proj.1.bias": (heads * V,), "dt_bias": (heads * K,)}


def retnet_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d = config["hidden_size"]
    key, value = int(d * config["expand_k"]), int(d * config["expand_v"])
    shapes = {"q_proj.weight": (key, d), "k_proj.weight": (key, d), "v_proj.weight": (value, d)}
    return shapes | gated_shapes(config, value)


def hgrn2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d = config["hidden_size"]
    return {f"{name}_proj.weight": (d, d) for name in "qfio"} | {"g_norm.weight": (d,)}


def delta_shapes(config: Mapping[str, Any], key: int, value: int) -> dict[str, tuple[int, ...]]:
    d, sizes = config["hidden_size"], {"q": key, "k": key, "v": value}
    shapes = {f"{name}_proj.weight": (size, d) for name, size in sizes.items()}
    if config["use_short_conv"]:
        width = config["conv_size"]
        shapes |= {f"{name}_conv1d.weight": (size, 1, width) for name, size in sizes.items()}
    shapes |= {"o_proj.weight": (d, value), "o_norm.weight": (value // config["num_heads"],)}
    return shapes | ({"g_proj.weight": (value, d)} if config.get("use_gate") else {})


FAMILIES: dict[str, tuple[Callable[..., dict[str, tuple[int, ...]]], Layer, dict[str, Any]]] = {
    "gla": (
        gla_shapes,
        gla_layer,
        {
            "num_heads": 2,
            "num_kv_heads": None,
            "expand_k": 0.5,
            "expand_v": 1.0,
            "use_short_conv": False,
            "conv_size": 4,
            "use_output_gate": True,
            "fuse_norm": True,
        },
    ),
    "delta_net": (
        delta_net_shapes,
        delta_net_layer,
        {
            "num_heads": 2,
            "expand_k": 1.0,
            "expand_v": 1.0,
            "use_gate": False,
            "use_short_conv": True,
            "conv_size": 4,
            "allow_neg_eigval": False,
        },
    ),
    "gated_deltanet": (
        gated_deltanet_shapes,
        gated_deltanet_layer,
        {
            "num_heads": 2,
            "num_v_heads": None,
            "head_dim": 6,
            "expand_v": 2.0,
            "use_gate": True,
            "output_gate_activation": "swish",
            "use_short_conv": True,
            "conv_size": 4,
            "allow_neg_eigval": False,
        },
    ),
    "kda": (
        kda_shapes,
        kda_layer,
        {
            "num_heads": 3,
            "num_v_heads": None,
            "head_dim": 8,
            "expand_v": 1.0,
            "use_short_conv": True,
            "conv_size": 4,
            "allow_neg_eigval": False,
        },
    ),
    "hgrn2": (
        hgrn2_shapes,
        hgrn2_layer,
        {"num_heads": 3, "expand_ratio": 16, "use_lower_bound": True},
    ),
    "retnet": (
        retnet_shapes,
        retnet_layer,
        {
            "num_heads": 2,
            "num_kv_heads": None,
            "expand_k": 1.0,
            "expand_v": 2.0,
            "use_output_gate": True,
            "fuse_norm": True,
        },
    ),
}
"""Shapes of a layer's tensors, its forward pass and its options, by ``model_type``."""


def tensor_shapes(model_type: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    d, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (vocab, d)}
    for i in range(config["num_hidden_layers"]):
        layer = {f"attn.{name}": x for name, x in FAMILIES[model_type][0](config).items()}
        layer |= {"attn_norm.weight": (d,), "mlp_norm.weight": (d,)}
        layer |= {"mlp.gate_proj.weight": (width, d), "mlp.up_proj.weight": (width, d)}
        layer |= {"mlp.down_proj.weight": (d, width)}
        shapes |= {f"model.layers.{i}.{name}": x for name, x in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if config.get("use_lower_bound"):
        shapes["model.lower_bounds"] = (config["num_hidden_layers"], d)
    return shapes if config["tie_word_embeddings"] else {**shapes, "lm_head.weight": (vocab, d)}


def make(model_type: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options and random tensors of a small model."""
    config = {**BACKBONE, "tie_word_embeddings": False, **FAMILIES[model_type][2], **changes}
    config["model_type"] = model_type
    generator = torch.Generator().manual_seed(len(model_type))
    state = {}
    for name, shape in tensor_shapes(model_type, config).items():
        x = torch.randn(shape, generator=generator)
        fan = shape[-1] if len(shape) > 1 else 1
        if name.endswith("norm.weight") or "norm_swish_gate" in name:
            x = 1 + 0.3 * x
        elif "conv1d" in name:
            x = 0.5 * x
        elif "embeddings" not in name and "bounds" not in name:
            x = x * (1.3 / math.sqrt(fan) if len(shape) > 1 else 1.0)
        state[name] = x
    return config, state


def save(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Path:
    """Save a model as flash-linear-attention does."""
    folder.mkdir(parents=True)
    extra = {"architectures": ["Model"], "transformers_version": "4.57.0", "fuse_swiglu": True}
    (folder / "config.json").write_text(json.dumps({**extra, **config}))
    save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
