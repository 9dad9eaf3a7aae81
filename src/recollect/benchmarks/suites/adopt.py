"""Recurrent layers of published models against themselves after `recollect.lm.adopt`.

Each layer has the sizes of a model of about a billion parameters, random weights and batch size 1.
The original computes in PyTorch, because packages of kernels are hidden from transformers. The
adopted layer has the original's parameters. Prefill is a prompt of T tokens into a new cache. A
token continues a cache, from wherever the last call ended.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from recollect.benchmarks.results import Case
from recollect.lm.adoption import adopt

__all__ = ["BASELINE", "LAYERS", "PublishedLayer", "adopt_cases", "adopt_errors", "adopt_pairs"]

KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages from which transformers takes kernels if it finds them when it is imported."""

PHASES = ("prefill", "token")


@dataclass(frozen=True, kw_only=True, eq=False)
class PublishedLayer:
    """A recurrent layer of transformers and its sizes.

    Attributes:
        model: name of the model in transformers.
        layer: name of the class.
        sizes: arguments of the model's configuration.
    """

    model: str
    layer: str
    sizes: Mapping[str, Any]


_ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}

LAYERS = (
    PublishedLayer(
        model="qwen3_next",
        layer="Qwen3NextGatedDeltaNet",
        sizes={
            **_ONE_LAYER,
            "hidden_size": 2048,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    PublishedLayer(
        model="kimi_linear",
        layer="KimiLinearDeltaAttention",
        sizes={
            **_ONE_LAYER,
            "hidden_size": 2304,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
        },
    ),
    PublishedLayer(
        model="mamba2",
        layer="Mamba2Mixer",
        sizes={
            "num_hidden_layers": 1,
            "hidden_size": 2048,
            "num_heads": 64,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
        },
    ),
    PublishedLayer(
        model="mamba",
        layer="MambaMixer",
        sizes={"num_hidden_layers": 1, "hidden_size": 2048, "state_size": 16},
    ),
)
"""A layer of each family."""

BASELINE = LAYERS[0].layer


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Make packages of kernels impossible to import."""
    loaded = {name: sys.modules.pop(name) for name in KERNEL_PACKAGES if name in sys.modules}
    sys.modules.update(dict.fromkeys(KERNEL_PACKAGES, cast(Any, None)))
    try:
        yield
    finally:
        for name in KERNEL_PACKAGES:
            del sys.modules[name]
        sys.modules.update(loaded)


class _Pair:
    """A published layer, and its adopted copy over the parameters of the original."""

    def __init__(self, published: PublishedLayer, T: int, device: str) -> None:
        model = published.model
        with _without_kernels():
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        # The mapping of classes may have those of flash-linear-attention under the same names.
        self.config = getattr(transformers, CONFIG_MAPPING_NAMES[model])(**published.sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.original: nn.Module = getattr(module, published.layer)(self.config, layer_idx=0)
            for name, weight in self.original.named_parameters():
                if weight.dim() == 1 or "A_log" in name:
                    nn.init.normal_(weight, 1.0, 0.2)
                else:
                    nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
            self.tokens = torch.randn(1, T + 1, self.config.hidden_size).to(device)
        self.original.eval().requires_grad_(False).to(device)
        self.adopted = copy.deepcopy(self.original)
        self.adopted.load_state_dict(self.original.state_dict(), assign=True)
        adopt(nn.ModuleList([self.adopted]))

    def cache(self) -> DynamicCache:
        """Return an empty cache."""
        return DynamicCache(config=self.config)

    def call(self, layer: nn.Module, phase: str) -> Callable[[], object]:
        """Return the function to time."""
        prompt, token = self.tokens.tensor_split([-1], dim=1)
        if phase == "prefill":
            return lambda: _output(layer, prompt, self.cache())
        cache = self.cache()
        _output(layer, prompt, cache)
        return lambda: _output(layer, token, cache)


@torch.no_grad()
def _output(layer: nn.Module, x: Tensor, cache: DynamicCache) -> Tensor:
    y = layer(x, cache=cache)
    return y[0] if isinstance(y, tuple) else y


def _name(published: PublishedLayer, phase: str, *, is_adopted: bool) -> str:
    parts = [published.layer, *(["token"] if phase == "token" else [])]
    return ", ".join([*parts, *(["adopted"] if is_adopted else [])])


def adopt_cases(T: int, device: str) -> list[Case]:
    """Return prefill of T tokens and one more token, by the original and the adopted layers."""
    pair_of = functools.cache(lambda published: _Pair(published, T, device))

    def case(published: PublishedLayer, phase: str, *, is_adopted: bool) -> Case:
        def make() -> Callable[[], object]:
            pair: _Pair = pair_of(published)
            return pair.call(pair.adopted if is_adopted else pair.original, phase)

        return Case(name=_name(published, phase, is_adopted=is_adopted), make=make)

    return [
        case(published, phase, is_adopted=is_adopted)
        for published in LAYERS
        for phase in PHASES
        for is_adopted in (False, True)
    ]


def adopt_pairs() -> list[tuple[str, str, str]]:
    """Return pairs of cases whose ratio is the time of an adopted layer over the original's."""
    return [
        (
            f"{published.layer}, {phase}: adopted / original",
            _name(published, phase, is_adopted=True),
            _name(published, phase, is_adopted=False),
        )
        for published in LAYERS
        for phase in PHASES
    ]


def adopt_errors(T: int, device: str) -> dict[str, float]:
    """Return the largest difference of adopted outputs, relative to the largest output, by case."""
    errors: dict[str, float] = {}
    for published in LAYERS:
        pair = _Pair(published, T, device)
        caches = pair.cache(), pair.cache()
        for phase, x in zip(PHASES, pair.tokens.tensor_split([-1], dim=1), strict=True):
            y = _output(pair.adopted, x, caches[0])
            expected = _output(pair.original, x, caches[1])
            error = (y - expected).abs().max() / expected.abs().max()
            errors[_name(published, phase, is_adopted=True)] = error.item()
    return errors
