"""Let recollect compute the recurrent layers of a published model, over its own parameters."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from recollect.lm.adoption.context import (
    CallContext,
    argument_names,
    cache_name,
    passed_cache,
    watch_calls,
)
from recollect.lm.adoption.family import family_of
from recollect.lm.adoption.layer import AdoptedLayer, Adoption
from recollect.lm.adoption.subclass import original_class, specialize
from recollect.recipe.recipe import Recipe

__all__ = ["AdoptedLayerReport", "AdoptionReport", "adopt"]

UNKNOWN = "no family of recollect computes it (rc.lm.register_family adds one)"
REASONS = (
    ("Rwkv", "RWKV-4 computes a weighted mean per channel, for which there is no recipe"),
    ("Conv", "a convolution, which has no memory"),
    ("xLSTM", "its recipe has no eps, and config.eps is above 1e-5"),
)
"""Reasons for parts of class names of layers that no family computes."""


@dataclass(frozen=True, kw_only=True)
class AdoptedLayerReport:
    """A recurrent layer of a model, and who computes it.

    Attributes:
        name: name of the module in the model.
        layer_class: its original class.
        family: name of its family, or ``None`` if the layer is unchanged.
        recipe: the recipe that it computes, or ``None``.
        engine: name of the engine, or ``None``.
        reason: why the layer is unchanged, or ``""``.

    Examples:
        >>> report = rc.lm.AdoptedLayerReport(name="0", layer_class="Other", reason="no family")
        >>> report.family is None
        True
    """

    name: str
    layer_class: str
    family: str | None = None
    recipe: Recipe | None = None
    engine: str | None = None
    reason: str = ""


@dataclass(kw_only=True)
class AdoptionReport:
    """The result of `adopt`.

    Attributes:
        model: the model.
        layers: its recurrent layers, in order.

    Examples:
        >>> report = rc.lm.adopt(torch.nn.Linear(2, 2))
        >>> report.layers, str(report)
        ((), 'Linear: 0 recurrent layers adopted')
    """

    model: nn.Module
    layers: tuple[AdoptedLayerReport, ...]
    _hooks: list[Any] = field(default_factory=list, repr=False)

    @property
    def adopted(self) -> tuple[AdoptedLayerReport, ...]:
        """Layers that recollect computes."""
        return tuple(layer for layer in self.layers if layer.family is not None)

    @property
    def unchanged(self) -> tuple[AdoptedLayerReport, ...]:
        """Recurrent layers that the model computes as before."""
        return tuple(layer for layer in self.layers if layer.family is None)

    def undo(self) -> None:
        """Restore the original classes of all layers, and remove the hooks."""
        for module in self.model.modules():
            if isinstance(module, AdoptedLayer):
                module.__class__ = original_class(module)
                _update_hooked_forward(module)
                del module.adoption
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in self.model.modules():
            for name in ("_is_stateful", "_prepare_cache_for_generation"):
                vars(module).pop(name, None)

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}: {len(self.adopted)} recurrent layers adopted"]
        groups = Counter((r.layer_class, r.family, r.engine, r.reason) for r in self.layers)
        for (layer_class, family, engine, reason), count in groups.items():
            if family is None:
                lines.append(f"  {count} × {layer_class} unchanged: {reason}")
            else:
                lines.append(f"  {count} × {layer_class}: {family}, engine {engine}")
        return "\n".join(lines)


def adopt(model: nn.Module, *, engine: str = "auto") -> AdoptionReport:
    """Let recollect compute the recurrent layers of a model of transformers, in place.

    Parameters, their names, and everything but the recurrent layers stay as they are. The layers
    read and write the model's cache in its own layout, so the original model can continue it.

    Args:
        model: a model of transformers, for example from ``AutoModelForCausalLM``.
        engine: engine of all layers, as in `recollect.recall`.

    Returns:
        The layers by family, and those that are unchanged with the reason. ``undo()`` restores the
        original model.

    Raises:
        TypeError: not a module.
        ValueError: layers of the model are adopted already.

    Examples:
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> config = Mamba2Config(
        ...     vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=8, num_heads=4,
        ...     head_dim=8, n_groups=1, chunk_size=8,
        ... )
        >>> model = Mamba2ForCausalLM(config).eval()
        >>> print(rc.lm.adopt(model))
        Mamba2ForCausalLM: 2 recurrent layers adopted
          2 × Mamba2Mixer: mamba2, engine linear
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model of transformers, not {type(model).__name__}")
    if any(isinstance(module, AdoptedLayer) for module in model.modules()):
        raise ValueError("layers of this model are adopted already: call undo() of their report")
    context, reports, adoptions = CallContext(), [], []
    for name, module, index in _recurrent_layers(model):
        layer_report, adoption = _examine_layer(name, module, index, context, engine)
        reports.append(layer_report)
        adoptions.append((module, adoption))
    for module, adoption in adoptions:  # after all were examined: an error changes no layer
        if adoption is not None:
            module.adoption = adoption  # type: ignore[assignment]
            specialize(module, AdoptedLayer)
            _update_hooked_forward(module)
    report = AdoptionReport(model=model, layers=tuple(reports))
    if report.adopted:
        report._hooks += [hook for m in _models(model) for hook in watch_calls(m, context)]
        if not report.unchanged:
            for module in _models(model):
                module._is_stateful = False  # type: ignore[assignment]  # caches can be cropped
        _prepare_own_caches(model, report)
    return report


