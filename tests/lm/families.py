"""Small models of the zoo: the first preset of a family is fast, others are slow."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect.lm import RecollectConfig, RecollectForCausalLM

VOCAB = 24


def every_family() -> list[object]:
    """Return zoo names as parameters; those after a family's first are marked slow."""
    recorded: set[str] = set()
    params: list[object] = []
    for name in rc.zoo.names():
        family = rc.zoo.get(name).family
        marks = (pytest.mark.slow,) if family in recorded else ()
        recorded.add(family)
        params.append(pytest.param(name, marks=marks))
    return params


def enable_checkpointing(net: RecollectForCausalLM, **options: Any) -> None:
    """Recompute activations in backward passes; transformers 5.24 has a new name for it."""
    enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
    enable(options or None)


@functools.cache
def model(name: str, seed: int = 0) -> RecollectForCausalLM:
    """Return two layers of width 32; "hybrid" is a deep memory, attention and a window in turn."""
    recipes: object = name
    if name == "hybrid":
        recipes = ["omega_net", "softmax_attention", "gated_delta_net"]
    torch.manual_seed(seed)
    config = RecollectConfig.from_recipes(
        recipes,  # type: ignore[arg-type]
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3 if name == "hybrid" else 2,
        num_attention_heads=2,
    )
    net = RecollectForCausalLM(config).eval()
    with torch.no_grad():
        net.lm_head.weight.mul_(4)  # choices that do not depend on rounding
    return net


def text(rows: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    """Return tokens without 0, which is padding."""
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: int = 2, length: int = 9, holes: int = 3) -> tuple[Tensor, Tensor]:
    """Return a batch whose first row has ``holes`` columns of left padding, and its mask."""
    ids = text(rows, length)
    ids[0, :holes] = 0
    return ids, (ids != 0).long()
