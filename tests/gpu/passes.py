"""Passes of a preset on any device: forward, backward, a prompt, and single tokens.

This module does not depend on the device; the caller's ``run(name, call)`` may observe a stretch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import recollect as rc
from recollect.functional.binding import bind

WIDTH, HEADS = 16, 2
TOKENS, DEEP_TOKENS = 72, 40
"""Tokens of forward and backward: more than a chunk of 64, or two and a half inner batches."""

PROMPT, DECODED = 30, 4
"""Tokens of the prompt and after it: one of these ends an inner batch of 16."""


class Runs(Protocol):
    """Interface of objects that run a stretch and may observe it."""

    def run(self, name: str, call: Callable[[], Any]) -> Any: ...


class Unwatched:
    """Runs stretches without observing them."""

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        return call()


def host(x: Tensor) -> Tensor:
    """Return the numbers of a tensor, on the CPU."""
    x = x.detach()
    inner = x.__dict__.get("inner")  # of the pretended device (`tests.gpu.pretend`)
    return x.cpu() if inner is None else inner


def distance(x: Tensor | None, y: Tensor | None) -> float:
    """Return ‖x − y‖ relative to ‖y‖; infinite if only one exists or x is not finite."""
    if x is None or y is None:
        return 0.0 if x is y else float("inf")
    x, y = host(x).double(), host(y).double()
    if not bool(x.isfinite().all()):
        return float("inf")
    return float((x - y).norm() / y.norm().clamp_min(1e-30))


def passes(layer: nn.Module, x: Tensor, stretches: Runs) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return outputs, and their gradients by the input and every parameter."""
    x = x.requires_grad_()
    y = stretches.run("forward", lambda: layer(x, output_final_state=False))[0]
    stretches.run("backward", lambda: y.square().sum().backward())
    return y, {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def decode(layer: nn.Module, tokens: list[Tensor], stretches: Runs) -> Tensor:
    """Return outputs of the tokens after the first piece, which is the prompt."""

    def one_by_one() -> list[Tensor]:
        nonlocal state
        outputs: list[Tensor] = []
        for token in tokens[1:]:
            y, state = layer(token, state)
            outputs.append(y)
        return outputs

    with torch.no_grad():
        _, state = stretches.run("prompt", lambda: layer(tokens[0]))
        outputs = stretches.run("decode", one_by_one)
    return torch.cat([host(y) for y in outputs], 1)


def pieces(x: Tensor) -> list[Tensor]:
    """Return a prompt, and the tokens after it."""
    return [x[:, :PROMPT], *x[:, PROMPT : PROMPT + DECODED].split(1, 1)]


def length(preset: rc.zoo.Preset) -> int:
    """Return the number of tokens for a preset."""
    K = WIDTH // HEADS
    engine = bind(preset.recipe, H=HEADS, K=K, V=K, engine="auto").engine
    return DEEP_TOKENS if engine.name == "deep" else TOKENS