def _prepare_own_caches(model: nn.Module, report: AdoptionReport) -> None:
    """Add layers to caches of the model's own class, whether the model or `generate` makes them."""
    layers = [module.adoption for module in model.modules() if isinstance(module, AdoptedLayer)]
    layers = [adoption for adoption in layers if adoption.family.has_own_cache]
    if not layers:
        return
    add_layers: Any = functools.partial(_add_layers, layers)
    report._hooks += [m.register_forward_hook(add_layers) for m in _models(model)]
    for module in _models(model):
        if hasattr(module, "_prepare_cache_for_generation"):
            prepare: Any = functools.partial(_prepare_cache, module, layers)
            module._prepare_cache_for_generation = prepare


def _add_layers(adoptions: list[Adoption], module: nn.Module, args: Any, output: Any) -> None:
    """Add layers to the cache that a model returns."""
    cache = passed_cache(output) if isinstance(output, ModelOutput) else None
    if cache is not None:
        for adoption in adoptions:
            adoption.family.cache_layer(cache, adoption.layer_index)


def _prepare_cache(
    model: Any,
    adoptions: list[Adoption],
    config: Any,
    model_kwargs: dict[str, Any],
    mode: Any,
    batch_size: int,
    max_length: int,
) -> None:
    """Add a cache of the model's own class to the arguments of `generate`, which makes none."""
    prepare = type(model)._prepare_cache_for_generation
    prepare(model, config, model_kwargs, mode, batch_size, max_length)
    name = cache_name(model)
    if name is None or config.use_cache is False:
        return
    if model_kwargs.get(name) is None:
        batch_size *= max(config.num_beams, config.num_return_sequences)
        model_kwargs[name] = adoptions[0].family.new_cache(model, batch_size)
    for adoption in adoptions:  # recording begins before the first call
        adoption.family.cache_layer(model_kwargs[name], adoption.layer_index)
    if config.is_assistant:
        model_kwargs[name].activate_past_recording()


def _examine_layer(
    name: str, module: nn.Module, index: int, context: CallContext, engine: str
) -> tuple[AdoptedLayerReport, Adoption | None]:
    """Return the report of a recurrent layer, and how to compute it, or ``None``."""
    layer_class, family = type(module).__name__, family_of(module)
    if family is None:
        reason = next((text for part, text in REASONS if part in layer_class), UNKNOWN)
    elif "forward" in vars(module) and "_old_forward" not in vars(module):
        reason = "its forward method was replaced on the object: adopt the model before that"
    else:
        adoption = Adoption(
            family=family,
            context=context,
            engine=engine,
            argument_names=argument_names(module),
            layer_index=index,
        )
        try:
            sample = family.sample(module)
        except Exception as error:
            kind = type(error).__name__
            reason = f"the family {family.name!r} does not fit it ({kind}: {error})"
        else:
            report = AdoptedLayerReport(
                name=name,
                layer_class=layer_class,
                family=family.name,
                recipe=family.recipe,
                engine=adoption.bind(sample).engine.name,
            )
            return report, adoption
    return AdoptedLayerReport(name=name, layer_class=layer_class, reason=reason), None


def _update_hooked_forward(module: Any) -> None:
    """Let a hook of accelerate, which replaced the forward method, call that of the class."""
    if "_old_forward" in vars(module):
        module._old_forward = type(module).forward.__get__(module)


def _recurrent_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Iterate over the recurrent layers of a model, with their names and indices in caches."""
    parent = None
    for name, module in model.named_modules():
        if parent is not None and name.startswith(f"{parent}."):
            continue
        index = getattr(module, "layer_idx", None)
        if index is None:
            index = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), 0)
        if family_of(module) is not None or _looks_recurrent(module):
            parent = name
            yield name, module, index


def _looks_recurrent(module: nn.Module) -> bool:
    """Whether a module has parameters of a recurrence or a convolution over tokens."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if names & {"A_log", "time_decay", "recurrent_param", "slope_rate"}:
        return True
    if hasattr(module, "mlstm_backend"):
        return True
    return hasattr(module, "layer_idx") and any(
        isinstance(child, nn.Conv1d) for child in module.children()
    )


def _models(model: nn.Module) -> list[nn.Module]:
    """Return the models of transformers that contain adopted layers, outermost first.

    Arguments of a wrapper, such as a model of PEFT or a module of the user, are its own.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        and any(isinstance(child, AdoptedLayer) for child in module.modules())
    ]
