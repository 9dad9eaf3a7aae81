"""Compositions written out token by token for plain memories, without code of `recollect.blocks`.

A layer's weights are read by name. Its memory is linear with a rate and a decay per token (Gated
DeltaNet), its attention has no positions, and neither has a convolution, so each equation is one
line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import recollect as rc

EPS = 1e-6
ATTENTION = rc.LayerOptions(
    conv_size=0, conv_activation="none", qk_norm="none", output_norm="none", output_gate="none"
)
MEMORY = rc.LayerOptions(conv_size=0)


def memory() -> tuple[rc.Recipe, rc.LayerOptions]:
    """Gated DeltaNet without its convolution."""
    return rc.Recipe(retention=rc.retention.Decay(when="before")), MEMORY


def self_modifying(size: int) -> tuple[rc.Recipe, rc.LayerOptions]:
    """A perceptron under delta gradient descent, whose inner batches have ``size`` tokens."""
    algorithm = rc.algorithm.GradientDescent(
        batch_size=size, update_every="token" if size == 1 else "batch", erasure=1.0
    )
    recipe = rc.Recipe(
        memory=rc.memory.MLP(expansion=2), retention=rc.retention.Decay(), algorithm=algorithm
    )
    gates = {"lr": rc.GateOptions(init=0.05)}
    return recipe, rc.LayerOptions(conv_size=0, gate_options=gates)


def attention(
    size: int | None = None, first: int | None = None
) -> tuple[rc.Recipe, rc.LayerOptions]:
    """Softmax attention without positions to all tokens, or the last ``size`` and ``first``."""
    within: tuple[Any, ...] = ()
    if size is not None and first is None:
        within = (rc.context.Window(size=size, gated=False),)
    elif size is not None and first is not None:
        within = (rc.context.SinkWindow(size=size, num_sinks=first),)
    recipe = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        context=rc.context.KernelWeighted(restrictions=within),
        algorithm=rc.algorithm.Analytic(),
    )
    return recipe, ATTENTION


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()  # as in the layer, 0 stays 0


class Memory:
    """A linear memory of H heads, written and read one token at a time."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.H = layer, layer.num_heads
        self.K, self.V = layer.head_dim, layer.value_dim
        self.W: Any = [layer.out.weight.new_zeros(self.V, self.K) for _ in range(self.H)]

    def numbers(self, x: Tensor) -> tuple[list[Tensor], ...]:
        layer = self.layer
        u = nn.functional.silu(layer.qkv.weight @ x)
        q, k, v = u.split(layer.qkv_sizes)
        q = [unit(part) for part in q.view(self.H, self.K)]
        k = [unit(part) for part in k.view(self.H, self.K)]
        gates = {name: number(x.view(1, 1, -1))[0, 0] for name, number in layer.gates.items()}
        return q, k, list(v.view(self.H, self.V)), list(gates["lr"]), list(gates["log_decay"].exp())

    def learn(self, x: Tensor) -> None:
        _, k, v, rate, decay = self.numbers(x)
        later = []
        for h in range(self.H):
            W = decay[h] * self.W[h]
            later.append(W - rate[h] * torch.outer(W @ k[h] - v[h], k[h]))
        self.W = later

    def read(self, x: Tensor, W: Any = None) -> Tensor:
        """Return the layer's output for x: its norm, its gate and its last map around M(q(x))."""
        q, layer = self.numbers(x)[0], self.layer
        W = self.W if W is None else W
        y = torch.cat([rms(W[h] @ q[h], layer.norm.weight) for h in range(self.H)])
        return layer.out.weight @ (y * nn.functional.silu(layer.output_gate.weight @ x))


def attend(layer: Any, query: Tensor, visible: list[Tensor]) -> Tensor:
    """Return softmax attention of one token to its visible tokens."""
    q_map, k_map, v_map = layer.qkv.weight.split(layer.qkv_sizes)
    outputs = []
    for h in range(layer.num_heads):
        at = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        q = q_map[at] @ query
        logits = torch.stack([(k_map[at] @ z) @ q for z in visible]) / layer.head_dim**0.5
        values = torch.stack([v_map[at] @ z for z in visible])
        outputs.append(logits.softmax(0) @ values)
    return layer.out.weight @ torch.cat(outputs)


def gate(layer: Any, passing: Tensor, opening: Tensor) -> Tensor:
    norms = layer.gate
    return rms(passing, norms.attention_norm.weight) * torch.sigmoid(
        rms(opening, norms.memory_norm.weight)
    )


def tokens_before(layer: Any) -> list[Tensor]:
    return [] if layer.persistent is None else list(layer.persistent.tokens)


def mac(layer: Any, x: Tensor) -> Tensor:
    """Titans eqs. 21–25, one row ``[T, D]``."""
    learned, attention_layer = Memory(layer.parts["memory"]), layer.parts["attention"]
    C, outputs = layer.mixer.segment, []
    for start in range(0, len(x), C):
        initial, retrieved = learned.W, []  # M_(t−1): of this segment for all of its tokens
        segment = list(x[start : start + C])
        for j, token in enumerate(segment):
            retrieved.append(rms(learned.read(token, initial), layer.retrieved_norm.weight))  # (21)
            context = [*tokens_before(layer), *retrieved, *segment[: j + 1]]  # (22)
            y = attend(attention_layer, token, context)  # (23)
            z = rms(y, layer.learned_norm.weight)
            learned.learn(z)  # (24)
            outputs.append(gate(layer, y, learned.read(z)))  # (25)
    return torch.stack(outputs)


