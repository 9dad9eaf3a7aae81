"""Cases of language models that decode one token at a time, and Llama of transformers.

Each model has four layers of width 256 with an MLP as wide as Llama's, and a small vocabulary. A
case decodes `TOKENS` tokens after a prompt of `PROMPT`, with batch size 1. The case "prefill" is
the prompt with its states, and "compiled" decodes with a compiled `StaticDecoder`. The seconds to
minutes of the compilation are not measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recollect.benchmarks.cases.recall import Shape
from recollect.benchmarks.results import Case
from recollect.decoder import StaticDecoder
from recollect.layer.block import mlp_width
from recollect.lm.model.cache import CACHE_KEY, cache_of
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["decode_case"]

PROMPT, TOKENS = 128, 32
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def decode_case(shape: Shape, *, name: str, preset: str | None, mode: str) -> Case:
    """Return a case of a preset's model, or of Llama, with the sizes of this module.

    ``mode`` is ``"tokens"``, ``"prefill"`` or ``"compiled"``.
    """

    def make() -> Callable[[], object]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = _build_model(preset).eval().to(shape.device)
            ids = torch.randint(_SIZES["vocab_size"], (1, PROMPT + TOKENS), device=shape.device)
        prompt, tokens = ids[:, :PROMPT], ids[:, PROMPT:].split(1, dim=1)

        @torch.no_grad()
        def prefill() -> Any:
            return model(prompt, use_cache=True, logits_to_keep=1)

        if mode == "prefill":
            return prefill
        cache = cache_of(prefill())
        return (_compiled if mode == "compiled" else _eager)(model, cache, tokens)

    return Case(name=name, make=make)


def _build_model(preset: str | None) -> Any:
    if preset is None:
        width = mlp_width(_SIZES["hidden_size"])
        return LlamaForCausalLM(LlamaConfig(**_SIZES, intermediate_size=width))
    return RecollectForCausalLM(RecollectConfig.from_recipes(preset, **_SIZES))


def _eager(model: Any, prompt_cache: Any, tokens: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        cache = prompt_cache
        if isinstance(model, LlamaForCausalLM):
            # Llama changes its cache in place. The copy takes a hundredth of a token's time.
            cache = copy.deepcopy(cache)
        for token in tokens:
            cache = cache_of(model(token, use_cache=True, **{CACHE_KEY: cache}))
        return cache

    return call


def _compiled(
    model: Any, prompt_cache: Any, tokens: tuple[torch.Tensor, ...]
) -> Callable[[], object]:
    decoder = StaticDecoder(model, prompt_cache, compile=True)
    for n in range(decoder.warmup_tokens + 2 * decoder.period + TOKENS):
        decoder(tokens[n % TOKENS])
    # Each call continues after the previous one: the time of a token does not depend on the state.
    return lambda: [decoder(token) for token in tokens]
