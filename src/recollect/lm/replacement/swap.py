"""Replace the attention of Hugging Face decoders by recipes: `replace_attention`.

An attention module is recognized by its structure: projections to queries, keys and values, an
output projection, and the index of its layer. A `MemoryLayer` takes its place and copies each
projection whose shape is equal. The decoder's cache then holds a `StateLayer` at that index, next
to the keys and values of the other layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.pytorch_utils import Conv1D

from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.options import LayerOptions
from recollect.layer.recorded_call import RecordedCall
from recollect.lm.model.cache import CACHE_KEY, StateLayer, resolve_cache
from recollect.lm.model.config import RecipeLike, resolve_recipe
from recollect.lm.model.masks import parse_attention_mask
from recollect.lm.replacement.config import record_replacement
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe

__all__ = [
    "LayerReplacement",
    "ReplacementReport",
    "SwappedAttention",
    "check_decoder",
    "find_attention_modules",
    "prepare_cache_for_generation",
    "replace_attention",
    "replace_layers",
    "select_layers",
]


@dataclass(frozen=True, kw_only=True)
class LayerReplacement:
    """The result of `replace_attention` for one layer."""

    index: int  # index among the decoder layers
    name: str  # name of the replaced module
    copied: tuple[str, ...]  # projections whose weights were copied: of "q", "k", "v", "o"
    new: dict[str, int]  # number of entries of each newly initialized parameter, by name
    dropped: tuple[str, ...]  # parameters of the old module that were not copied

    def __str__(self) -> str:
        count = sum(self.new.values())
        copied = ", ".join(self.copied) or "nothing"
        new = f"new {', '.join(self.new)} ({count:,} parameters)" if self.new else "none new"
        dropped = f"; dropped {', '.join(self.dropped)}" if self.dropped else ""
        return f"layer {self.index} ({self.name}): kept {copied}; {new}{dropped}"


@dataclass(frozen=True, kw_only=True)
class ReplacementReport:
    """The result of `replace_attention` for each layer."""

    layers: tuple[LayerReplacement, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))


class SwappedAttention(nn.Module):
    """A `MemoryLayer` with the interface of the attention module that it replaces."""

    def __init__(self, layer: MemoryLayer, layer_idx: int, dropout: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, layer_idx
        self.dropout = nn.Identity() if dropout is None else dropout

    def forward(
        self,
        hidden_states: Tensor,  # [B, T, hidden_size]
        attention_mask: Tensor | None = None,  # [B, S] or [B, 1, T, S], as the decoder makes it
        cache: Cache | None = None,  # its layer with index layer_idx is changed in place
        past_key_values: Cache | None = None,  # name of cache before transformers 5.24
        **kwargs: Any,  # arguments that only attention needs, such as positions
    ) -> tuple[Tensor, None]:
        """Return the output of the layer, and no attention weights."""
        packing = parse_attention_mask(
            attention_mask, hidden_states, kwargs.get("cu_seq_lens_q"), layer_idx=self.layer_idx
        )
        cache = resolve_cache(cache, past_key_values)
        cache_layer = None if cache is None else _get_state_layer(cache, self.layer_idx)
        if packing.cu_seqlens is not None:
            if cache_layer is not None:
                raise ValueError(
                    "packed documents have no single state to continue from: pass use_cache=False, "
                    "or one document per sequence"
                )
            x = hidden_states.reshape(1, -1, hidden_states.shape[-1])
            y, _ = self.layer(x, None, None, packing.cu_seqlens, output_final_state=False)
            return self.dropout(y.view_as(hidden_states)), None
        state = None if cache_layer is None else cache_layer.state
        calls: list[RecordedCall] = []
        options: dict[str, Any] = {"output_final_state": cache_layer is not None}
        if cache_layer is not None and cache_layer.record_past:
            options["calls"] = calls  # which the forward over several ranks does not take
        y, state = self.layer(hidden_states, state, packing.token_mask, **options)
        if cache_layer is not None:
            cache_layer.advance(state, hidden_states.shape[1], calls)
        return self.dropout(y), None


def _get_state_layer(cache: Cache, index: int) -> StateLayer:
    """Return the layer of a cache with this index, as a `StateLayer`."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(f"cache must be a transformers.Cache, not a {type(cache).__name__}")
    while len(layers) <= index:
        if cache.layer_class_to_replicate is None:
            raise ValueError(
                f"the cache has {len(layers)} layers and no layer {index}: create it with "
                "DynamicCache(config=model.config)"
            )
        layers.append(cache.layer_class_to_replicate())
    old = layers[index]
    if isinstance(old, StateLayer):
        return old
    if getattr(old, "is_compileable", False):
        raise ValueError(
            "a static cache holds keys and values of a fixed length, and a memory's state is "
            "neither: leave cache_implementation out"
        )
    if isinstance(old, CacheLayerMixin) and old.is_initialized and old.get_seq_length():
        raise ValueError(
            f"layer {index} of this cache was filled by the attention that was replaced: begin "
            "with a new one"
        )
    layers[index] = StateLayer()
    return layers[index]