def mag(layer: Any, x: Tensor, window: int) -> Tensor:
    """Titans eqs. 26–28."""
    learned, initial, outputs = Memory(layer.parts["memory"]), tokens_before(layer), []
    stream = [*initial, *x]
    for i, token in enumerate(stream):
        learned.learn(token)
        recorded = [z for j, z in enumerate(stream[: i + 1]) if j < len(initial) or j > i - window]
        y = attend(layer.parts["attention"], token, recorded)
        outputs.append(gate(layer, y, learned.read(token)))
    return torch.stack(outputs[len(initial) :])


def mal(layer: Any, x: Tensor, window: int) -> Tensor:
    """Titans eqs. 29–31."""
    learned, initial = Memory(layer.parts["0"]), tokens_before(layer)
    y = []
    for token in (*initial, *x):
        learned.learn(token)
        y.append(learned.read(token))
    outputs = []
    for i, token in enumerate(y):
        recorded = [z for j, z in enumerate(y[: i + 1]) if j < len(initial) or j > i - window]
        outputs.append(attend(layer.parts["1"], token, recorded))
    return torch.stack(outputs[len(initial) :])


def boosted(layer: Any, x: Tensor, *, clip: float, published: bool) -> Tensor:
    """A second delta rule learns the residuals of the first.

    Args:
        clip: of each channel of a residual.
        published: the form of Lai et al.: y = α M_(t−1) q + γ R_t q, and the first memory's α for
            both; otherwise y = M_t q + R_t q, with separate gates.
    """
    inner, second = layer.parts["first"], layer.parts["second"]
    first = Memory(inner)
    M = [inner.out.weight.new_zeros(first.V, first.K) for _ in range(first.H)]
    R, outputs = list(M), []
    for token in x:
        q, k, v, beta, alpha = first.numbers(token)
        gates = {name: result(token.view(1, 1, -1))[0, 0] for name, result in second.gates.items()}
        gamma = gates["lr"]
        forget = alpha if published else list(gates["log_decay"].exp())
        read = []
        for h in range(first.H):
            initial = M[h]
            r = (v[h] - initial @ k[h]).clamp(-clip, clip)
            decayed = alpha[h] * initial
            M[h] = decayed - beta[h] * torch.outer(decayed @ k[h] - v[h], k[h])
            decayed = forget[h] * R[h]
            R[h] = decayed - gamma[h] * torch.outer(decayed @ k[h] - r, k[h])
            if published:
                y = alpha[h] * initial @ q[h] + gamma[h] * R[h] @ q[h]
            else:
                y = M[h] @ q[h] + R[h] @ q[h]
            read.append(rms(y, inner.norm.weight))
        gate_ = nn.functional.silu(inner.output_gate.weight @ token)
        outputs.append(inner.out.weight @ (torch.cat(read) * gate_))
    return torch.stack(outputs)


def at_levels(layer: Any, x: Tensor) -> Tensor:
    """Guo et al. 2025: the Fenwick decomposition of the tokens before t, one state for each part.

    A part of 2^(l−1) tokens has level l, and older tokens the last level. Its state starts from
    zeros, and later tokens only decay and erase it.
    """
    inner, weights = layer.memory, layer.level_weights
    memory, H, L = Memory(inner), inner.num_heads, layer.mixer.num_levels
    numbers, outputs = [memory.numbers(token) for token in x], []
    for t, token in enumerate(x):
        parts, stop = [(t, t + 1, 0)], t
        while stop:
            size = stop & -stop
            parts.append((stop - size, stop, min(size.bit_length(), L - 1)))
            stop -= size
        lambda_ = nn.functional.softplus((weights.weight @ token).view(H, L) + weights.bias)
        read = []
        for h in range(H):
            y = token.new_zeros(memory.V)
            for start, stop, level in parts:
                W = token.new_zeros(memory.V, memory.K)
                for s in range(start, t + 1):
                    _, k, v, beta, alpha = (number[h] for number in numbers[s])
                    decayed = alpha * W
                    W = decayed - beta * torch.outer(decayed @ k, k)
                    if s < stop:
                        W = W + beta * torch.outer(v, k)
                y = y + lambda_[h, level] * (W @ numbers[t][0][h])
            read.append(rms(y, inner.norm.weight))
        gate_ = nn.functional.silu(inner.output_gate.weight @ token)
        outputs.append(inner.out.weight @ (torch.cat(read) * gate_))
    return torch.stack(outputs)


def routed(layer: Any, x: Tensor, top: int) -> Tensor:
    """Each token is written to and read from ``top`` memories, and the shared one."""
    names = [name for name in layer.parts if name != "shared"]
    memories = {name: Memory(layer.parts[name]) for name in layer.parts}
    outputs = []
    for token in x:
        p = (layer.router.scores.weight @ token).softmax(0)
        best = sorted(range(len(names)), key=lambda j: -float(p[j].detach()))[:top]
        total = sum(p[j] for j in best)
        y = torch.zeros_like(token)
        for j in best:
            memory = memories[names[j]]
            memory.learn(token)
            y = y + p[j] / total * memory.read(token)
        if "shared" in memories:
            memories["shared"].learn(token)
            y = y + memories["shared"].read(token)
        outputs.append(y)
    return torch.stack(outputs)
