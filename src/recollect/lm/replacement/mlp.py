"""Replace the MLPs of Hugging Face decoders by MLPs that learn in place: `replace_mlp`.

A gated MLP is recognized by ``gate_proj``, ``up_proj``, ``down_proj`` and ``act_fn``. Its
output map becomes the initial value of a memory, whose keys and queries are the hidden units. The
state of the memory is one more layer of the decoder's cache.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.features.finite import Identity
from recollect.choices.memory.maps import Matrix
from recollect.functional.packing import CompactedBatch, compact, scatter
from recollect.functional.recall import recall
from recollect.layer.key_recurrence import Sequences
from recollect.layer.options import LayerOptions
from recollect.layer.recorded_call import RecordedCall
from recollect.layer.short_conv import ShortConvolution
from recollect.layer.state import LayerState
from recollect.lm.adoption.context import CallContext, passed_cache, watch_calls
from recollect.lm.model.cache import StateLayer
from recollect.lm.replacement.config import record_replacement
from recollect.lm.replacement.swap import (
    LayerReplacement,
    ReplacementReport,
    check_decoder,
    prepare_cache_for_generation,
    select_layers,
)
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe

__all__ = ["InPlaceMLP", "replace_mlp", "replace_mlp_layers"]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class TokenContext(CallContext):
    """The current call of a model, with its token embeddings.

    Attributes:
        embeddings: inputs of the first decoder layer ``[B, T, d_model]``, or ``None``.
    """

    def _clear(self) -> None:
        super()._clear()
        self.embeddings: Tensor | None = None

    def read_layer(
        self, first: bool, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Read the cache and the token embeddings; the hook before a call of a decoder layer."""
        if not self.is_active:
            return  # the layer was called without the model
        if first:
            self.embeddings = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        cache = passed_cache(kwargs)
        if cache is not None:
            self.cache = cache