def prepare_cache_for_generation(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Prepare the cache as the decoder's class does, with a `StateLayer` per replaced layer.

    Recording starts before the model processes the prompt, and only a `StateLayer` can record.
    """
    prepare = type(model)._prepare_cache_for_generation  # type: ignore[attr-defined]
    prepare(model, generation_config, model_kwargs, *args, **kwargs)
    cache = model_kwargs.get(CACHE_KEY)
    if cache is None:
        return
    for module in model.modules():
        if isinstance(module, SwappedAttention):
            _get_state_layer(cache, module.layer_idx)
        elif hasattr(module, "state_layer"):  # an MLP that learns in place
            module.state_layer(cache)  # type: ignore[operator]
    if generation_config.is_assistant:
        cache.activate_past_recording()


# -- replacing modules ---------------------------------------------------------------------------

QKV_NAMES = ("q_proj", "k_proj", "v_proj")
FUSED_QKV_NAMES = ("c_attn", "qkv_proj")  # queries, keys and values in one projection
OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense")


def replace_attention(
    model: PreTrainedModel,
    recipe: RecipeLike,
    layers: Iterable[int] | None = None,
    *,
    engine: str = "auto",
) -> ReplacementReport:
    """Replace the attention of a decoder by a recipe, in place.

    Weights of the projections to queries, keys, values and outputs are copied if the recipe has
    projections of these shapes. The number and size of the heads, and the number of memories
    (grouped heads), are the decoder's. All other parameters are initialized as in a new
    `MemoryLayer`. ``"softmax_attention"`` with the decoder's rotary base does not change the
    model's outputs.

    ``save_pretrained`` writes the replacement into the configuration.
    ``AutoModelForCausalLM.from_pretrained`` of transformers loads the model after an import of
    `recollect.lm`. Without that import, transformers refuses the model type.

    Args:
        model: a decoder whose attention modules have ``q_proj``, ``k_proj``, ``v_proj`` (or one
            projection for all three) and an output projection, such as Llama, Qwen, Mistral, Phi-3
            and GPT-2.
        recipe: a zoo name, a preset, a recipe, or a recipe with its options.
        layers: indices, negative ones from the end; all layers when omitted.
        engine: engine, as in `recall`.

    Returns:
        The copied, new and dropped weights of each layer.

    Raises:
        RecipeError: a recipe that does not fit the decoder's sizes.
        ValueError: an unknown layer, or a model without a supported attention module.
        TypeError: not a module.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> report = rc.lm.replace_attention(model, "gated_delta_net", layers=[-1])
        >>> report.layers[0].index, sorted(report.layers[0].copied)
        (1, ['k', 'o', 'q', 'v'])
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 32])
    """
    check_decoder(model)
    resolved_recipe, options = resolve_recipe(recipe)
    report = replace_layers(model, resolved_recipe, options, layers, engine=engine)
    record_replacement(
        model,
        layers=[layer.index for layer in report.layers],
        recipe=resolved_recipe,
        options=options,
        engine=engine,
    )
    return report


@torch.no_grad()
def replace_layers(
    model: PreTrainedModel,
    recipe: Recipe,
    options: LayerOptions,
    layers: Iterable[int] | None,
    *,
    engine: str,
) -> ReplacementReport:
    """Replace attention modules as `replace_attention` does, without the configuration."""
    attentions = find_attention_modules(model)
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no attention that could be replaced: a module needs a "
            f"layer_idx, {', '.join(QKV_NAMES)} (or one of {', '.join(FUSED_QKV_NAMES)}) and one "
            f"of {', '.join(OUTPUT_NAMES)}"
        )
    config: Any = model.config.get_text_config(decoder=True)
    depth, heads = config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    indices = select_layers(attentions, layers, depth)
    if options.persistent:
        raise RecipeError(
            "LayerOptions(persistent=...) reads learned pairs and no tokens, so it cannot replace "
            "attention: use a recipe that writes tokens"
        )
    replacements: dict[str, SwappedAttention] = {}
    reports: list[LayerReplacement] = []
    for index in indices:
        name, old = attentions[index]
        out = _weight_and_bias(next(getattr(old, n) for n in OUTPUT_NAMES if hasattr(old, n)))
        d_model, width = out[0].shape
        head_dim = getattr(old, "head_dim", None) or width // heads
        projections = {**_qkv_projections(old, name, heads, kv_heads, head_dim), "o": out}
        layer = MemoryLayer(
            d_model,
            heads,
            recipe,
            options,
            num_kv_heads=kv_heads,
            head_dim=options.key_dim or head_dim,
            value_dim=head_dim,
            engine=engine,
            depth=(index, depth),
        )
        copied, new = _copy_projections(layer, projections)
        others = {*QKV_NAMES, *FUSED_QKV_NAMES, *OUTPUT_NAMES}
        dropped = [n for n, _ in old.named_parameters() if n.partition(".")[0] not in others]
        dropped += [f"{part} projection" for part in projections if part not in copied]
        report = LayerReplacement(
            index=index, name=name, copied=tuple(copied), new=new, dropped=tuple(dropped)
        )
        reports.append(report)
        weight = next(old.parameters())
        layer.to(device=weight.device, dtype=weight.dtype).train(old.training)
        replacements[name] = SwappedAttention(layer, index, getattr(old, "resid_dropout", None))
    for name, module in replacements.items():  # after all layers fit: an error changes no layer
        model.set_submodule(name, module)
    if isinstance(model, GenerationMixin):
        prepare = functools.partial(prepare_cache_for_generation, model)
        model._prepare_cache_for_generation = prepare  # type: ignore[assignment]
    return ReplacementReport(layers=tuple(reports))


def check_decoder(model: object) -> None:
    """Raise TypeError for an argument that is not a module, such as the name of a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a model of transformers, not {type(model).__name__}: load it by "
            "AutoModelForCausalLM.from_pretrained"
        )


