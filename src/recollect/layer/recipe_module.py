"""Modules of a recipe in a layer: projections of gates and params, initial memory, and calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from recollect.choices.memory.base import Stack
from recollect.engines.common.problem import Problem
from recollect.fields import Gate, Param
from recollect.functional.binding import bind, named
from recollect.functional.packing import CompactedBatch
from recollect.functional.recall import memorise
from recollect.layer.gates import GateProjection, stability_limit
from recollect.layer.options import LayerOptions
from recollect.layer.rotary import pairs_share
from recollect.layer.state import LayerState, MemoryInputs
from recollect.layer.ties import RULES_WITH_PROJECTION, Ties, declared_for_tie, tie_gates
from recollect.recipe.bound import BoundRecipe
from recollect.recipe.recipe import Recipe
from recollect.recipe.stability import step_limit
from recollect.state.state import State

__all__ = [
    "InitialKernelRows",
    "InitialMemory",
    "RecipeModule",
    "make_call",
    "map_fan_in",
    "run_call",
    "run_memory",
    "state_after",
]


class InitialMemory(nn.Module):
    """Learned initial weights A₀ of a memory: one ``[H, *shape]`` tensor per map.

    Entries have standard deviation scale · in^(−1/2). At scale 1 they preserve lengths: a key of
    unit length gives hidden activations of unit length, so an inner step below 1 does not
    overshoot. Features are about as long as their key, so ``in`` is K for a map that reads them.

    Args:
        num_heads: H, number of memories.
        shapes: shapes of the maps without the head, in order of application.
        scale: factor of the standard deviation, ≥ 0; 0 for a memory of zeros that is learned.
        inputs: ``in`` of each map. Default: from its shape.
        last_map_init_scale: additional factor of the last map's entries, ≥ 0. At 0 the memory
            outputs 0 before the first write.
    """

    def __init__(
        self,
        num_heads: int,
        shapes: tuple[tuple[int, ...], ...],
        scale: float = 1.0,
        inputs: tuple[int, ...] | None = None,
        last_map_init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale, self.last_map_init_scale = scale, last_map_init_scale
        self.inputs = inputs or tuple(math.prod(shape[1:]) for shape in shapes)
        self.maps = nn.ParameterList([torch.empty(num_heads, *shape) for shape in shapes])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sample new initial weights."""
        for weight, inputs in zip(self.maps, self.inputs, strict=True):
            if weight.dim() < 3:
                nn.init.zeros_(weight)  # a bias of a user's module
            else:
                nn.init.normal_(weight, std=self.scale * inputs**-0.5)
        if self.last_map_init_scale != 1.0:
            self.maps[-1].mul_(self.last_map_init_scale)

    def forward(self) -> tuple[Tensor, ...]:
        """Return the tensors, as `recall` takes them."""
        return tuple(self.maps)


def map_fan_in(recipe: Recipe, K: int, V: int) -> tuple[int, ...]:
    """Return the number of channels that each map reads; features count as their key."""
    shapes, memory = recipe.shapes(K, V), recipe.memory
    if isinstance(memory, Stack) and recipe.features.finite:
        maps = memory.maps(recipe.axes(K, V)["F"], V)
        return tuple(K + m.bias if m.reads_features else m.in_features for m in maps)
    return tuple(math.prod(shape[1:]) for shape in shapes)


