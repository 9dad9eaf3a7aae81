"""Families of the recurrent layers of transformers whose state is not in a layer of the cache.

Adoption moves the state of RecurrentGemma, which its modules store, to the model's cache. The
caches of MiniMax and xLSTM get a list of layers, as other caches have. These layers read and write
the tensors of the cache in its own layout.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from recollect import algorithm, bias, memory, retention
from recollect.lm.adoption.builtin import has_attributes, split_heads, wide
from recollect.lm.adoption.cache import CountingCache, LayerMemory
from recollect.lm.adoption.context import CallContext
from recollect.lm.adoption.family import Family, MemoryArguments, register_family
from recollect.lm.adoption.subclass import specialize
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.zoo import get

__all__: list[str] = []


class RecurrentGemma(Family):
    """Recurrent blocks of RecurrentGemma (RG-LRU): one weight per channel."""

    name = "rg-lru"
    recipe = Recipe(
        memory=memory.Vector(),
        bias=bias.DotProduct(),
        retention=retention.Decay(per="value"),
        algorithm=algorithm.GradientDescent(lr=1.0),
    )
    needs_starts = True

    def matches(self, module: nn.Module) -> bool:
        return has_attributes(module, "conv_1d", "rg_lru", "linear_x", "linear_y", "linear_out")

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return module.linear_x(x), {"z": module.act_fn(module.linear_y(x))}

    def convolution(self, module: Any) -> nn.Conv1d:
        return module.conv_1d  # type: ignore[no-any-return]

    def activate(self, module: Any, u: Tensor) -> Tensor:
        return u

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        lru = module.rg_lru
        blocks = split_heads(u, lru.num_attention_heads)

        def gate(weight: Tensor, bias: Tensor) -> Tensor:
            return (torch.einsum("bthi,hij->bthj", blocks, weight) + bias).sigmoid().flatten(2)

        recurrence = wide(gate(lru.recurrent_gate_weight, lru.recurrent_gate_bias))
        log_decay = -8.0 * recurrence * functional.softplus(wide(lru.recurrent_param))
        # Its derivative is bounded, so that gradients in half precision are finite.
        sqrt = sys.modules[type(lru).__module__].SqrtBoundDerivative.apply
        scale = sqrt(1.0 - (2.0 * log_decay).exp())
        if starts is not None:
            scale = torch.where(starts.unsqueeze(-1), 1.0, scale)
        v = wide(u * gate(lru.input_gate_weight, lru.input_gate_bias)) * scale
        ones = v.new_ones(()).expand(*v.shape[:2], 1, v.shape[2])
        gates = {"log_decay": log_decay.unsqueeze(2)}
        return MemoryArguments(q=ones, k=ones, v=v.unsqueeze(2), gates=gates)

    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        return module.linear_out(y.flatten(2) * projections["z"])  # type: ignore[no-any-return]

    def returned(self, module: Any, y: Tensor, stored: tuple[Tensor, ...] | None) -> Any:
        return y, None

    def load_state(self, module: Any, stored: tuple[Tensor, ...]) -> dict[str, Any]:
        return {"weights": (stored[0].unsqueeze(1),)}  # [B, 1, V]

    def store_state(self, module: Any, state: State) -> tuple[Tensor, ...]:
        return (state.weights[0].squeeze(1),)

    def cache_layer(self, cache: Any, index: int) -> LayerMemory:
        layers = cache.layers
        if index < len(layers) and not getattr(layers[index], "is_initialized", True):
            # Transformers 5.17 makes layers of keys and values, which remain empty.
            record_past = getattr(layers[index], "record_past", False)
            layers[index] = LinearAttentionLayer()
            layers[index].record_past = record_past
        layer: Any = super().cache_layer(cache, index)
        if not layer.has_previous_state[0] and index == 0 and cache.get_seq_length():
            raise ValueError(
                "the cache has tokens of the original model, whose recurrent layers store their "
                "state in the modules: process these tokens again, with an empty cache"
            )
        return layer


class OwnLayer(LayerMemory, LinearAttentionLayer):
    """The memory of an adopted layer in a cache of another format, which has some columns."""

    def __init__(self, cache: Any, index: int, num_columns: int) -> None:
        super().__init__()
        self.cache, self.index, self.num_columns = cache, index, num_columns
        self.has_previous_state[0] = num_columns != 0

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """Tensors of the memory by number, as in other layers of caches."""
        return dict(enumerate(self._read_memory() or (None,)))

    @recurrent_states.setter
    def recurrent_states(self, value: Any) -> None:  # type: ignore[override]
        """Do nothing: the cache stores the tensors."""

    @abstractmethod
    def _read_memory(self) -> tuple[Tensor, ...] | None: ...

    @abstractmethod
    def _write_memory(self, memory: tuple[Tensor, ...]) -> None: ...

    @abstractmethod
    def _is_own(self) -> bool: ...

    def _current_version(self) -> None:
        """Return ``None``: `_is_own` does not compare versions."""

    def load(self, num_kept: int) -> tuple[None, tuple[Tensor, ...] | None]:
        """Return the stored memory; there is no convolution."""
        if self._has_documents:
            self.refuse_documents()
        return None, self._read_memory()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        stored = self._read_memory()
        if stored is not None:
            self._write_memory(tuple(x.index_select(0, beam_idx.to(x.device)) for x in stored))
        self._calls = []
        self._mark()

    def reset(self) -> None:
        stored = self._read_memory()
        if stored is not None:
            self._write_memory(tuple(torch.zeros_like(x) for x in stored))
        self._calls, self.num_columns, self._has_documents = [], 0, False
        self._mark()


# -- MiniMax --------------------------------------------------------------------------------------


class MiniMaxLayer(OwnLayer):
    """A memory in ``MiniMaxCache.linear_cache``."""

    _latest: Tensor | None = None

    def _read_memory(self) -> tuple[Tensor, ...] | None:
        tensors = self.cache.linear_cache
        stored = tensors[self.index] if self.index < len(tensors) else None
        return (stored,) if isinstance(stored, Tensor) else None

    def _write_memory(self, memory: tuple[Tensor, ...]) -> None:
        self.cache.set_linear_cache(self.index, memory[0])

    def _mark(self) -> None:
        self._latest = self.recurrent_states[0]

    def _is_own(self) -> bool:
        return self._latest is self.recurrent_states[0]  # the original writes another tensor


class MiniMaxSlots(CountingCache):
    """A mixin for ``MiniMaxCache``, whose layers include `MiniMaxLayer`."""

    is_croppable = Cache.is_croppable


class MiniMax(Family):
    """Lightning attention of MiniMax: linear attention with one constant decay per head."""

    name = "lightning attention"
    recipe = Recipe(
        bias=bias.DotProduct(),
        retention=retention.Decay(),
        algorithm=algorithm.GradientDescent(lr=1.0),
    )
    keys_first = True
    has_own_cache = True

    def matches(self, module: nn.Module) -> bool:
        return has_attributes(module, "qkv_proj", "out_proj", "output_gate", "slope_rate", "norm")

    def width(self, module: Any) -> int:
        return int(module.qkv_proj.in_features)

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return module.qkv_proj(x), {"z": module.output_gate(x)}

    def convolution(self, module: Any) -> None:
        return None

    def activate(self, module: Any, u: Tensor) -> Tensor:
        return module.act_fn(u)  # type: ignore[no-any-return]

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        q, k, v = wide(split_heads(u, module.num_attention_heads)).chunk(3, -1)
        log_decay = -wide(module.slope_rate).flatten().expand(v.shape[:3])
        return MemoryArguments(q=q, k=k, v=v, gates={"log_decay": log_decay})

    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        y = module.norm(y.flatten(2))
        return module.out_proj(projections["z"].sigmoid() * y)  # type: ignore[no-any-return]

    def returned(self, module: Any, y: Tensor, stored: tuple[Tensor, ...] | None) -> Any:
        return y, None if stored is None else stored[0]

    def store_state(self, module: Any, state: State) -> tuple[Tensor, ...]:
        (weights,) = super().store_state(module, state)
        return (weights.to(module.norm.weight.dtype),)

    def cache_layer(self, cache: Any, index: int) -> LayerMemory:
        if not hasattr(cache, "linear_cache"):
            name = type(cache).__name__
            raise ValueError(f"MiniMax needs a cache of its class MiniMaxCache, not a {name}")
        layers = cache.layers
        while len(layers) <= index:
            layers.append(DynamicLayer())
        if not isinstance(layers[index], MiniMaxLayer):
            specialize(cache, MiniMaxSlots)
            layers[index] = MiniMaxLayer(cache, index, 0)
            layers[index].has_previous_state[0] = layers[index].load(0)[1] is not None
        return layers[index]  # type: ignore[no-any-return]

    def new_cache(self, model: Any, batch_size: int) -> Any:
        modeling = sys.modules[type(model.base_model).__module__]
        return modeling.MiniMaxCache()


# -- xLSTM ----------------------------------------------------------------------------------------


class XLSTMLayer(OwnLayer):
    """A memory in ``xLSTMCache.rnn_state``: C, n and m."""

    def _read_memory(self) -> tuple[Tensor, ...]:
        return tuple(self.cache.rnn_state[self.index])

    def _write_memory(self, memory: tuple[Tensor, ...]) -> None:
        pairs = zip(memory, self._read_memory(), strict=True)
        self.cache.rnn_state[self.index] = tuple(x.to(old.dtype) for x, old in pairs)

    def _is_own(self) -> bool:
        return True  # `XLSTMSlots.crop` compares lengths: the model itself writes after every call


class XLSTMSlots(Cache):
    """A mixin for ``xLSTMCache``, which gets layers of class `XLSTMLayer`."""

    layers: list[XLSTMLayer]
    seqlen_offset: Tensor

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.seqlen_offset)

    def crop(self, tokens_to_remove: int) -> None:
        length = self.get_seq_length()
        for layer in self.layers:
            if layer.num_columns != length:  # another model wrote
                layer.disown()
        super().crop(tokens_to_remove)
        self.seqlen_offset -= abs(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.seqlen_offset.zero_()


MAX_EPS = 1e-5
"""Largest ``config.eps`` of an adopted xLSTM."""


class XLSTM(Family):
    """Layers of xLSTM (mLSTM).

    The model adds ``config.eps`` to the stabilised denominator, and the recipe does not. The norm
    of the output removes the factor between the two results, up to its own eps.
    """

    name = "mlstm"
    recipe = get("mlstm").recipe
    has_own_cache = True

    def matches(self, module: nn.Module) -> bool:
        has_gates = hasattr(module, "igate_preact") or hasattr(module, "ifgate_preact")
        names = ("multihead_norm", "out_proj", "qk_dim", "v_dim")
        config: Any = getattr(module, "config", None)
        return has_gates and has_attributes(module, *names) and config.eps <= MAX_EPS

    def width(self, module: Any) -> int:
        return int(module.out_proj.out_features)

    def project(self, module: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if hasattr(module, "qkv_opreact"):
            sizes = [2 * module.qk_dim + module.v_dim, module.v_dim]
            u, z = module.qkv_opreact(x).split(sizes, -1)
            gates = module.ifgate_preact(x)
        else:
            u = torch.cat([module.q(x), module.k(x), module.v(x)], -1)
            z = module.ogate_preact(x)
            gates = torch.cat([module.igate_preact(x), module.fgate_preact(x)], -1)
        return u, {"z": z, "gates": gates}

    def convolution(self, module: Any) -> None:
        return None

    def activate(self, module: Any, u: Tensor) -> Tensor:
        return u

    def arguments(
        self, module: Any, u: Tensor, projections: dict[str, Tensor], starts: Tensor | None
    ) -> MemoryArguments:
        parts = wide(u).split([module.qk_dim, module.qk_dim, module.v_dim], -1)
        q, k, v = (split_heads(x, module.config.num_heads) for x in parts)
        gates, cap = wide(projections["gates"]), module.config.gate_soft_cap
        log_lr, forget = (cap * (gates / cap).tanh() if cap else gates).chunk(2, -1)
        return MemoryArguments(
            q=q * q.shape[-1] ** -0.5,
            k=k,
            v=v,
            gates={"log_lr": log_lr, "log_decay": functional.logsigmoid(forget)},
        )

    def output(
        self, module: Any, y: Tensor, arguments: MemoryArguments, projections: dict[str, Tensor]
    ) -> Tensor:
        z = projections["z"].sigmoid()
        return module.out_proj(z * module.multihead_norm(y))  # type: ignore[no-any-return]

    def returned(self, module: Any, y: Tensor, stored: tuple[Tensor, ...] | None) -> Any:
        return y, stored

    def load_state(self, module: Any, stored: tuple[Tensor, ...]) -> dict[str, Any]:
        C, n, m = stored
        return {"weights": (C.mT,), "normalizer": n.unsqueeze(-2), "log_scale": m.squeeze(-1)}

    def store_state(self, module: Any, state: State) -> tuple[Tensor, ...]:
        assert state.normalizer is not None
        assert state.log_scale is not None
        return state.weights[0].mT, state.normalizer.squeeze(-2), state.log_scale.unsqueeze(-1)

    def memory_of_call(
        self, arguments: Mapping[str, Any], context: CallContext, index: int
    ) -> LayerMemory | None:
        stored = arguments.get("state")
        if stored is None:
            return None
        if context.cache is None:  # the model makes its cache during this call
            return XLSTMLayer(SimpleNamespace(rnn_state={index: stored}), index, 0)
        return self.cache_layer(context.cache, index)

    def cache_layer(self, cache: Any, index: int) -> LayerMemory:
        if not isinstance(cache, XLSTMSlots):
            n = int(cache.seqlen_offset)
            cache.layers = [XLSTMLayer(cache, i, n) for i in cache.rnn_state]
            specialize(cache, XLSTMSlots)
        return cache.layers[index]  # type: ignore[no-any-return]

    def new_cache(self, model: Any, batch_size: int) -> Any:
        modeling = sys.modules[type(model.base_model).__module__]
        options = {"device": model.device, "dtype": model.dtype}
        return modeling.xLSTMCache(model.config, batch_size, **options)


for _family in (RecurrentGemma(), MiniMax(), XLSTM()):
    register_family(_family)