def find_attention_modules(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Return names and modules of self-attention by index of the layer."""
    by_layer: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        has_qkv = all(hasattr(module, n) for n in QKV_NAMES) or any(
            hasattr(module, n) for n in FUSED_QKV_NAMES
        )
        has_output = any(hasattr(module, n) for n in OUTPUT_NAMES)
        is_cross_attention = hasattr(module, "q_attn")
        if isinstance(index, int) and has_qkv and has_output and not is_cross_attention:
            by_layer.setdefault(index, (name, module))
    return dict(sorted(by_layer.items()))


def select_layers(
    modules: dict[int, Any], layers: Iterable[int] | None, depth: int, *, part: str = "attention"
) -> list[int]:
    """Return the sorted indices of named layers that have a module to replace."""
    if layers is None:
        return list(modules)
    indices: set[int] = set()
    for index in [layers] if isinstance(layers, int) else layers:
        from_start = index + depth if isinstance(index, int) and index < 0 else index
        if from_start not in modules:
            raise ValueError(
                f"layers names {index!r}, and this decoder has {part} that could be replaced "
                f"in layers {', '.join(map(str, modules))}"
            )
        indices.add(from_start)
    if not indices:
        raise ValueError("layers is empty: name at least one layer, or leave it out for all")
    return sorted(indices)


Projection = tuple[Tensor, Tensor | None]
"""Weight ``[out, in]`` and bias of a linear layer."""


def _qkv_projections(
    old: nn.Module, name: str, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Projection]:
    """Return the projections of an attention module to queries, keys and values."""
    if all(hasattr(old, n) for n in QKV_NAMES):
        projections = [_weight_and_bias(getattr(old, n)) for n in QKV_NAMES]
    else:
        fused = next(getattr(old, n) for n in FUSED_QKV_NAMES if hasattr(old, n))
        weight, bias = _weight_and_bias(fused)
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        if weight.shape[0] != sum(sizes):
            raise ValueError(
                f"{name} has one projection of {weight.shape[0]} outputs for queries, keys and "
                f"values, and {heads} heads, {kv_heads} of keys, of size {head_dim} need "
                f"{sum(sizes)}: this layout is not supported"
            )
        biases = [None] * 3 if bias is None else bias.split(sizes)
        projections = list(zip(weight.split(sizes), biases, strict=True))
    return dict(zip("qkv", projections, strict=True))


def _weight_and_bias(module: nn.Module) -> Projection:
    if isinstance(module, Conv1D):
        return module.weight.T, module.bias
    if isinstance(module, nn.Linear):
        return module.weight, module.bias
    raise ValueError(
        f"a projection is a {type(module).__name__}, and only torch.nn.Linear and GPT-2's Conv1D "
        "are supported: merge adapters and undo quantization first"
    )


def _copy_projections(
    layer: MemoryLayer, projections: dict[str, Projection]
) -> tuple[list[str], dict[str, int]]:
    """Copy the projections of equal shapes; return their names, and the sizes of new parameters."""
    targets = dict(zip("qkv", layer.qkv.weight.split(layer.qkv_sizes), strict=True))
    targets["o"] = layer.out.weight
    copied = [part for part, x in targets.items() if projections[part][0].shape == x.shape]
    for part in copied:
        targets[part].copy_(projections[part][0])
    if any(projections[part][1] is not None for part in "qkv") and copied not in ([], ["o"]):
        qkv_bias = torch.zeros(sum(layer.qkv_sizes))
        for part, x in zip("qkv", qkv_bias.split(layer.qkv_sizes), strict=True):
            if part in copied and (bias := projections[part][1]) is not None:
                x.copy_(bias)
        layer.qkv.bias = nn.Parameter(qkv_bias)
    if "o" in copied and (bias := projections["o"][1]) is not None:
        layer.out.bias = nn.Parameter(bias.detach().clone())
    new = {
        f"qkv.weight ({part})": targets[part].numel()
        for part in "qkv"
        if part not in copied and targets[part].numel()
    }
    for name, x in layer.named_parameters():
        module = name.partition(".")[0]
        if module != "qkv" and not (module == "out" and "o" in copied):
            new[name] = x.numel()
    return copied, new
