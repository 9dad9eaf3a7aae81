"""Swapping recipes into decoders of Hugging Face: `replace_attention`.

An attention module is known by its structure: linear maps to queries, keys and values, one back,
and the index of its layer. In its place stands a `MemoryLayer` whose own maps start as those were,
wherever the recipe has maps of the same shapes. The decoder's own cache then holds a `StateLayer`
at that index, beside the keys and values of layers that stayed.
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
from recollect.lm.model.cache import CACHE, StateLayer, one_cache
from recollect.lm.model.config import Named, resolved
from recollect.lm.model.masks import Columns, columns
from recollect.lm.swap_config import record
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe

__all__ = ["Swap", "SwappedAttention", "SwappedLayer", "place_layers", "replace_attention"]


@dataclass(frozen=True, kw_only=True)
class SwappedLayer:
    """What became of one layer's attention.

    Attributes:
        index: of the layer. name: of the module that was replaced.
        kept: maps whose weights were taken over: of ``"q"``, ``"k"``, ``"v"``, ``"o"``.
        new: parameters that start afresh, by name, with their number of entries.
        dropped: parameters of the old module that the recipe has no place for.
    """

    index: int
    name: str
    kept: tuple[str, ...]
    new: dict[str, int]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        count = sum(self.new.values())
        parts = [f"layer {self.index} ({self.name}): kept {', '.join(self.kept) or 'nothing'}"]
        parts.append(
            f"new {', '.join(self.new)} ({count:,} parameters)" if self.new else "none new"
        )
        if self.dropped:
            parts.append(f"dropped {', '.join(self.dropped)}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Swap:
    """What `replace_attention` did, layer by layer."""

    layers: tuple[SwappedLayer, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))


class SwappedAttention(nn.Module):
    """A `MemoryLayer` that is called as the attention module whose place it took.

    Args:
        layer: the sequence layer.
        layer_idx: its index in the decoder, and in the decoder's cache.
        dropout: on the output, as the old module had.
    """

    def __init__(self, layer: MemoryLayer, layer_idx: int, dropout: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, layer_idx
        self.dropout = nn.Identity() if dropout is None else dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """The layer's output, and no attention weights.

        Args:
            hidden_states: ``[B, T, hidden_size]``.
            attention_mask: as the decoder makes it: ``None``, ``[B, S]`` or ``[B, 1, T, S]``,
                causal but for padding and for borders of packed documents.
            cache: the decoder's cache, whose layer of this index is changed in place.
            past_key_values: ``cache``, by its name before transformers 5.24.
            others: what attention is told and a memory does not need (positions, say).

        Raises:
            ValueError: a mask that is not causal, or a cache that cannot hold a state.
        """
        where = columns(attention_mask, hidden_states, others.get("cu_seq_lens_q"))
        cache = one_cache(cache, past_key_values)
        if cache is None:
            y, _ = _run(self.layer, hidden_states, None, where, output_final_state=False)
            return self.dropout(y), None
        slot = _slot(cache, self.layer_idx)
        calls: list[RecordedCall] | None = [] if slot.record_past else None
        y, new_state = _run(
            self.layer, hidden_states, slot, where, output_final_state=True, calls=calls
        )
        slot.advance(new_state, hidden_states.shape[1], calls or ())
        return self.dropout(y), None


def _run(
    layer: MemoryLayer,
    x: Tensor,
    slot: StateLayer | None,
    columns: Columns,
    *,
    output_final_state: bool,
    calls: list[RecordedCall] | None = None,
) -> tuple[Tensor, Any]:
    state = None if slot is None else slot.state
    if columns.borders is None:
        recorded = {} if calls is None else {"calls": calls}
        return layer(x, state, columns.mask, output_final_state=output_final_state, **recorded)
    if output_final_state:
        raise ValueError(
            "packed documents end where others begin, so there is no one state to go on from: pass "
            "use_cache=False, or one document per row"
        )
    # All rows in one: documents know nothing of each other anyway.
    y, _ = layer(
        x.reshape(1, -1, x.shape[-1]), None, None, columns.borders, output_final_state=False
    )
    return y.view_as(x), None


def _slot(cache: Cache, index: int) -> StateLayer:
    """The cache's layer of this index, made to hold a state."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise ValueError(
            f"cache must be a transformers.Cache, which a {type(cache).__name__} is not"
        )
    while len(layers) <= index:
        kind = cache.layer_class_to_replicate
        if kind is None:
            raise ValueError(
                f"the cache has {len(layers)} layers and layer {index} was asked for: take "
                "DynamicCache(config=model.config)"
            )
        layers.append(kind())
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


