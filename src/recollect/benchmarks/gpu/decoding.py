"""Decoding of a layer token by token, with CUDA graphs and without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import nn

from recollect.benchmarks.gpu.ceilings import seconds_of
from recollect.benchmarks.suites.calls import NO_NORM, recipe_of
from recollect.decoder import StaticDecoder
from recollect.engines.deep import fused_plan, fused_refuses
from recollect.engines.deep.fused.walk import launcher
from recollect.functional.binding import bind
from recollect.layer.memory_layer import MemoryLayer
from recollect.zoo.preset import get

__all__ = ["NAMES", "Decoded", "measure_decoding"]

NAMES = (
    "linear_attention",
    "mamba2",
    "gated_delta_net",
    "rwkv7",
    "titans",
    NO_NORM,
    "softmax_attention",
)
_TOKENS = 16
"""Decoded in one timed call: an inner batch of Titans."""


class Decoded(TypedDict):
    """A layer that decodes.

    Attributes:
        name: of the preset, and the method where one was asked for. rows: sequences at once.
        graphs: whether by recorded graphs.
        seconds: of a token of all rows.
        bytes: that a token must move at the least: the state read, and written once per inner
            batch, and the parameters read.
    """

    name: str
    rows: int
    graphs: bool
    seconds: float
    bytes: float


def measure_decoding(
    name: str,
    rows: Sequence[int],
    *,
    heads: int,
    size: int,
    prompt: int,
    device: torch.device,
    left_out: dict[str, str],
    least: float = 0.2,
) -> list[Decoded]:
    """Time a layer in bfloat16 from the state after a prompt.

    On another device than CUDA the static decoder runs its steps one by one, and is not timed.

    Args:
        name: of the preset. rows: sequences at once, each number by itself.
        heads, size: of the layer, whose width is their product.
        prompt: tokens before the first that is decoded.
        device: where. left_out: gets what could not be timed, with the reason.
        least: seconds that each measurement takes, about.
    """
    found: list[Decoded] = []
    ways = (False, True) if device.type == "cuda" else (False,)
    for B in rows:
        for method, graphs in itertools.product(_methods(name, size, device), ways):
            told = name if method == "auto" else f"{name}, {method}"
            label = f"{told}, {B} rows, decoding{' by graphs' if graphs else ''}"
            sizes = (B, heads * size, heads, prompt)
            try:
                call, moved = _decoding(name, sizes, device, method, graphs=graphs)
                seconds = seconds_of(call, least=least) / _TOKENS
            except Exception as error:
                left_out[label] = f"{type(error).__name__}: {error}"
                continue
            found.append(Decoded(name=told, rows=B, graphs=graphs, seconds=seconds, bytes=moved))
    return found


def _methods(name: str, size: int, device: torch.device) -> tuple[str, ...]:
    """Those that differ there: by itself, and the fused kernel where the device is one for it."""
    recipe = recipe_of(name)
    if not fused_refuses(recipe):
        build = fused_plan(bind(recipe, H=1, K=size, V=size)).fused
        if build is not None and launcher(build, device) is not None:
            return ("auto", "fused")
    return ("auto",)


def _decoding(
    name: str, sizes: tuple[int, int, int, int], device: torch.device, engine: str, *, graphs: bool
) -> tuple[Callable[[], object], float]:
    """A call that decodes some tokens, and the bytes that one of them must move."""
    torch.manual_seed(0)
    B, width, heads, prompt = sizes
    layer: nn.Module
    if name == NO_NORM:
        layer = MemoryLayer(width, heads, recipe_of(name), engine=engine)
    else:
        layer = get(name).build(d_model=width, num_heads=heads, engine=engine)
    layer = layer.eval().to(device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(B, prompt + 1, width, generator=generator, device=device).bfloat16()
    token = x[:, prompt:].contiguous()
    with torch.no_grad():
        _, state = layer(x[:, :prompt])
    batch = layer.recipe.algorithm.batch_size if isinstance(layer, MemoryLayer) else 1
    # What `State.cache` spares the next call need not be read.
    spared = [] if state.memory is None else state.memory.cache.values()
    kept = state.nbytes - sum(x.numel() * x.element_size() for x in spared)
    moved = kept * (1 + 1 / batch) + _bytes(layer)
    if not graphs:

        @torch.no_grad()
        def steps() -> object:
            now = state
            for _ in range(_TOKENS):
                _, now = layer(token, now)
            return now

        return steps, moved
    decoder = StaticDecoder(layer, state)
    for _ in range(decoder.warmup_tokens + 3 * decoder.period):
        decoder(token)

    def replayed() -> None:
        for _ in range(_TOKENS):
            decoder(token)

    return replayed, moved


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
