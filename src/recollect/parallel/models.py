"""What of a model sees tokens, and so has to know that they lie along several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from recollect.blocks.beside import ChainLayer, GatedLayer, TogetherLayer
from recollect.blocks.composed import Composed
from recollect.blocks.routed import Router
from recollect.layer.feed_forward import FeedForward
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["by_name", "check_model", "layers", "models", "parts"]


def layers(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Sequence layers to be run along ranks: parts of compositions where these only add up."""
    if isinstance(module, MemoryLayer | FeedForward):
        yield name, module
        return
    inside: nn.Module = module
    if isinstance(module, Composed):
        plain = isinstance(module, ChainLayer | TogetherLayer | GatedLayer)
        if not plain or module.persistent is not None:
            yield name, module
            return
        inside = module.parts
        name = f"{name}.parts" if name else "parts"
    for child, inner in inside.named_children():
        yield from layers(inner, f"{name}.{child}" if name else child)


def parts(module: nn.Module) -> dict[str, nn.Module]:
    """A module's own parts, and not those of what it wraps, which some wrappers pass on."""
    return dict(module.named_children())


def models(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that see whole texts: with an output layer, or with blocks."""
    own = parts(module)
    if "lm_head" in own or isinstance(own.get("blocks"), nn.ModuleList):
        if any(True for _ in layers(module, "")):
            yield module
        return
    for inner in own.values():
        yield from models(inner)


def check_model(model: nn.Module) -> None:
    """That the tokens of a model can lie along several ranks; nobody is waited for.

    A compiled forward need not ask whether that of a module in it was replaced; a classifier reads
    the last token, and a learned prompt would stand before every rank's tokens.

    Args:
        model: as in `context`.

    Raises:
        ValueError: tokens that are routed to memories, or something around the layers that would
            not see a context, or the whole.
    """
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(
            "this model routes tokens to memories, and what its routers cost is a mean over all "
            "tokens of a sequence, which no rank sees: keep its sequences on one rank"
        )
    for module in model.modules():
        if next(layers(module, ""), None) is None:
            continue
        own, name = parts(module), type(module).__name__
        if "_orig_mod" in own or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"this {name} is compiled as a whole, and would not see that its layers run along "
                "several ranks: give the module before torch.compile"
            )
        if "score" in own:
            raise ValueError(
                f"{name} reads the last token, which only one rank has: give its body, and read "
                "the scores there"
            )
        if "prompt_encoder" in own:
            raise ValueError(
                f"{name} puts learned tokens before the text, and would do so on every rank: use "
                "an adapter that adds none"
            )


def by_name(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward, each by its name."""
    signature = inspect.signature(type(module).forward)
    found: dict[str, Any] = {}
    _, *bound = signature.bind(module, *given, **named).arguments.items()
    for name, value in bound:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"{type(module).__name__} takes arguments without names, which cannot be told "
                "apart along several ranks: give them by name"
            )
        else:
            found[name] = value
    return found
