"""What a layer makes for a recipe: gates, params and an initial memory, learned outside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from recollect.choices.fields import Gate, Param
from recollect.choices.memory.base import Stack
from recollect.layer.gates import GateProjection, limit_of_rate
from recollect.layer.options import LayerOptions
from recollect.layer.rotation import shares_angle
from recollect.layer.state import Associations, LayerState
from recollect.layer.ties import OWNED, Ties
from recollect.recall.bound import Bound, bind, named
from recollect.recall.call import Call
from recollect.recall.packing import CompactedBatch
from recollect.recall.recall import memorise
from recollect.recipe.limit import step_limit
from recollect.recipe.recipe import Recipe
from recollect.state.state import State

__all__ = ["InitialMemory", "InitialPairs", "RecipeNumbers", "read_widths"]


class InitialMemory(nn.Module):
    """A₀ of a deep memory, learned: one ``[H, *shape]`` tensor per map.

    Entries of deviation scale · in^(−1/2), at scale 1, keep the lengths of what they multiply: a
    key of unit length meets hidden activations of unit length, so an inner step of size below 1
    does not overshoot. Features are about as long as the key that they lift, however many they are:
    for a map that reads them ``in`` is K.

    Args:
        heads: H, memories.
        shapes: of the maps, without the head, in order of application.
        scale: of the entries, ≥ 0; 0 where a memory of zeros learns.
        inputs: of each map, ``in``; what its shape says when omitted.
        last_map: a factor more of the last map's entries, ≥ 0. At 0 the memory says nothing before
            something is written, and one write is not lost among what was drawn.
    """

    def __init__(
        self,
        heads: int,
        shapes: tuple[tuple[int, ...], ...],
        scale: float = 1.0,
        inputs: tuple[int, ...] | None = None,
        last_map: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale, self.last_map = scale, last_map
        self.inputs = inputs or tuple(math.prod(shape[1:]) for shape in shapes)
        self.maps = nn.ParameterList([torch.empty(heads, *shape) for shape in shapes])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        for weight, inputs in zip(self.maps, self.inputs, strict=True):
            if weight.dim() < 3:
                nn.init.zeros_(weight)  # a bias of a user's own module
            else:
                nn.init.normal_(weight, std=self.scale * inputs**-0.5)
        if self.last_map != 1.0:
            self.maps[-1].mul_(self.last_map)

    def forward(self) -> tuple[Tensor, ...]:
        """The tensors, as `recall` takes them."""
        return tuple(self.maps)


def read_widths(recipe: Recipe, K: int, V: int) -> tuple[int, ...]:
    """Of each map of a finite memory: how many channels it reads, features counted as their key.

    Args:
        recipe: whose memory it is.
        K: key channels.
        V: value channels.
    """
    shapes, memory = recipe.shapes(K, V), recipe.memory
    inputs = [math.prod(shape[1:]) for shape in shapes]
    if isinstance(memory, Stack) and recipe.features.finite:
        maps = memory.maps(recipe.axes(K, V)["F"], V)
        inputs = [K + one.bias if one.first else one.inp for one in maps]
    return tuple(inputs)


class InitialPairs(nn.Module):
    """A₀ of a deep memory over a kernel: m anchors z_j with rows u_j, and dense maps (ATLAS 25).

    A map that reads features starts as W = Σ_j u_j φ(z_j)ᵀ. Rows have deviation (m out)^(−1/2), or
    out^(−1/2) where what is read is a mean of rows, so that hidden activations have about unit
    length; anchors have the length that queries and keys have.

    Args:
        heads: H, memories.
        recipe: whose memory it is.
        K: key channels.
        V: value channels.
        pairs: m, anchors.
        length: ‖q‖ and ‖k‖, which anchors have too.
    """

    def __init__(
        self, heads: int, recipe: Recipe, *, K: int, V: int, pairs: int, length: float
    ) -> None:
        super().__init__()
        self.rows, self.length = len(recipe.row_widths(V)), length
        self.mean = recipe.memory.read.normalize == "sum"
        shapes = recipe.init_shapes(K, V, pairs=pairs)
        self.maps = nn.ParameterList([torch.empty(heads, *shape) for shape in shapes])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        for index, x in enumerate(self.maps):
            size = x.shape[-1] ** -0.5
            if index == 0:
                size *= self.length
            elif index <= self.rows and not self.mean:
                size *= x.shape[-2] ** -0.5
            nn.init.normal_(x, std=size)

    def forward(self) -> tuple[Tensor, ...]:
        """The tensors, as `recall` takes them."""
        return tuple(self.maps)


class RecipeNumbers(nn.Module):
    """What belongs to a recipe in a layer, whatever makes its queries, keys and values.

    Attributes:
        d_model: width of the tokens.
        kv_heads, head_dim, value_dim: H, K and V.
        options: what is not regression.
        depth: (index of this layer, number of layers).
        chunk_size: an execution detail, as in `recall`.
    """

    d_model: int
    kv_heads: int
    head_dim: int
    value_dim: int
    options: LayerOptions
    depth: tuple[int, int]
    chunk_size: int | None
    memory: InitialMemory | InitialPairs | None
    _recipe: Recipe
    _bound: Bound

    def _make_ties(self) -> None:
        self.ties = Ties(self.options, heads=self.kv_heads, key_dim=self.head_dim)

    def _make_numbers(self, without: Sequence[str] = ()) -> None:
        """Projections of gates and params, of a layer whose sizes and options stand.

        Args:
            without: gates that come from elsewhere.
        """
        recipe, options = self._recipe, self.options
        declared = (*recipe.gates(), *recipe.params())
        self.shared_angles = {d.name for d in declared if shares_angle(d, recipe, options)}
        made = [gate for gate in recipe.gates() if gate.name not in without]
        self.gates, self.params = self._numbers(made), self._numbers(recipe.params())
        share = "lr" in self.gates and options.gate("lr").unit_of("lr", recipe) == "share"
        self.limit = step_limit(recipe) if share else None
        self.key_gates = [name for name, number in self.gates.items() if number.key]

    def _initial_memory(self) -> InitialMemory | InitialPairs | None:
        """A₀ where memories do not start at zero."""
        recipe, options = self._recipe, self.options
        shapes = recipe.shapes(self.head_dim, self.value_dim) if recipe.learns_init else ()
        memory: InitialMemory | InitialPairs | None = None
        if shapes:
            inputs = read_widths(recipe, self.head_dim, self.value_dim)
            scale = options.memory_scale if recipe.needs_init() else 0.0
            memory = InitialMemory(self.kv_heads, shapes, scale, inputs, options.last_map)
        if recipe.dual and recipe.needs_init():
            memory = InitialPairs(
                self.kv_heads,
                recipe,
                K=self.head_dim,
                V=self.value_dim,
                pairs=options.anchors,
                length=1.0 if options.qk_norm == "l2" else math.sqrt(self.head_dim),
            )
        return memory

    def _numbers(self, declarations: Sequence[Gate] | Sequence[Param]) -> nn.ModuleDict:
        """One `GateProjection` for each, by name, but for those that a tie makes of another.

        A gate tied to another's rate is learned, and its tie makes it move.
        """
        rules = {tie.target: tie.rule for tie in self.options.ties}
        made: dict[str, nn.Module] = {}
        for declared in declarations:
            options = self.options.gate(declared.name)
            rule = rules.get(declared.name, OWNED[0])
            if rule not in OWNED:
                continue
            if declared.name in rules and rule == "rate":
                options = replace(options, source="learned")
            options = replace(options, unit=options.unit_of(declared.name, self.recipe))
            unit = 1.0
            if options.unit == "rms" and isinstance(declared.init, int | float):
                unit = math.sqrt(self.value_dim)
                options = options.lengths(unit)
                declared = replace(declared, init=unit * declared.init)
            length = {"l2": 1.0, "rms": math.sqrt(self.head_dim)}.get(self.options.qk_norm)
            beside = isinstance(declared, Param) and declared.beside_key
            if beside and length is not None:
                declared = replace(declared, init=length / math.sqrt(self.value_dim))
            sizes = self.recipe.axes(self.head_dim, self.value_dim)
            if declared.name in self.shared_angles:
                sizes = {axis: max(1, size // 2) for axis, size in sizes.items()}
            made[declared.name] = GateProjection(
                declared,
                options,
                sizes=sizes,
                d_model=self.d_model,
                heads=self.kv_heads,
                depth=self.depth,
                recipe=self.recipe,
                unit=unit,
            )
        return nn.ModuleDict(made)

    @property
    def recipe(self) -> Recipe:
        """The regression problem; gates and weights are made for it, so it cannot be changed."""
        return self._recipe

    @property
    def method(self) -> str:
        """Engine: ``"auto"``, ``"reference"`` or a name; set it to run the same layer otherwise."""
        return self._bound.method

    @method.setter
    def method(self, name: str) -> None:
        self._bind(name, self.precision)

    @property
    def precision(self) -> str | None:
        """What products of the memory multiply, as `recollect.recall` takes it; it may be set."""
        return self._bound.precision

    @precision.setter
    def precision(self, name: str | None) -> None:
        self._bind(self.method, name)

    def _bind(self, method: str, precision: str | None) -> None:
        """The engine, and the precision of its products, for the memories that there are."""
        sizes = {"H": self.kv_heads, "K": self.head_dim, "V": self.value_dim}
        self._bound = named(bind(self.recipe, **sizes, method=method, precision=precision))

    @property
    def inner_gradients(self) -> bool:
        """Whether the engine may take gradients of its own while it runs."""
        return self._bound.inner_gradients

    @property
    def initial_memory(self) -> tuple[Tensor, ...] | None:
        """A₀ of every memory, ``[H, *shape]`` per map; ``None`` where memories start at zero."""
        return None if self.memory is None else self.memory()

    def values(self, x: Tensor, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every number that the layer makes, before ties.

        Args:
            x: tokens ``[B, T, d_model]``.
            seen: what a projection sees in place of x, by name.
        """
        values: dict[str, Tensor] = {}
        for numbers in (self.gates, self.params):
            for name, number in numbers.items():
                value = number(seen.get(name, x))
                paired = name in self.shared_angles
                values[name] = torch.cat([value, value], dim=-1) if paired else value
        return values

    def _limited(self, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gates, with a rate that is stated as a share of its limit; and params."""
        if self.limit is not None:
            values = {**values, "lr": values["lr"] * limit_of_rate(self.limit, values)}
        params = {name: values.pop(name) for name in self._bound.sized.params}
        return values, params

    def learn(
        self,
        inputs: Associations,
        state: LayerState | None,
        *,
        batch: CompactedBatch | None = None,
        borders: Tensor | None = None,
        output_state: bool = True,
    ) -> tuple[Tensor, State | None]:
        """What the memory says of each token once it has learned it, ``[B, T, heads, V]``.

        Args:
            inputs: what is learned and asked.
            state: before the first token.
            batch: where padded rows, whose tokens these are, had theirs.
            borders: ``[N + 1]`` borders of N documents packed in one row.
            output_state: False returns ``None`` in place of the state.
        """
        before = None if state is None else state.memory
        call = self.call(inputs, before, batch=batch, borders=borders, output_state=output_state)
        if torch.compiler.is_compiling():
            # Loads the compiler, which takes longer than all else that is imported.
            from recollect.recall.one_operation import memorise_as_one, suits

            if suits(call):
                return memorise_as_one(call)
        return memorise(call)

    def call(
        self,
        inputs: Associations,
        state: State | None,
        *,
        batch: CompactedBatch | None = None,
        borders: Tensor | None = None,
        output_state: bool = True,
    ) -> Call:
        """What `learn` asks of the memory.

        Args:
            inputs: what is learned and asked.
            state: of the memory before the first token.
            batch: where padded rows, whose tokens these are, had theirs.
            borders: ``[N + 1]`` borders of N documents packed in one row.
            output_state: whether a state is wanted.
        """
        return Call(
            bound=self._bound,
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            gates=inputs.gates,
            params=inputs.params,
            init=self.initial_memory if state is None else None,
            state=state,
            cu_seqlens=borders,
            chunk_size=self.chunk_size,
            output_state=output_state,
            lengths=None if batch is None else batch.lengths,
            places=None if batch is None else batch.index,
            # A decoded token's numbers come from where the prompt's did, which were checked.
            sure=state is not None and inputs.q.shape[1] == 1,
            sources=self._sources(),
        )

    def _sources(self) -> Sequence[Tensor]:
        """What the recipe's params are made of."""
        if not self._bound.sized.params:
            return ()
        return [*self.params.parameters(), *self.ties.parameters()]
