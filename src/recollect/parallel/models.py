"""Find the modules of a model that read tokens, for context parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from recollect.blocks.layers import MixerLayer
from recollect.blocks.routed import Router
from recollect.blocks.sequential import PartsLayer
from recollect.layer.feed_forward import FeedForward
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["bind_arguments", "check_model", "outer_models", "sequence_layers"]


def sequence_layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the sequence layers that run over ranks, including the parts of a sum of layers."""
    if isinstance(module, MemoryLayer | FeedForward):
        yield name, module
        return
    inside: nn.Module = module
    if isinstance(module, MixerLayer):
        if not isinstance(module, PartsLayer) or module.persistent is not None:
            yield name, module
            return
        inside = module.parts
        name = f"{name}.parts" if name else "parts"
    for child, inner in inside.named_children():
        yield from sequence_layers(inner, f"{name}.{child}" if name else child)


def outer_models(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that read texts: with an output layer, or with blocks."""
    children = dict(module.named_children())
    if "lm_head" in children or isinstance(children.get("blocks"), nn.ModuleList):
        if any(True for _ in sequence_layers(module, "")):
            yield module
        return
    for inner in children.values():
        yield from outer_models(inner)


def check_model(model: nn.Module) -> None:
    """Raise if the tokens of a model cannot be split over ranks. No communication takes place.

    A compiled forward may ignore a replaced forward of an inner module. A classifier reads the last
    token, and a learned prompt would precede the tokens of every rank.
    """
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(
            "this model routes tokens to memories, and its balance loss is a mean over all tokens "
            "of a sequence, which no rank has: keep its sequences on one rank"
        )
    for module in model.modules():
        if next(sequence_layers(module, ""), None) is None:
            continue
        children, name = dict(module.named_children()), type(module).__name__
        if "_orig_mod" in children or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"this {name} is compiled, and would ignore the replaced forwards of its layers: "
                "give the module before torch.compile"
            )
        if "score" in children:
            raise ValueError(
                f"{name} reads the last token, which only one rank has: pass its body, and compute "
                "the scores on that rank"
            )
        if "prompt_encoder" in children:
            raise ValueError(
                f"{name} would add its learned tokens before the segment of every rank: use an "
                "adapter without learned tokens"
            )


def bind_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a module's forward by name."""
    signature = inspect.signature(type(module).forward)
    arguments: dict[str, Any] = {}
    _, *bound = signature.bind(module, *args, **kwargs).arguments.items()
    for name, value in bound:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"{type(module).__name__} takes arguments without names, which is not supported "
                "over several ranks: use keyword arguments"
            )
        else:
            arguments[name] = value
    return arguments
