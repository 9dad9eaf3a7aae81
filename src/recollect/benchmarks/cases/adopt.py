"""Cases of recurrent layers of published models, before and after `recollect.lm.adopt`.

Each layer has the sizes of a model of about a billion parameters, random weights and batch size 1.
The original layer computes with PyTorch, because packages of kernels are hidden from transformers.
The adopted layer has the original's parameters. Prefill is a prompt of T tokens with a new cache.
The case of a token continues the cache of its previous call.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from recollect.benchmarks.cases.recall import Shape
from recollect.benchmarks.results import Case
from recollect.lm.adoption import adopt

__all__ = ["LAYERS", "adopt_case", "adopt_errors"]

KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages from which transformers takes kernels if they are installed."""


_ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}

LAYERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen3NextGatedDeltaNet": (
        "qwen3_next",
        {
            **_ONE_LAYER,
            "hidden_size": 2048,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "KimiLinearDeltaAttention": (
        "kimi_linear",
        {**_ONE_LAYER, "hidden_size": 2304, "linear_num_heads": 32, "linear_head_dim": 128},
    ),
    "Mamba2Mixer": (
        "mamba2",
        {
            "num_hidden_layers": 1,
            "hidden_size": 2048,
            "num_heads": 64,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
        },
    ),
    "MambaMixer": ("mamba", {"num_hidden_layers": 1, "hidden_size": 2048, "state_size": 16}),
}
"""Model in transformers and arguments of its configuration, by the class of the layer."""


def adopt_case(shape: Shape, *, name: str, layer: str, phase: str, adopted: bool) -> Case:
    """Return a case of a layer of `LAYERS`: its prompt (``phase="prefill"``) or a token."""

    def make() -> Callable[[], object]:
        pair = _layer_pair(layer, shape.T, shape.device)
        module = pair.adopted if adopted else pair.original
        if phase == "prefill":
            return lambda: _output(module, pair.prompt, pair.cache())
        cache = pair.cache()
        _output(module, pair.prompt, cache)
        return lambda: _output(module, pair.token, cache)

    return Case(name=name, make=make)


def adopt_errors(shape: Shape, *, layer: str) -> dict[str, float]:
    """Return the largest error of adopted outputs, relative to the largest output, by phase."""
    pair = _layer_pair(layer, shape.T, shape.device)
    caches = pair.cache(), pair.cache()

    def error(x: Tensor) -> float:
        y = _output(pair.adopted, x, caches[0])
        expected = _output(pair.original, x, caches[1])
        return ((y - expected).abs().max() / expected.abs().max()).item()

    return {"prefill": error(pair.prompt), "token": error(pair.token)}


class _LayerPair:
    """A published layer, and its adopted copy with the same parameters."""

    def __init__(self, layer: str, T: int, device: str) -> None:
        model, sizes = LAYERS[layer]
        with _hidden_kernel_packages():
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        # The mapping of classes may contain flash-linear-attention's under the same names.
        self.config = getattr(transformers, CONFIG_MAPPING_NAMES[model])(**sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.original: nn.Module = getattr(module, layer)(self.config, layer_idx=0)
            for name, weight in self.original.named_parameters():
                if weight.dim() == 1 or "A_log" in name:
                    nn.init.normal_(weight, 1.0, 0.2)
                else:
                    nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
            tokens = torch.randn(1, T + 1, self.config.hidden_size).to(device)
        self.prompt, self.token = tokens.tensor_split([-1], dim=1)
        self.original.eval().requires_grad_(False).to(device)
        self.adopted = copy.deepcopy(self.original)
        self.adopted.load_state_dict(self.original.state_dict(), assign=True)
        adopt(nn.ModuleList([self.adopted]))

    def cache(self) -> DynamicCache:
        """Return an empty cache."""
        return DynamicCache(config=self.config)


@functools.lru_cache(maxsize=1)  # the cases of a layer follow each other
def _layer_pair(layer: str, T: int, device: str) -> _LayerPair:
    return _LayerPair(layer, T, device)


@torch.no_grad()
def _output(layer: nn.Module, x: Tensor, cache: DynamicCache) -> Tensor:
    y = layer(x, cache=cache)
    return y[0] if isinstance(y, tuple) else y


@contextlib.contextmanager
def _hidden_kernel_packages() -> Iterator[None]:
    """Make packages of kernels impossible to import."""
    loaded = {name: sys.modules.pop(name) for name in KERNEL_PACKAGES if name in sys.modules}
    sys.modules.update(dict.fromkeys(KERNEL_PACKAGES, cast(Any, None)))
    try:
        yield
    finally:
        for name in KERNEL_PACKAGES:
            del sys.modules[name]
        sys.modules.update(loaded)
