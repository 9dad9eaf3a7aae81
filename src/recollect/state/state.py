"""State of a recipe between calls, in one format for all engines.

Weights are those at the start of the open inner batch. The associations of that batch and of the
window are stored separately, so that any engine can continue the state of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from recollect.messages import RecipeError
from recollect.recipe.bound import BoundRecipe
from recollect.state.buffer import Buffer, update_buffer
from recollect.state.kernel_rows import KernelRows, initial_kernel_rows
from recollect.state.tree import UNSAVED, TensorTree, align_right, where_rows
from recollect.typing import Init, Weights

__all__ = ["Buffer", "HostPosition", "State", "initial_state", "join_states"]

NAMES_OF_SCHEMA_1 = {
    "dual": "kernel_rows",
    "ones": "normalizer",
    "slots": "algorithm_state",
    "written_by": "recipe_id",
}
"""Names of fields in saved states of schema 1, with their names of today."""


@dataclass(eq=False)
class HostPosition:
    """Number of tokens of every batch element, valid for one tensor of positions."""

    tensor: Tensor  # tensor of positions; for any other tensor the number is invalid
    value: int  # value of all entries of the tensor


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class State(TensorTree):
    """State of a recipe. Its batch elements are independent sequences.

    Attributes:
        weights: A, one tensor per map, ``[B, H, *shape]``; empty for nonparametric memories.
        position: number of tokens of the current document, ``[B]``.
        sizes: (H, K, V).
        algorithm_state: tensors of the algorithm by name (momentum, moments, statistics), initially
            zero.
        buffer: associations of the window and of the open inner batch, or all of them (a KV cache).
        kernel_rows: one row of weights per key, for maps that read infinitely many features.
        normalizer: the normaliser's memory of ones ``[B, H, 1, F]``.
        log_scale: running maximum m of a stabilised memory ``[B, H]``; A is stored times exp(−m).
        cache: intermediate results that spare an engine work; it is optional and not saved.
        recipe_id: `Recipe.normal_form` of the recipe that wrote the state. Only this recipe
            continues it. ``None`` fits every recipe of these shapes.
        position_on_host: number of tokens on the host, for `host_position`.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> lr = torch.full((1, 4, 2), 0.5)
        >>> y, state = rc.recall(rc.Recipe(), q, k, v, {"lr": lr})
        >>> state.position, state.weights[0].shape
        (tensor([4]), torch.Size([1, 2, 8, 8]))
        >>> loaded = rc.State.from_dict(state.to_dict())
        >>> torch.equal(loaded.weights[0], state.weights[0])
        True
    """

    weights: Weights = ()
    position: Tensor
    sizes: tuple[int, int, int]
    algorithm_state: Mapping[str, Weights] = field(default_factory=dict)
    buffer: Buffer | None = None
    kernel_rows: KernelRows | None = None
    normalizer: Tensor | None = None
    log_scale: Tensor | None = None
    cache: Mapping[str, Tensor] = field(default_factory=dict, metadata=UNSAVED)
    recipe_id: str | None = field(default=None, repr=False)
    position_on_host: HostPosition | None = field(default=None, repr=False, metadata=UNSAVED)

    @property
    def host_position(self) -> int | None:
        """Number of tokens of every batch element, if the host knows it without a synchronisation.

        ``None`` if batch elements may differ (padding, packing, a reset). If it is a number,
        ``kernel_rows`` has no empty slots.
        """
        stored = self.position_on_host
        return stored.value if stored is not None and stored.tensor is self.position else None

    def with_position(self, value: int | None) -> Self:
        """Return a copy with a position on the host.

        Args:
            value: each entry of ``position``; ``None`` if unknown.
        """
        on_host = None if value is None else HostPosition(self.position, value)
        return replace(self, position_on_host=on_host)

    def tensors(self) -> list[Tensor]:
        """Return all tensors in the order of `flatten`."""
        return self.flatten()[1]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Return a copy with other tensors, in the order of `flatten`."""
        return super().with_tensors(tensors).with_position(self.host_position)

    def replace(self, **changed: Any) -> Self:
        """Return the state one token later, with these fields changed and an empty cache.

        Args:
            changed: fields by name; ``position`` is increased by 1 by default.
        """
        position, value = changed.pop("position", None), self.host_position
        if position is None:
            position = self.position + 1
        on_host = None if value is None else HostPosition(position, value + 1)
        changed = {"cache": {}, **changed}
        return replace(self, position=position, position_on_host=on_host, **changed)

    @property
    def rows(self) -> int:
        """Batch size B."""
        return self.position.shape[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the weights or kernel rows; ``None`` if only associations are stored."""
        for x in (*self.weights, *(() if self.kernel_rows is None else self.kernel_rows.rows)):
            return x.dtype
        return None

    def reset(self, mask: Tensor, init: Init | None = None) -> Self:
        """Restart the batch elements at which ``mask`` is True.

        Args:
            mask: ``[B]``, True for batch elements that restart.
            init: initial memory, as for `recollect.recall`; zeros by default.
        """
        rows = mask.to(self.position.device)
        initial = () if init is None else (init,) if isinstance(init, Tensor) else tuple(init)
        kernel_rows = self.kernel_rows
        if kernel_rows is not None:
            num_pairs = 1 + len(kernel_rows.rows)
            kernel_rows = kernel_rows.reset(rows, initial[:num_pairs])
            initial = initial[num_pairs:]

        def clear(x: Tensor) -> Tensor:
            return where_rows(rows, torch.zeros((), dtype=x.dtype, device=x.device), x)

        cleared = replace(self, kernel_rows=None, cache={}, position_on_host=None).map(clear)
        weights = cleared.weights
        if initial:
            weights = tuple(
                where_rows(rows, a.to(w.dtype).expand_as(w), w)
                for a, w in zip(initial, self.weights, strict=True)
            )
        return replace(cleared, weights=weights, kernel_rows=kernel_rows)

    def where(self, rows: Tensor, other: State) -> State:
        """Choose between two states for each batch element.

        Args:
            rows: ``[B]``, True for this state and False for the other.
            other: a state of the same recipe and sizes; growing buffers may differ in length.
        """
        slots = _max_slots((self, other))
        a, b = (_pad_slots(state, *slots) for state in (self, other))
        pairs = zip(a.tensors(), b.tensors(), strict=True)
        chosen = [where_rows(rows, x, y.to(x.dtype)) for x, y in pairs]
        return a.with_tensors(chosen).with_position(None)

    def trim(self, n: int) -> Self:
        """Drop all but the newest n slots of associations.

        Slots are empty if batch elements restarted at different tokens.

        Args:
            n: number of slots. The caller guarantees that all others are empty.
        """

        def cut(x: Tensor) -> Tensor:
            return x[:, -n:]

        buffer, kernel_rows = self.buffer, self.kernel_rows
        if buffer is not None and buffer.k.shape[1] > n:
            buffer = buffer.map(cut)
        if kernel_rows is not None and kernel_rows.k.shape[1] > n:
            kernel_rows = kernel_rows.map(cut)
        if buffer is self.buffer and kernel_rows is self.kernel_rows:
            return self
        return replace(
            self, buffer=buffer, kernel_rows=kernel_rows, cache={}, position_on_host=None
        )

    @classmethod
    def _read(cls, flat: Mapping[str, Tensor], prefix: str) -> Self:
        for name in dict.fromkeys(name.partition(".")[0] for name in flat):
            if name in NAMES_OF_SCHEMA_1:
                raise ValueError(
                    f"this state has schema 1, in which {NAMES_OF_SCHEMA_1[name]!r} was "
                    f"{prefix + name!r}: rename its tensors as CHANGELOG.md lists, or install the "
                    "version that wrote it"
                )
        state = super()._read(flat, prefix)
        positions = set(state.position.flatten().tolist())
        is_full = state.kernel_rows is None or bool(state.kernel_rows.mask.all())
        return state.with_position(positions.pop() if len(positions) == 1 and is_full else None)


def join_states(states: Sequence[State]) -> State:
    """Concatenate states along the batch axis; growing buffers are padded on the left."""
    # Caches of different states differ in size.
    padded = [_pad_slots(state, *_max_slots(states)) for state in states]
    columns = zip(*(state.tensors() for state in padded), strict=True)
    sizes = {s.kernel_rows.k.shape[1] for s in states if s.kernel_rows is not None}
    positions = {state.host_position if len(sizes) < 2 else None for state in states}
    joined = padded[0].with_tensors([torch.cat(column) for column in columns])
    return joined.with_position(positions.pop() if len(positions) == 1 else None)


def _max_slots(states: Sequence[State]) -> tuple[int, int]:
    """Return the number of slots of the longest buffer, and of the longest kernel rows."""
    buffers = [s.buffer.k.shape[1] for s in states if s.buffer is not None]
    rows = [s.kernel_rows.k.shape[1] for s in states if s.kernel_rows is not None]
    return max(buffers, default=0), max(rows, default=0)


def _pad_slots(state: State, num_buffered: int, num_rows: int) -> State:
    """Return the state without its cache, with empty slots on the left of growing tensors."""
    buffer, kernel_rows = state.buffer, state.kernel_rows
    return replace(
        state,
        buffer=None if buffer is None else buffer.map(lambda x: align_right(x, num_buffered)),
        kernel_rows=(
            None if kernel_rows is None else kernel_rows.map(lambda x: align_right(x, num_rows))
        ),
        cache={},
    )


# -- before the first token -----------------------------------------------------------------------


def initial_state(
    bound: BoundRecipe,  # recipe with the number and size of its memories
    *,
    B: int,
    dtype: torch.dtype,  # type of all tensors except those that the algorithm keeps in float64
    device: torch.device,  # device of all tensors
    init: Init | None = None,  # A₀, as for `recollect.recall`
) -> State:
    """Return the state before the first token, with A₀ = ``init`` or zeros.

    Raises:
        RecipeError: a deep memory without ``init``, or one of the wrong shapes.
    """
    recipe, H, K, V = bound.recipe, bound.H, bound.K, bound.V
    if init is not None and recipe.nonparametric:
        k, v, rates = initial_associations(bound, init, B=B, dtype=dtype)
        position = torch.full((B,), k.shape[1], device=device)
        buffer = update_buffer(recipe, None, k=k, v=v, rates=rates, lengths=None, position=position)
        state = State(position=position, sizes=(H, K, V), buffer=buffer, recipe_id=bound.recipe_id)
        return state.with_position(k.shape[1])
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    pairs: tuple[Tensor, ...] = ()
    if init is None:
        if bound.needs_init:
            shapes = (
                recipe.init_shapes(K, V, pairs=1)
                if recipe.uses_kernel_rows
                else bound.weight_shapes
            )
            expected = ", ".join(str([H, *shape]) for shape in shapes)
            raise RecipeError(
                f"{recipe.memory.title} needs initial_memory, because a deep memory of zeros never "
                f"learns: pass one tensor per map, of shapes {expected}"
            )
        weights = tuple(torch.zeros(B, H, *shape, **options) for shape in bound.weight_shapes)
    else:
        pairs, maps = _split_init(bound, init, B=B)
        weights = tuple(
            a.to(dtype=dtype, device=device).expand(B, H, *shape)
            for a, shape in zip(maps, bound.weight_shapes, strict=True)
        )
    slots: dict[str, Weights] = {}
    if weights or not recipe.uses_kernel_rows:
        for name, (shapes, is_wide) in bound.slot_shapes.items():
            slot_dtype = torch.float64 if is_wide else dtype
            slots[name] = tuple(
                torch.zeros(B, H, *shape, dtype=slot_dtype, device=device) for shape in shapes
            )
    kernel_rows = None
    if recipe.uses_kernel_rows:
        kernel_rows = initial_kernel_rows(recipe, pairs, B=B, H=H, K=K, V=V, **options)
    state = State(
        sizes=(H, K, V),
        recipe_id=bound.recipe_id,
        weights=weights,
        algorithm_state=slots,
        kernel_rows=kernel_rows,
        position=torch.zeros(B, dtype=torch.long, device=device),
        normalizer=torch.zeros(B, H, 1, bound.num_features, **options)
        if bound.has_normalizer
        else None,
        log_scale=torch.zeros(B, H, **options) if bound.is_stabilized else None,
    )
    return state.with_position(0)


def _split_init(
    bound: BoundRecipe, init: Init, *, B: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the pairs of kernel rows and the weights of an initial memory, after checks."""
    recipe, H, num_maps = bound.recipe, bound.H, len(bound.weight_shapes)
    tensors = (init,) if isinstance(init, Tensor) else tuple(init)
    num_pairs = 1 + len(recipe.row_widths(bound.V)) if recipe.uses_kernel_rows else 0
    has_no_pairs = num_pairs > 0 and len(tensors) == 0 and num_maps == 0
    if len(tensors) != num_pairs + num_maps and not has_no_pairs:
        pairs = f"{num_pairs} of its pairs and " if num_pairs else ""
        raise RecipeError(
            f"{recipe.memory.title} takes {pairs}{num_maps} map(s), and initial_memory has "
            f"{len(tensors)} tensor(s)"
        )
    for a, shape in zip(tensors[num_pairs:], bound.weight_shapes, strict=True):
        if tuple(a.shape) not in ((H, *shape), (B, H, *shape)):
            raise RecipeError(
                f"initial_memory of {recipe.memory.title} must have shape {[H, *shape]} (or one "
                f"per row, {[B, H, *shape]}), not {list(a.shape)}"
            )
    return tensors[:num_pairs], tensors[num_pairs:]


def initial_associations(
    bound: BoundRecipe, init: Init, *, B: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the keys, values and gates of the initial associations, ``[B, m, H, ...]``.

    ``init`` has keys ``[H, m, K]``, values ``[H, m, V]``, then the per-association gates of the
    recipe in order, ``[H, m, ...]``. Step gates get their initial values, decays 1.
    """
    recipe, H, K, V = bound.recipe, bound.H, bound.K, bound.V
    tensors = (init,) if isinstance(init, Tensor) else tuple(init)
    gates = [gate for gate in recipe.gates() if gate.per_association]
    names = ["keys", "values", *(gate.name for gate in gates)]
    if len(tensors) != len(names):
        raise RecipeError(
            f"initial_memory of {recipe.memory.title} is a tuple of {', '.join(names)}, and has "
            f"{len(tensors)} tensor(s)"
        )
    sizes = recipe.axes(K, V)
    axes = [(K,), (V,), *(tuple(sizes[a] for a in gate.axes) for gate in gates)]
    m = tensors[0].shape[1] if tensors[0].dim() > 1 else 0
    for name, x, shape in zip(names, tensors, axes, strict=True):
        if tuple(x.shape) != (H, m, *shape):
            raise RecipeError(
                f"initial_memory of {recipe.memory.title}: {name} must have shape "
                f"{[H, m, *shape]}, not {list(x.shape)}"
            )
    by_token = [x.transpose(0, 1).expand(B, *x.transpose(0, 1).shape) for x in tensors]
    rates = dict(zip(names[2:], by_token[2:], strict=True))
    initial = {**recipe.constants(), **{gate.name: gate.init for gate in recipe.gates()}}
    learned_quantities = recipe.learned_quantities
    for param in recipe.params():
        if param.name in learned_quantities:
            log = param.is_log
            start = param.init if isinstance(param.init, int | float) else 1.0
            initial[f"log_{param.name}" if log else param.name] = 0.0 if log else float(start)
    shapes = {gate.name: tuple(sizes[a] for a in gate.axes) for gate in recipe.gates()}
    for name, value in initial.items():
        if name not in rates:
            value = 0.0 if name in recipe.log_decays else value
            shape = (B, m, H, *shapes.get(name, ()))
            rates[name] = torch.full(shape, value, dtype=dtype, device=tensors[0].device)
    return by_token[0], by_token[1], {name: x.to(dtype) for name, x in rates.items()}
