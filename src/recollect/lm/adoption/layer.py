"""An adopted layer: the module and parameters of a published model, computed by a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, state_dtype
from recollect.functional.binding import bind, named
from recollect.functional.packing import CompactedBatch, compact, last_tokens, scatter
from recollect.layer.inspection import MemorySpec
from recollect.layer.recipe_module import run_call
from recollect.layer.recorded_call import RecordedCall
from recollect.layer.short_conv import short_convolution
from recollect.lm.adoption.context import CallContext, boundaries_of, padding_of
from recollect.lm.adoption.family import Family, MemoryArguments, loaded
from recollect.lm.adoption.subclass import original_class
from recollect.recipe.bound import BoundRecipe
from recollect.state.state import HostPosition, State

__all__ = ["AdoptedLayer", "Adoption"]


@dataclass(kw_only=True)
class Adoption:
    """The computation of an adopted layer."""

    family: Family
    context: CallContext
    engine: str
    argument_names: tuple[str, ...]  # arguments of the original forward method
    layer_index: int  # index of the layer in caches
    bound: BoundRecipe | None = None  # the recipe at the layer's sizes, after the first call

    def bind(self, arguments: MemoryArguments) -> BoundRecipe:
        """Return the recipe at the sizes of the arguments."""
        H, K, V = *arguments.k.shape[2:], arguments.v.shape[-1]
        bound = self.bound
        if bound is None or (bound.H, bound.K, bound.V) != (H, K, V):
            recipe = self.family.recipe
            bound = self.bound = named(bind(recipe, H=H, K=K, V=V, engine=self.engine))
        return bound


class AdoptedLayer:
    """A mixin before the class of a published model's layer."""

    adoption: Adoption

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original forward method returns, with its arguments."""
        adoption = self.adoption
        arguments = dict(zip(adoption.argument_names, args, strict=False)) | kwargs
        x: Tensor = arguments[adoption.argument_names[0]]
        B, T, _ = x.shape
        if not x.numel():
            raise ValueError(f"an adopted layer needs sequences with tokens, not {list(x.shape)}")
        family, context = adoption.family, adoption.context
        cache_layer: Any = family.memory_of_call(arguments, context, adoption.layer_index)
        context.check_num_columns(T)
        boundaries, unchanged = self._boundaries(arguments), None
        batch = self._padding(arguments.get("attention_mask"), T)
        if boundaries is not None:
            if batch is not None:
                raise ValueError("packed documents cannot have padding: remove the masked tokens")
            if cache_layer is not None:
                _, unchanged = cache_layer.load(0)
                cache_layer.refuse_documents()
                cache_layer = None
        tokens = x if batch is None else batch.gather(x)
        if boundaries is not None:
            tokens = x.reshape(1, B * T, -1)
        y, stored = self._run(tokens, cache_layer, batch, boundaries)
        y = y.view(*tokens.shape[:2], -1)
        y = y.reshape(B, T, -1) if batch is None else scatter(y, batch)
        return family.returned(self, y.to(x.dtype), unchanged if stored is None else stored)

    def _boundaries(self: Any, arguments: Mapping[str, Any]) -> Tensor | None:
        """Return the boundaries of packed documents, from the layer's or the model's arguments."""
        boundaries, context = boundaries_of(arguments), self.adoption.context
        if boundaries is not None or not context.is_active or context.boundaries is None:
            return boundaries
        if context.recomputes:
            raise ValueError(
                "boundaries of packed documents do not reach recurrent layers whose activations "
                "are recomputed: disable gradient checkpointing, or pad the documents"
            )
        return context.boundaries

    def _padding(self: Any, mask: Tensor | None, T: int) -> CompactedBatch | None:
        context = self.adoption.context
        if not context.is_active:
            return padding_of(mask, T)
        batch: CompactedBatch | None = context.padding(T)
        is_passed = mask is not None and mask.dim() == 2
        if batch is not None and not is_passed and context.recomputes:
            raise ValueError(
                "the attention mask does not reach recurrent layers whose activations are "
                "recomputed: disable gradient checkpointing, or use sequences of one length"
            )
        return batch

    def _run(
        self: Any,
        x: Tensor,
        cache_layer: Any,
        batch: CompactedBatch | None,
        boundaries: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return the output of the layer, and the memory after the last token for the cache."""
        family = self.adoption.family
        lengths = None if batch is None else batch.lengths
        u, projections = family.project(self, x)
        module = family.convolution(self)
        width = 0 if module is None else module.weight.shape[-1]
        stored_conv, stored = None, None
        if cache_layer is not None:
            stored_conv, stored = cache_layer.load(width)
        y, conv = self._convolve(u, stored_conv, lengths, boundaries)
        starts = None
        if family.needs_starts:
            is_first = None if stored is None else self.adoption.context.is_first(x.shape[1])
            if stored is None or is_first is not None:
                starts = _starts(x, boundaries, is_first)
        arguments = family.arguments(self, family.activate(self, y), projections, starts)
        recorded = None
        if cache_layer is not None and cache_layer.record_past:
            state = (  # copies: the cache overwrites its tensors
                None if stored_conv is None else stored_conv.clone(),
                None if stored is None else tuple(x.clone() for x in stored),
            )
            recorded = RecordedCall(
                num_tokens=x.shape[1],
                state=state,
                attention_mask=None if batch is None else batch.attention_mask,
                recompute=partial(self._state_at, u, arguments, *state),
            )
        y, stored = self._recall(
            *(arguments, stored, batch, boundaries), output_final_state=cache_layer is not None
        )
        if cache_layer is not None:
            cache_layer.store(conv, stored, x.shape[1], recorded)
        return family.output(self, y.to(x.dtype), arguments, projections), stored

    def _convolve(
        self: Any,
        u: Tensor,
        stored: Tensor | None = None,
        lengths: Tensor | None = None,
        boundaries: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs of the convolution, and its last inputs."""
        module = self.adoption.family.convolution(self)
        if module is None:
            return u, None
        with loaded(module):
            y, conv = short_convolution(
                *(u, module.weight.squeeze(1).t(), stored),
                lengths=lengths,
                cu_seqlens=boundaries,
                num_kept=module.weight.shape[-1],
            )
            return y if module.bias is None else y + module.bias.to(y.dtype), conv

    def memory_inputs(self: Any, x: Tensor) -> MemoryArguments:
        """Return the arguments of the memory for sequences ``[B, T, d]`` from their first token."""
        family: Family = self.adoption.family
        u, projections = family.project(self, x)
        y, _ = self._convolve(u)
        starts = _starts(x, None, None) if family.needs_starts else None
        return family.arguments(self, family.activate(self, y), projections, starts)

    @property
    def memory_spec(self: Any) -> MemorySpec:
        """Recipe, sizes and engine of the memory."""
        adoption: Adoption = self.adoption
        family, bound = adoption.family, adoption.bound
        bound = adoption.bind(family.sample(self)) if bound is None else bound
        return MemorySpec(
            recipe=family.recipe,
            d_model=family.width(self),
            num_kv_heads=bound.H,
            head_dim=bound.K,
            value_dim=bound.V,
            engine=adoption.engine,
            gate_ranges=dict.fromkeys(family.recipe.log_decays, (-torch.inf, 0.0)),
            title=f"{original_class(self).__name__} ({family.name})",
        )

    def _recall(
        self: Any,
        arguments: MemoryArguments,
        stored: tuple[Tensor, ...] | None,
        batch: CompactedBatch | None,
        boundaries: Tensor | None = None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return outputs of the memory, and its tensors for the cache after the last token."""
        family, bound, state = self.adoption.family, self.adoption.bind(arguments), None
        if stored is not None:
            if torch.is_grad_enabled():
                stored = tuple(x.clone() for x in stored)  # the cache overwrites its tensors
            dtype = state_dtype(arguments.q, arguments.k, arguments.v)
            fields = family.load_state(self, tuple(x.to(dtype) for x in stored))
            state = _state_of(bound, fields)
        call = Problem(
            bound=bound,
            q=arguments.q,
            k=arguments.k,
            v=arguments.v,
            gates=arguments.gates,
            params=arguments.params,
            state=state,  # type: ignore[arg-type]
            cu_seqlens=boundaries,
            lengths=None if batch is None else batch.lengths,
            source_index=None if batch is None else batch.index,
            output_final_state=output_final_state,
            # Gates of a decoded token come from the projections of the prompt, which were checked.
            trusted=state is not None and arguments.q.shape[1] == 1,
        )
        y, state = run_call(call)
        return y, None if state is None else family.store_state(self, state)

    def _state_at(
        self: Any,
        u: Tensor,
        arguments: MemoryArguments,
        conv: Tensor | None,  # inputs of the convolution before the call
        memory: tuple[Tensor, ...] | None,  # memory before the call
        n: int,
        mask: Tensor | None,  # [B, n], True at real columns; None if all are real
    ) -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
        """Return the inputs of the convolution and the memory after the first n columns of a call.

        ``u [B, T, C]`` and ``arguments`` are the inputs of the call, real tokens first.
        """
        batch, u = None if mask is None else compact(mask), u[:, :n]
        module, last = self.adoption.family.convolution(self), None
        if module is not None:
            width = module.weight.shape[-1]
            start = u.new_zeros(len(u), width, u.shape[2]) if conv is None else conv
            lengths = None if batch is None else batch.lengths
            last = last_tokens(torch.cat([start, u], 1), width, lengths)
        _, memory = self._recall(arguments.cut(n), memory, batch, output_final_state=True)
        return last, memory


def _state_of(bound: BoundRecipe, fields: Mapping[str, Any]) -> State:
    weights: Tensor = fields["weights"][0]
    position = torch.zeros(weights.shape[0], dtype=torch.long, device=weights.device)
    return State(
        position=position,
        sizes=(bound.H, bound.K, bound.V),
        position_on_host=HostPosition(position, 0),
        **fields,
    )


def _starts(
    x: Tensor,  # [B, T, d], real tokens first
    boundaries: Tensor | None,
    is_first: Tensor | None,  # [B], sequences without a token before these; None if all are
) -> Tensor:
    """Return which tokens are the first of their document, ``[B, T]``."""
    starts = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    if boundaries is None:
        starts[:, :1] = True if is_first is None else is_first[:, None]
    else:
        starts[0, boundaries[:-1].long()] = True
    return starts