class InitialKernelRows(nn.Module):
    """A₀ of a deep memory over a kernel: m anchors z_j with rows u_j, and dense maps (ATLAS 25).

    A map that reads features starts as W = Σ_j u_j φ(z_j)ᵀ, with m = ``pairs``. Rows have standard
    deviation (m out)^(−1/2), or out^(−1/2) if the memory reads a mean of rows, so that hidden
    activations have about unit length. ``length`` is that of queries, keys and anchors.
    """

    def __init__(
        self, num_heads: int, recipe: Recipe, *, K: int, V: int, pairs: int, length: float
    ) -> None:
        super().__init__()
        self.rows, self.length = len(recipe.row_widths(V)), length
        self.mean = recipe.memory.read.normalize == "sum"
        shapes = recipe.init_shapes(K, V, pairs=pairs)
        self.maps = nn.ParameterList([torch.empty(num_heads, *shape) for shape in shapes])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sample new anchors, rows and maps."""
        for index, x in enumerate(self.maps):
            std = x.shape[-1] ** -0.5
            if index == 0:
                std *= self.length
            elif index <= self.rows and not self.mean:
                std *= x.shape[-2] ** -0.5
            nn.init.normal_(x, std=std)

    def forward(self) -> tuple[Tensor, ...]:
        """Return the tensors, as `recall` takes them."""
        return tuple(self.maps)


class RecipeModule(nn.Module):
    """Base of layers of a recipe: its engine, gates, params and initial memory."""

    d_model: int  # width of the tokens
    num_kv_heads: int  # H
    head_dim: int  # K
    value_dim: int  # V
    # size of the values that the memory learns; V unless a composition replaces the values
    memory_value_dim: int
    options: LayerOptions
    depth: tuple[int, int]  # (index of this layer, number of layers)
    chunk_size: int | None  # number of tokens per chunk, as in `recall`
    memory: InitialMemory | InitialKernelRows | None
    _recipe: Recipe
    _bound: BoundRecipe

    def _build_ties(self) -> None:
        self.ties = Ties(self.options, self._recipe, heads=self.num_kv_heads, key_dim=self.head_dim)

    def _build_gates(self, skip: Sequence[str] = ()) -> None:
        """Build the projections of gates and params, except the gates to skip."""
        recipe, options = self._recipe, self.options
        declared = (*recipe.gates(), *recipe.params())
        self.paired_gates = {d.name for d in declared if pairs_share(d, recipe, options)}
        gates = [g for g in (*recipe.gates(), *tie_gates(options)) if g.name not in skip]
        self.gates, self.params = self._projections(gates), self._projections(recipe.params())
        is_limited = (
            "lr" in self.gates
            and options.gate("lr").resolve_unit("lr", recipe) == "stability_limit"
        )
        self.limit = step_limit(recipe) if is_limited else None
        tied = {tie.target for tie in options.ties}
        self.key_like_gates = [
            name for name, gate in self.gates.items() if gate.is_key and name not in tied
        ]

    def _build_initial_memory(self) -> InitialMemory | InitialKernelRows | None:
        """Build A₀; ``None`` if memories start at zero."""
        recipe, options, H = self._recipe, self.options, self.num_kv_heads
        K, V = self.head_dim, self.memory_value_dim
        memory: InitialMemory | InitialKernelRows | None = None
        if shapes := recipe.shapes(K, V) if recipe.learns_init else ():
            scale = options.memory_init_scale if recipe.needs_init() else 0.0
            inputs = map_fan_in(recipe, K, V)
            memory = InitialMemory(H, shapes, scale, inputs, options.last_map_init_scale)
        if recipe.uses_kernel_rows and recipe.needs_init():
            length = 1.0 if options.qk_norm == "l2" else math.sqrt(K)
            pairs = options.num_anchors
            memory = InitialKernelRows(H, recipe, K=K, V=V, pairs=pairs, length=length)
        return memory

    def _projections(self, declarations: Sequence[Gate] | Sequence[Param]) -> nn.ModuleDict:
        """Build a `GateProjection` for each declaration that no tie computes.

        A gate that is tied to the rate of another gate is a learned constant by default.
        """
        rules = {tie.target: tie.rule for tie in self.options.ties}
        projections: dict[str, nn.Module] = {}
        for declared in declarations:
            options = self.options.gate(declared.name)
            rule = rules.get(declared.name)
            if rule is not None and rule not in RULES_WITH_PROJECTION:
                continue
            declared = declared_for_tie(declared, rule)
            if rule == "rate":
                options = replace(options, source=options.source or "learned")
            options = replace(options, unit=options.resolve_unit(declared.name, self.recipe))
            unit = 1.0
            if options.unit == "value_rms" and isinstance(declared.init, int | float):
                unit = math.sqrt(self.memory_value_dim)
                options = options.in_value_units(unit)
                declared = replace(declared, init=unit * declared.init)
            length = {"l2": 1.0, "rms": math.sqrt(self.head_dim)}.get(self.options.qk_norm)
            if isinstance(declared, Param) and declared.beside_key and length is not None:
                declared = replace(declared, init=length / math.sqrt(self.memory_value_dim))
            sizes = self.recipe.axes(self.head_dim, self.memory_value_dim)
            if declared.name in self.paired_gates:
                sizes = {axis: max(1, size // 2) for axis, size in sizes.items()}
            projections[declared.name] = GateProjection(
                declared,
                options,
                sizes=sizes,
                d_model=self.d_model,
                heads=self.num_kv_heads,
                depth=self.depth,
                recipe=self.recipe,
                per_token=self.options.mimo,
                unit=unit,
            )
        return nn.ModuleDict(projections)

    @property
    def recipe(self) -> Recipe:
        """The regression problem; it cannot change, because gates and weights depend on it."""
        return self._recipe

    @property
    def engine(self) -> str:
        """Engine: ``"auto"``, ``"reference"`` or a name; it can be set."""
        return self._bound.requested_engine

    @engine.setter
    def engine(self, name: str) -> None:
        self._bind(name, self.precision)

    @property
    def precision(self) -> str | None:
        """Precision of the memory's matrix products, as in `recollect.recall`; it can be set."""
        return self._bound.precision

    @precision.setter
    def precision(self, name: str | None) -> None:
        self._bind(self.engine, name)

    def _bind(self, engine: str, precision: str | None) -> None:
        """Select the engine for the sizes of the memories."""
        sizes = {"H": self.num_kv_heads, "K": self.head_dim, "V": self.memory_value_dim}
        self._bound = named(bind(self.recipe, **sizes, engine=engine, precision=precision))

    @property
    def inner_gradients(self) -> bool:
        """Whether the engine may compute gradients while it runs."""
        return self._bound.uses_inner_autograd

    @property
    def initial_memory(self) -> tuple[Tensor, ...] | None:
        """A₀ of every memory, ``[H, *shape]`` per map; ``None`` if memories start at zero."""
        return None if self.memory is None else self.memory()

    def compute_gates(self, x: Tensor, shifted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the gates and params of tokens by name, before ties.

        Args:
            x: tokens ``[B, T, d_model]``.
            shifted: inputs of projections that differ from x, by name.
        """
        values: dict[str, Tensor] = {}
        for projections in (self.gates, self.params):
            for name, projection in projections.items():
                value = projection(shifted.get(name, x))
                is_paired = name in self.paired_gates
                values[name] = torch.cat([value, value], dim=-1) if is_paired else value
        return values

    def _apply_stability_limit(
        self, values: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return gates, with the rate as a multiple of its stability limit, and params.

        Gates that associations share are repeated for each of them.
        """
        if self.limit is not None:
            values = {**values, "lr": values["lr"] * stability_limit(self.limit, values)}
        params = {name: values.pop(name) for name in self._bound.params}
        if self.options.mimo:
            n = self._bound.associations_per_token
            for gate in self.recipe.gates():
                if self.recipe.per_association(gate):
                    x = values[gate.name].unsqueeze(3)
                    values[gate.name] = x.expand(*x.shape[:3], n, *x.shape[4:])
        return values, params


def run_memory(
    layer: RecipeModule,
    inputs: MemoryInputs,
    state: LayerState | None,
    *,
    batch: CompactedBatch | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Write and read the memory of a layer; return outputs ``[B, T, heads, V]`` and its state."""
    call = make_call(
        *(layer, inputs, None if state is None else state.memory),
        batch=batch,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
    )
    return run_call(call)


def run_call(call: Problem) -> tuple[Tensor, State | None]:
    """Run the memory of a layer, as one operation of a graph that is compiled."""
    if torch.compiler.is_compiling():
        # The import loads the compiler, which is slow.
        from recollect.functional.one_operation import memorise_op, use_custom_op

        if use_custom_op(call):
            return memorise_op(call)
    return memorise(call)


def make_call(
    layer: RecipeModule,
    inputs: MemoryInputs,
    state: State | None,
    *,
    batch: CompactedBatch | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> Problem:
    """Return the call of a layer's memory, with the arguments of `run_memory`."""
    bound = layer._bound
    sources = [*layer.params.parameters(), *layer.ties.parameters()] if bound.params else ()
    return Problem(
        bound=bound,
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        gates=inputs.gates,
        params=inputs.params,
        initial_memory=layer.initial_memory if state is None else None,
        state=cast(State, state),
        cu_seqlens=cu_seqlens,
        chunk_size=layer.chunk_size,
        output_final_state=output_final_state,
        lengths=None if batch is None else batch.lengths,
        source_index=None if batch is None else batch.index,
        # Gates of a decoded token come from the projections of the prompt, which were checked.
        trusted=state is not None and inputs.q.shape[1] == 1,
        param_sources=sources,
    )


def state_after(inputs: MemoryInputs, memory: State) -> LayerState:
    """Return the state of a layer after its inputs, with the state of its memory."""
    return LayerState(
        memory=memory,
        conv=inputs.conv,
        phase=inputs.final_phase,
        shift=inputs.shift,
        keys=inputs.final_keys,
    )
