"""The role of every parameter as width grows: whether what it maps from, and to, grows with it.

Two things decide it. A table *declares*, by the module that owns it, which axis of a parameter is
summed over (``in``) and which axis its result runs along (``out``); all other axes stand beside
each other, as heads and channels do. And the model of a configuration is built at two widths, on
the meta device, where it takes no memory: an axis whose size differs *grows*. Nobody is asked for a
name of the zoo, and a module that the table does not have is refused.

=========  ====================  ==============================================================
role       ``in``, ``out``       such as
=========  ====================  ==============================================================
input      fixed or none         embedding, biases, norms, convolutions, initial memories,
                                 decays, the second map of a low rank
hidden     grows, grows          q, k, v; gates and steps, one row per head; the MLP
output     grows, fixed          the head over the vocabulary, a router, the first map of a low
                                 rank
=========  ====================  ==============================================================
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from recollect.blocks.layers import PersistentTokens
from recollect.layer.feed_forward import FeedForward
from recollect.layer.gates import GateProjection
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import InitialKernelRows, InitialMemory
from recollect.layer.rotary import ComplexDecayPhase
from recollect.layer.short_conv import ShortConvolution
from recollect.layer.ties import Ties
from recollect.layer.token_shift import TokenShift
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.messages import RecipeError

__all__ = ["Role", "at_width", "built", "follows_width", "roles"]

Role = Literal["input", "hidden", "output"]

_NEAR = 0.2  # sizes are whole numbers: how far from the width's own factor one may grow

_MAPS: dict[type[nn.Module], dict[str, tuple[int, int]]] = {
    nn.Linear: {"weight": (0, 1)},
    nn.Embedding: {"weight": (1, 0)},
    GateProjection: {"weight": (0, 1), "down": (0, 1)},
    ComplexDecayPhase: {"weight": (0, 1)},
    TokenShift: {"down": (2, 1), "up": (2, 1)},
    FeedForward: {"keys": (1, 2), "values": (2, 1), "gates": (1, 2)},
}
"""Parameters that are maps: the axes (out, in), by the module that owns them."""

_PER_HEAD = (InitialMemory, InitialKernelRows)
_BESIDE = (nn.RMSNorm, MemoryLayer, Ties, ShortConvolution, PersistentTokens, *_PER_HEAD)
"""Modules whose other parameters are numbers beside each other, or maps within a head."""


def roles(config: RecollectConfig, base_width: int) -> dict[str, Role]:
    """Role of every parameter of a model, by name.

    Args:
        config: of the model, whose width is compared with the base width (with twice the base
            width, where they are the same).
        base_width: of the base model, ≥ 1.

    Raises:
        RecipeError: sizes that the base width does not scale to whole numbers; a model whose
            structure changes between both widths; a parameter of a module that declares no axes.
    """
    width = config.hidden_size
    other = 2 * base_width if width == base_width else base_width
    factor = width / other
    model, base = built(config), built(at_width(config, other))
    sizes = {name: tuple(p.shape) for name, p in base.named_parameters()}
    found: dict[str, Role] = {}
    for name, owner, local, weight in _owned(model):
        if name not in sizes or len(sizes[name]) != weight.dim():
            raise _changes(name, width, other)
        grows = [
            _grows(now, then, factor, name=name, width=width, other=other)
            for now, then in zip(weight.shape, sizes.pop(name), strict=True)
        ]
        axes = _axes(owner, local, name)
        if isinstance(owner, _PER_HEAD) and any(grows[1:]):
            raise RecipeError(
                f'parametrization = "mup" keeps every head as large as it is, and {name} grows '
                f"within a head from width {other} to width {width}: take parametrization = "
                '"standard"'
            )
        if axes is None or not grows[axes[1]]:
            found[name] = "input"
        else:
            found[name] = "hidden" if grows[axes[0]] else "output"
    if sizes:
        raise _changes(next(iter(sizes)), width, other)
    return found


def at_width(config: RecollectConfig, width: int) -> RecollectConfig:
    """The same model at another width: as many more heads of the same size, MLPs in proportion.

    Args:
        config: of the model.
        width: of the other, ≥ 1.

    Raises:
        RecipeError: heads, or memories, that would be no whole number.
    """
    if width == config.hidden_size:
        return copy.deepcopy(config)
    factor = width / config.hidden_size
    made = copy.deepcopy(config)
    made.hidden_size = width
    for name, word in (("num_attention_heads", "heads"), ("num_key_value_heads", "kv_heads")):
        count = getattr(config, name) * factor
        if count < 1 or count != int(count):
            raise RecipeError(
                f"widths grow by heads of one size, and {getattr(config, name)} {word} of width "
                f"{config.hidden_size} are {count:g} of width {width}: take a width at which they "
                "are a whole number, or other heads"
            )
        setattr(made, name, int(count))
    made.intermediate_size = max(1, round(config.intermediate_size * factor))
    if follows_width(config):
        made.initializer_range = width**-0.5
    return made


def follows_width(config: RecollectConfig) -> bool:
    """Whether linear maps begin with deviation width^(−1/2), as they do where none is stated."""
    return abs(config.initializer_range * config.hidden_size**0.5 - 1) < 1e-6


def built(config: RecollectConfig) -> RecollectForCausalLM:
    """A model of shapes alone."""
    with torch.device("meta"):
        return RecollectForCausalLM(config)


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter with the innermost module that says what it is, and its name there."""
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        path = name
        while True:
            path, _, _ = path.rpartition(".")
            owner = modules[path]
            if not path or not isinstance(owner, nn.ParameterList | nn.ParameterDict):
                yield name, owner, name[len(path) + 1 :] if path else name, weight
                break


def _axes(owner: nn.Module, local: str, name: str) -> tuple[int, int] | None:
    """The axes (out, in) of a parameter; ``None`` of one that is no map of growing things."""
    known = next((axes for kind, axes in _MAPS.items() if isinstance(owner, kind)), {})
    first = local.partition(".")[0]
    if first in known:
        return known[first]
    if known or isinstance(owner, _BESIDE):
        return None
    raise RecipeError(
        f'parametrization = "mup" does not know how {name} grows with width: '
        f'{type(owner).__name__} says nothing of its axes; take parametrization = "standard"'
    )


def _grows(now: int, then: int, factor: float, *, name: str, width: int, other: int) -> bool:
    if now == then:
        return False
    if abs(now / then / factor - 1) <= _NEAR:
        return True
    raise RecipeError(
        f'parametrization = "mup" asks for sizes that stay or grow with the width, and one of '
        f"{name} is {then} at width {other} and {now} at width {width}: take another base_width"
    )


def _changes(name: str, width: int, other: int) -> RecipeError:
    return RecipeError(
        f'parametrization = "mup" asks for one structure at all widths, and {name} is not the same '
        f"kind of parameter at width {other} as at width {width}: take a larger base_width"
    )