def _prepare_cache_for_generation(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Prepare the cache as the decoder's class does, with a `StateLayer` per replaced layer.

    Recording begins before the prompt is read, and only a `StateLayer` can be told to record.
    """
    prepare = type(model)._prepare_cache_for_generation  # type: ignore[attr-defined]
    prepare(model, generation_config, model_kwargs, *args, **kwargs)
    cache = model_kwargs.get(CACHE)
    if cache is None:
        return
    for module in model.modules():
        if isinstance(module, SwappedAttention):
            _slot(cache, module.layer_idx)
    if generation_config.is_assistant:
        cache.activate_past_recording()


# -- the modules and their maps ------------------------------------------------------------------

SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = ("c_attn", "qkv_proj")  # queries, keys and values one after the other
OUT = ("o_proj", "out_proj", "c_proj", "dense")


def replace_attention(
    model: PreTrainedModel,
    recipe: Named,
    layers: Iterable[int] | None = None,
    *,
    engine: str = "auto",
) -> Swap:
    """Put a recipe in place of a decoder's attention; the model is changed in place.

    Weights of the projections to queries, keys and values and back are kept where the recipe has
    maps of the same shapes: the heads' number and size, and that of memories (grouped heads), are
    the decoder's. Everything else starts as in a `MemoryLayer` of its own. With
    ``"softmax_attention"`` and the decoder's own rotary base the model computes what it did.

    The configuration carries the replacement: ``save_pretrained`` writes it, and transformers'
    ``AutoModelForCausalLM.from_pretrained`` builds it again where `recollect.lm` is imported; where
    it is not, the model type is unknown to it.

    Args:
        model: a decoder whose attention modules have ``q_proj``, ``k_proj``, ``v_proj`` (or one map
            for all three) and a map back; Llama, Qwen, Mistral, Phi-3 and GPT-2 are such.
        recipe: a zoo name, a preset, a recipe, or a recipe with its options.
        layers: indices, negative ones from the end; all when omitted.
        engine: engine, as in `recall`.

    Returns:
        What was kept, what is new and what was dropped, by layer.

    Raises:
        RecipeError: a recipe that does not fit the decoder's sizes.
        ValueError: no such layer, or no attention module that could be replaced.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> model = LlamaForCausalLM(config).eval()
        >>> swap = rc.lm.replace_attention(model, "gated_delta_net", layers=[-1])
        >>> swap.layers[0].index, sorted(swap.layers[0].kept)
        (1, ['k', 'o', 'q', 'v'])
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 32])
    """
    made, options = resolved(recipe)
    swap = place_layers(model, (made, options), layers, engine=engine)
    indices = [layer.index for layer in swap.layers]
    record(model, layers=indices, recipe=made, options=options, engine=engine)
    return swap


@torch.no_grad()
def place_layers(
    model: PreTrainedModel,
    recipe: tuple[Recipe, LayerOptions],
    layers: Iterable[int] | None,
    *,
    engine: str,
) -> Swap:
    """`replace_attention` of the modules alone; the configuration stays as it is."""
    attentions = _attentions(model)
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no attention that could be replaced: modules are sought "
            f"that have a layer_idx, {', '.join(SEPARATE)} (or one of {', '.join(FUSED)}) and one "
            f"of {', '.join(OUT)}"
        )
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    chosen, (made, options) = _chosen(attentions, layers, depth), recipe
    if options.persistent:
        raise RecipeError(
            "LayerOptions(persistent=...) reads learned pairs and no tokens, so it cannot stand in "
            "for attention: take a recipe that is written"
        )
    swapped: list[tuple[str, SwappedAttention]] = []
    reports: list[SwappedLayer] = []
    for index in chosen:
        name, old = attentions[index]
        sizes = _sizes(model, old, name)
        layer = MemoryLayer(
            sizes.d_model,
            sizes.heads,
            made,
            options,
            num_kv_heads=sizes.kv_heads,
            head_dim=options.key_dim or sizes.head_dim,
            value_dim=sizes.head_dim,
            engine=engine,
            depth=(index, depth),
        )
        reports.append(_take_over(layer, old, sizes, index=index, name=name))
        weight = next(old.parameters())
        layer.to(device=weight.device, dtype=weight.dtype).train(old.training)
        dropout = getattr(old, "resid_dropout", None)
        swapped.append((name, SwappedAttention(layer, index, dropout)))
    # Only now, so that a refusal leaves the model as it was.
    for name, module in swapped:
        model.set_submodule(name, module)
    if isinstance(model, GenerationMixin):
        prepare = functools.partial(_prepare_cache_for_generation, model)
        model._prepare_cache_for_generation = prepare  # type: ignore[assignment]
    return Swap(layers=tuple(reports))


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    maps: dict[str, tuple[Tensor, Tensor | None]]  # q, k, v, o: weight [out, in] and bias


def _attentions(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Self-attention by layer, with its module's name."""
    by_layer: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        into = all(hasattr(module, n) for n in SEPARATE) or any(hasattr(module, n) for n in FUSED)
        back = any(hasattr(module, n) for n in OUT)
        if isinstance(index, int) and into and back and not hasattr(module, "q_attn"):
            by_layer.setdefault(index, (name, module))
    return dict(sorted(by_layer.items()))


