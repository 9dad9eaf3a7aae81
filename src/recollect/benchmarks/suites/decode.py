"""Language models that decode one token at a time, beside transformers' Llama of the same size.

Every case begins where the same prompt of `PROMPT` tokens ended and decodes `TOKENS` more, whatever
the tokens are: batch 1, four layers of width 256, a SwiGLU MLP of Llama's width in each, a small
vocabulary so that the layers are what is timed. Prefill is the prompt itself, with its states.
Compiled tokens are those of `StaticDecoder`; what compiling takes, seconds to minutes once, is not
in them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from recollect.benchmarks.results import Case
from recollect.decoder import StaticDecoder
from recollect.layer.block import mlp_width
from recollect.lm.model.cache import CACHE_KEY, cache_of
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["BASELINE", "COMPILED", "NAMES", "PROMPT", "TOKENS", "decode_cases"]

BASELINE = "transformers' Llama"
NAMES = ("softmax_attention", "mamba2", "gated_delta_net", "rls", "titans")
COMPILED = ("mamba2", "gated_delta_net", "rls", "titans")
"""Those whose states do not grow."""
PROMPT, TOKENS = 128, 32
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def _llama() -> PreTrainedModel:
    width = mlp_width(_SIZES["hidden_size"])
    return LlamaForCausalLM(LlamaConfig(**cast(Any, _SIZES), intermediate_size=width))


def _ours(name: str) -> PreTrainedModel:
    return RecollectForCausalLM(RecollectConfig.from_recipes(name, **cast(Any, _SIZES)))


def _made(build: Callable[[], PreTrainedModel], device: str) -> tuple[PreTrainedModel, Any]:
    """A model, and tokens of the prompt and of what follows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().eval()
        cast("torch.nn.Module", model).to(device)
        ids = torch.randint(_SIZES["vocab_size"], (1, PROMPT + TOKENS), device=device)
    return model, ids


def _decode(build: Callable[[], PreTrainedModel], device: str) -> Callable[[], object]:
    model, ids = _made(build, device)
    with torch.no_grad():
        begin = cache_of(model(ids[:, :PROMPT], use_cache=True))

    @torch.no_grad()
    def call() -> object:
        # Llama's cache is one object that grows; copying it takes a hundredth of a token's time.
        cache = copy.deepcopy(begin) if isinstance(model, LlamaForCausalLM) else begin
        for token in ids[:, PROMPT:].split(1, dim=1):
            cache = cache_of(model(token, use_cache=True, **{CACHE_KEY: cache}))
        return cache

    return call


def _compiled(build: Callable[[], PreTrainedModel], device: str) -> Callable[[], object]:
    model, ids = _made(build, device)
    with torch.no_grad():
        begin = cache_of(model(ids[:, :PROMPT], use_cache=True))
    decoder = StaticDecoder(cast("torch.nn.Module", model), begin, compile=True)
    tokens = ids[:, PROMPT:].split(1, dim=1)
    for n in range(decoder.warmup_tokens + 2 * decoder.period + TOKENS):
        decoder(tokens[n % TOKENS])

    def call() -> object:
        # On, from wherever the last call ended: a token takes as long there.
        return [decoder(token) for token in tokens]

    return call


def _prefill(build: Callable[[], PreTrainedModel], device: str) -> Callable[[], object]:
    model, ids = _made(build, device)

    @torch.no_grad()
    def call() -> object:
        return model(ids[:, :PROMPT], use_cache=True, logits_to_keep=1).logits

    return call


def decode_cases(device: str) -> list[Case]:
    """Decoding and prefill of each model, and decoding by a compiled program.

    Args:
        device: where they run.
    """
    builds: dict[str, Callable[[], PreTrainedModel]] = {BASELINE: _llama}
    builds |= {name: lambda name=name: _ours(name) for name in NAMES}
    cases: list[Case] = []
    for name, build in builds.items():
        cases.append(Case(name=name, make=lambda build=build: _decode(build, device)))
        prefill = f"{name}, prefill"
        cases.append(Case(name=prefill, make=lambda build=build: _prefill(build, device)))
        if name in COMPILED:
            fast = f"{name}, compiled"
            cases.append(Case(name=fast, make=lambda build=build: _compiled(build, device)))
    return cases