class InPlaceMLP(nn.Module):
    """A gated MLP whose output map is a memory: y = W° z, z = σ(G x) ⊙ U x.

    Token s writes the value v_s, a map of a short convolution of token embeddings, at the units
    z_(s−1) of the token before. The map starts at zero.
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(
        self,
        mlp: nn.Module,  # its projections are used and not copied
        recipe: Recipe,
        *,
        conv_size: int,  # number of token embeddings in the convolution
        depth: int,  # number of decoder layers, whose keys and values come first in the cache
        rank: int,  # number of MLPs that learn in place before this one
        context: TokenContext,  # current call of the model
        engine: str,  # engine, as in `recall`
    ) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            self.add_module(name, child)
        self.act_fn: Any = mlp.act_fn
        d_model = self.down_proj.out_features
        self.target_conv = ShortConvolution(d_model, conv_size)
        self.target = nn.Linear(d_model, d_model, bias=False)
        self.recipe, self.engine, self.context = recipe, engine, context
        self.depth, self.index = depth, depth + rank
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the map to values to zero, so that no update changes the MLP."""
        nn.init.zeros_(self.target.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of tokens ``[B, T, d_model]``, and update the cache of the call."""
        context = self.context
        embeddings = context.embeddings
        if embeddings is None or embeddings.shape != x.shape:
            raise RuntimeError(
                "an MLP that learns in place reads the token embeddings of the model's call, which "
                "are missing here: call the model, without gradient checkpointing"
            )
        units = _hidden_units(self, x)
        embeddings = embeddings.to(x.dtype)
        boundaries = context.boundaries
        layer = None if context.cache is None else self.state_layer(context.cache)
        if boundaries is not None:
            if layer is not None:
                raise ValueError(
                    "packed documents have no single state to continue from: pass use_cache=False, "
                    "or one document per sequence"
                )
            flat = (units.reshape(1, -1, units.shape[-1]), embeddings.reshape(1, -1, x.shape[-1]))
            y, _ = self._run(*flat, None, cu_seqlens=boundaries)
            return y.view(x.shape)
        batch = context.padding(x.shape[1])
        state: Any = None if layer is None else layer.state
        y, end = self._run(units, embeddings, state, batch, output_final_state=layer is not None)
        if layer is not None:
            calls: list[RecordedCall] = []
            if layer.record_past:
                mask = None if batch is None else batch.attention_mask
                recompute = functools.partial(self._state_after, units, embeddings, state)
                calls.append(
                    RecordedCall(
                        num_tokens=x.shape[1], state=state, attention_mask=mask, recompute=recompute
                    )
                )
            layer.advance(end, x.shape[1], calls)
        return y

    def _run(
        self,
        units: Tensor,  # [B, T, F]
        embeddings: Tensor,  # [B, T, d_model]
        state: LayerState | None,
        batch: CompactedBatch | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = True,
    ) -> tuple[Tensor, LayerState | None]:
        """Return the outputs and the state after the last token."""
        lengths, mask = None, None
        if batch is not None:
            units, embeddings = batch.gather(units), batch.gather(embeddings)
            lengths, mask = batch.lengths, batch.mask
        conv, keys = (None, None) if state is None else (state.conv, state.keys)
        mixed, conv = self.target_conv(embeddings, conv, lengths=lengths, cu_seqlens=cu_seqlens)
        values = self.target(mixed).unsqueeze(2)  # [B, T, 1, d_model]
        queries = units.unsqueeze(2)  # [B, T, 1, F]
        sequences = Sequences(keys=keys, lengths=lengths, cu_seqlens=cu_seqlens)
        previous, last = sequences.previous(queries, sequences.initial(0, queries))
        y, memory = recall(
            self.recipe,
            queries,
            previous,
            values,
            initial_memory=None if state is not None else self.down_proj.weight.unsqueeze(0),
            state=None if state is None else state.memory,
            engine=self.engine,
            attention_mask=mask,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
        )
        y = y.squeeze(2)
        if self.down_proj.bias is not None:
            y = y + self.down_proj.bias
        y = y if batch is None else scatter(y, batch)
        if memory is None:
            return y, None
        return y, LayerState(memory=memory, conv=conv, keys=last.unsqueeze(1))

    def _state_after(
        self,
        units: Tensor,
        embeddings: Tensor,
        state: LayerState | None,
        n: int,
        mask: Tensor | None,
    ) -> LayerState | None:
        """Return the state after the first n tokens of a call."""
        batch = None if mask is None else compact(mask)
        return self._run(units[:, :n], embeddings[:, :n], state, batch)[1]

    def state_layer(self, cache: Any) -> StateLayer:
        """Return the layer of a cache with the state of this MLP, after those of attention."""
        layers = getattr(cache, "layers", None)
        if layers is None or any(getattr(layer, "is_compileable", False) for layer in layers):
            raise ValueError(
                "the state of an MLP that learns in place needs a dynamic cache, not a "
                f"{type(cache).__name__}: leave cache_implementation out"
            )
        while len(layers) <= self.index:
            is_state = len(layers) >= self.depth
            layers.append(StateLayer() if is_state else cache.layer_class_to_replicate())
        return layers[self.index]


def replace_mlp(
    model: PreTrainedModel,
    recipe: Recipe | None = None,
    layers: Iterable[int] | None = None,
    *,
    conv_size: int = 4,
    engine: str = "auto",
) -> ReplacementReport:
    """Let the output maps of a decoder's gated MLPs learn in place from the tokens they read.

    The hidden units are the keys and queries of a memory that starts at ``down_proj``. Each token
    writes a value, a linear map of a short convolution of the token embeddings, at the units of the
    token before (in-place test-time training, arXiv 2604.06169). The projections remain those of
    the model. The linear map is new and starts at zero, so the outputs of the model are unchanged
    until it is trained.

    The cache of the model holds the states: left and right padding, packed documents, beam search
    and prompt lookup work as without the replacement. ``save_pretrained`` writes the replacement
    into the configuration, as for `replace_attention`.

    Args:
        model: a decoder of transformers whose MLPs have ``gate_proj``, ``up_proj`` and
            ``down_proj``, such as Llama, Qwen, Mistral and Gemma.
        recipe: recipe of a matrix without gates and params. Default: gradient steps of rate 0.3 on
            the dot product, at the end of chunks of 512 tokens.
        layers: indices, negative ones from the end; all layers when omitted.
        conv_size: number of token embeddings in the convolution.
        engine: engine, as in `recall`.

    Returns:
        The kept and new weights of each layer.

    Raises:
        RecipeError: a recipe with gates, params, features or another memory than a matrix.
        ValueError: an unknown layer, or a model without a supported MLP.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3, 4, 5]])
        >>> expected = model(ids).logits
        >>> algorithm = rc.algorithm.GradientDescent(batch_size=2, lr=0.3, update_every="batch")
        >>> recipe = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=algorithm)
        >>> report = rc.lm.replace_mlp(model, recipe, layers=[0])
        >>> torch.allclose(model(ids).logits, expected, atol=1e-5)
        True
    """
    check_decoder(model)
    if recipe is None:
        algorithm = GradientDescent(batch_size=512, lr=0.3, update_every="batch")
        recipe = Recipe(bias=DotProduct(), algorithm=algorithm)
    options = LayerOptions(conv_size=conv_size)
    report = replace_mlp_layers(model, recipe, options, layers, engine=engine)
    record_replacement(
        model,
        layers=[layer.index for layer in report.layers],
        recipe=recipe,
        options=options,
        engine=engine,
        part="mlp",
    )
    return report


def replace_mlp_layers(
    model: PreTrainedModel,
    recipe: Recipe,
    options: LayerOptions,
    layers: Iterable[int] | None,
    *,
    engine: str,
) -> ReplacementReport:
    """Replace MLPs as `replace_mlp` does, without the configuration."""
    _check_recipe(recipe, options)
    mlps = _find_mlps(model)
    if not mlps:
        raise ValueError(
            f"{type(model).__name__} has no MLP that could learn in place: a decoder layer of "
            f"transformers needs an MLP with {', '.join(PROJECTIONS)} (linear) and act_fn"
        )
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    indices = select_layers(mlps, layers, depth, part="an MLP")
    if any(isinstance(module, InPlaceMLP) for module in model.modules()):
        raise ValueError("MLPs of this model learn in place already: name all layers in one call")
    for index in indices:
        _check_formula(*mlps[index])
    context, reports = TokenContext(), []
    for rank, index in enumerate(indices):
        name, old = mlps[index]
        new = InPlaceMLP(
            old,
            recipe,
            conv_size=options.conv_size,
            depth=depth,
            rank=rank,
            context=context,
            engine=engine,
        )
        weight = old.down_proj.weight
        new.to(device=weight.device, dtype=weight.dtype).train(old.training)
        model.set_submodule(name, new)
        added = {n: x.numel() for n, x in new.named_parameters() if n.startswith("target")}
        reports.append(
            LayerReplacement(index=index, name=name, copied=PROJECTIONS, new=added, dropped=())
        )
    _watch(model, context, {name for name, _ in mlps.values()})
    if isinstance(model, GenerationMixin):
        prepare = functools.partial(prepare_cache_for_generation, model)
        model._prepare_cache_for_generation = prepare  # type: ignore[assignment]
    return ReplacementReport(layers=tuple(reports))


def _check_recipe(recipe: Recipe, options: LayerOptions) -> None:
    """Check that a memory needs units and values only."""
    needs = [*recipe.gates(), *recipe.params()]
    is_matrix = isinstance(recipe.memory, Matrix) and isinstance(recipe.features, Identity)
    if needs or not is_matrix:
        reason = f"it needs {needs[0].name}" if needs else "its keys are lifted or its map is deep"
        raise RecipeError(
            f"replace_mlp writes a matrix at hidden units, and this recipe does not fit: {reason}; "
            "use memory.Matrix() and features.Identity() with constant rates"
        )
    if not options.conv_size:
        raise RecipeError("replace_mlp(conv_size=...) must be at least 1: the token itself")


def _hidden_units(mlp: Any, x: Tensor) -> Tensor:
    """Return the hidden units σ(G x) ⊙ U x of a gated MLP."""
    return mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)


def _check_formula(name: str, mlp: Any) -> None:
    """Check on one token that an MLP is W σ(G x) ⊙ U x, without sparsity or dropout of units."""
    weight = mlp.down_proj.weight
    if weight.is_meta:
        return
    x = torch.linspace(-1, 1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    x = x[None, None]
    with torch.no_grad():
        expected = mlp.down_proj(_hidden_units(mlp, x))
        error = (mlp(x) - expected).norm()
    if error > 0.05 * expected.norm():
        raise ValueError(
            f"{name} is not a plain gated MLP: its output differs from that of down_proj(act_fn("
            "gate_proj(x)) * up_proj(x)), so it cannot learn in place"
        )


def _find_mlps(model: PreTrainedModel) -> dict[int, tuple[str, Any]]:
    """Return names and modules of the text decoder's gated MLPs by the index of their layer."""
    by_layer: dict[int, tuple[str, Any]] = {}
    decoder = set(model.get_decoder().modules()) if hasattr(model, "get_decoder") else set()
    for name, module in model.named_modules():
        if module not in decoder:
            continue
        match = re.search(r"(?:^|\.)(\d+)\.[^.]+$", name)
        is_linear = all(isinstance(getattr(module, n, None), nn.Linear) for n in PROJECTIONS)
        if match and is_linear and hasattr(module, "act_fn"):
            by_layer.setdefault(int(match[1]), (name, module))
    return dict(sorted(by_layer.items()))


def _watch(model: PreTrainedModel, context: TokenContext, names: set[str]) -> None:
    """Read the calls of the model and of its decoder layers."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            watch_calls(module, context)
    parents = sorted({name.rpartition(".")[0] for name in names})
    first = min(parents, key=lambda name: int(name.rpartition(".")[2]))
    for name in parents:
        read = functools.partial(context.read_layer, name == first)
        model.get_submodule(name).register_forward_pre_hook(read, with_kwargs=True)