def _chosen(attentions: dict[int, Any], layers: Iterable[int] | None, depth: int) -> list[int]:
    if layers is None:
        return list(attentions)
    indices = [layers] if isinstance(layers, int) else list(layers)
    places: list[int] = []
    for index in indices:
        whole = isinstance(index, int) and not isinstance(index, bool)
        place = index + depth if whole and index < 0 else index
        if place not in attentions:
            raise ValueError(
                f"layers names {index!r}, and this decoder has attention that could be replaced "
                f"in layers {', '.join(map(str, attentions))}"
            )
        places.append(place)
    if not places:
        raise ValueError("layers is empty: name at least one layer, or leave it out for all")
    return sorted(set(places))


def _sizes(model: PreTrainedModel, old: nn.Module, name: str) -> _Sizes:
    """Heads and maps of an attention module."""
    config: Any = model.config.get_text_config(decoder=True)
    back = _weight(next(getattr(old, n) for n in OUT if hasattr(old, n)))
    d_model, width = back[0].shape
    heads = config.num_attention_heads
    head_dim = getattr(old, "head_dim", None) or width // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    if all(hasattr(old, n) for n in SEPARATE):
        maps = [_weight(getattr(old, n)) for n in SEPARATE]
    else:
        weight, bias = _weight(next(getattr(old, n) for n in FUSED if hasattr(old, n)))
        if weight.shape[0] != sum(sizes):
            raise ValueError(
                f"{name} has one map of {weight.shape[0]} outputs for queries, keys and values, "
                f"and {heads} heads, {kv_heads} of keys, of size {head_dim} need {sum(sizes)}: "
                "this decoder lays them out otherwise and is not supported"
            )
        biases = [None] * 3 if bias is None else bias.split(sizes)
        maps = list(zip(weight.split(sizes), biases, strict=True))
    return _Sizes(
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        maps=dict(zip("qkvo", [*maps, back], strict=True)),
    )


def _weight(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight ``[out, in]`` and bias of a linear map, however it is stored."""
    if isinstance(module, Conv1D):
        return module.weight.T, module.bias
    if isinstance(module, nn.Linear):
        return module.weight, module.bias
    raise ValueError(
        f"a projection is a {type(module).__name__}, and only torch.nn.Linear and GPT-2's Conv1D "
        "are taken over: merge adapters and undo quantization first"
    )


def _take_over(
    layer: MemoryLayer, old: nn.Module, sizes: _Sizes, *, index: int, name: str
) -> SwappedLayer:
    """Copy the maps whose shapes are the same; what else there is stays as it was drawn."""
    kept: list[str] = []
    parts = dict(zip("qkv", layer.qkv.weight.split(layer.qkv_sizes), strict=True))
    biased = any(sizes.maps[part][1] is not None for part in "qkv")
    biases = torch.zeros(sum(layer.qkv_sizes))
    places = dict(zip("qkv", biases.split(layer.qkv_sizes), strict=True))
    for part, target in (*parts.items(), ("o", layer.out.weight)):
        weight, bias = sizes.maps[part]
        if weight.shape != target.shape:
            continue
        target.copy_(weight)
        kept.append(part)
        if bias is not None and part == "o":
            layer.out.bias = nn.Parameter(bias.detach().clone())
        elif bias is not None:
            places[part].copy_(bias)
    if biased and set(kept) & set("qkv"):
        layer.qkv.bias = nn.Parameter(biases)
    whole = {"qkv": all(p in kept or not x.numel() for p, x in parts.items()), "out": "o" in kept}
    new = {
        n: x.numel()
        for n, x in layer.named_parameters()
        if not (n.partition(".")[0] in whole and whole[n.partition(".")[0]])
    }
    if "qkv.weight" in new:
        new.pop("qkv.bias", None)
        del new["qkv.weight"]
        fresh = {f"qkv.weight ({p})": x.numel() for p, x in parts.items() if p not in kept}
        new = {**{n: c for n, c in fresh.items() if c}, **new}
    known = {*SEPARATE, *FUSED, *OUT}
    dropped = [n for n, _ in old.named_parameters() if n.partition(".")[0] not in known]
    dropped += [f"{part} projection" for part in "qkvo" if part not in kept]
    return SwappedLayer(index=index, name=name, kept=tuple(kept), new=new, dropped=tuple(dropped))
