"""State: everything a recipe remembers between calls, the same for every engine.

Weights are those at the *start* of the open inner batch; the raw associations of that batch and of
the window stand beside them in fixed slots, so any engine continues any other's state.
"""

# More than 400 lines: what a state is and all that is done with one, joined from two files.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.recipe.sized import SizedRecipe
from recollect.state.buffer import Buffer, roll
from recollect.state.flat import check_names, numbered, read_text, text_tensor
from recollect.state.initial_associations import initial_associations
from recollect.state.kernel_rows import KernelRows, initial_rows
from recollect.state.moving import brief, mover
from recollect.typing import Init, Weights

__all__ = ["Buffer", "State", "initial_state", "join_states"]


@dataclass(frozen=True, kw_only=True)
class State:
    """What a recipe remembers; rows are independent sequences.

    Attributes:
        weights: A, one tensor per map, ``[B, H, *shape]``; empty for nonparametric memories.
        slots: the algorithm's own state by name (momentum, moments, statistics), zeros at the
            start.
        position: tokens seen of the current document, ``[B]``.
        buffer: associations of the window and of the open inner batch, or all of them (a KV cache).
        dual: of maps that read infinitely many features, their rows by key.
        ones: the normaliser's memory of ones ``[B, H, 1, F]``.
        cache: what the last engine may spare the next one; each can do without, it is not saved.
        log_scale: running maximum m of a stabilised memory ``[B, H]``; A is stored times exp(−m).
        sizes: (H, K, V).
        written_by: `Recipe.normal_form` of the recipe that wrote it, which alone continues it;
            ``None`` in one that was made by hand, or saved before this was written down, fits every
            recipe of its shapes.
        known: the position that a number was stated for, and the number (`seen`).

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> lr = torch.full((1, 4, 2), 0.5)
        >>> y, state = rc.recall(rc.Recipe(), q, k, v, {"lr": lr})
        >>> state.position, state.weights[0].shape
        (tensor([4]), torch.Size([1, 2, 8, 8]))
        >>> again = rc.State.from_dict(state.to_dict())
        >>> torch.equal(again.weights[0], state.weights[0])
        True
    """

    weights: Weights
    position: Tensor
    sizes: tuple[int, int, int]
    slots: Mapping[str, Weights] = field(default_factory=dict)
    buffer: Buffer | None = None
    dual: KernelRows | None = None
    ones: Tensor | None = None
    log_scale: Tensor | None = None
    cache: Mapping[str, Tensor] = field(default_factory=dict)
    written_by: str | None = field(default=None, repr=False)
    known: tuple[Tensor, int] | None = field(default=None, repr=False, compare=False)

    @property
    def seen(self) -> int | None:
        """Tokens that every row has seen, where the host knows it without asking the device.

        Rows that have come differently far (padding, packing, a reset) have no such number, and
        where there is one, `dual` has no empty slots.
        """
        known = self.known
        return known[1] if known is not None and known[0] is self.position else None

    def stating(self, seen: int | None) -> State:
        """The same, and that every row has seen so many tokens; ``None``: nobody knows.

        Args:
            seen: what each entry of ``position`` is.
        """
        known = None if seen is None else (self.position, seen)
        return replace(self, known=known)

    def map(self, f: Callable[[Tensor], Tensor]) -> State:
        """Apply ``f`` to every tensor; the root of most methods below."""
        weights, seen = tuple(f(w) for w in self.weights), self.seen
        position = f(self.position)
        return State(
            sizes=self.sizes,
            weights=weights,
            position=position,
            known=None if seen is None else (position, seen),
            slots={name: tuple(f(w) for w in slot) for name, slot in sorted(self.slots.items())},
            buffer=None if self.buffer is None else self.buffer.map(f),
            dual=None if self.dual is None else self.dual.map(f),
            ones=None if self.ones is None else f(self.ones),
            log_scale=None if self.log_scale is None else f(self.log_scale),
            cache={name: f(x) for name, x in self.cache.items()},
            written_by=self.written_by,
        )

    def moved(self, **changed: object) -> State:
        """The state one token on: parts that it changed by name, and no cache unless it made one.

        As `dataclasses.replace`, and a twentieth of its time: every decoded token makes one.
        """
        after, seen = object.__new__(State), self.seen
        position = changed.pop("position") if "position" in changed else self.position + 1
        known = None if seen is None else (position, seen + 1)
        after.__dict__.update(self.__dict__, position=position, known=known, cache={})
        after.__dict__.update(changed)
        return after

    def tensors(self) -> list[Tensor]:
        """Every tensor, in the order in which `map` meets them."""
        parts = [*self.weights, self.position]
        for name in sorted(self.slots):
            parts += self.slots[name]
        if self.buffer is not None:
            parts += [self.buffer.k, self.buffer.v, *self.buffer.rates.values(), self.buffer.mask]
        if self.dual is not None:
            parts += self.dual.tensors()
        parts += [x for x in (self.ones, self.log_scale) if x is not None]
        return [*parts, *self.cache.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    @property
    def rows(self) -> int:
        """B."""
        return self.position.shape[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the weights, or of rows by key; ``None`` where associations are all that is kept."""
        for x in (*self.weights, *(() if self.dual is None else self.dual.rows)):
            return x.dtype
        return None

    def detach(self) -> State:
        """Cut the graph (truncated backpropagation)."""
        return self.map(Tensor.detach)

    def select(self, rows: Tensor) -> State:
        """Rows by index, e.g. the survivors of a beam."""
        return self.map(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, n: int) -> State:
        """Each row n times in a row."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))

    def to(
        self,
        *where: torch.device | str | torch.dtype | Tensor,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Move, as `torch.Tensor.to` does; a dtype applies to floating-point tensors.

        Args:
            where: a device, a dtype, or a tensor that has both.
            device: where tensors go; they stay when omitted.
            dtype: of floating-point tensors; theirs when omitted.

        Raises:
            ValueError: something else, or one of them twice.
        """
        return self.map(mover(where, device, dtype))

    def __repr__(self) -> str:
        """Types and shapes, and no numbers."""
        return brief(self)

    def reset(self, mask: Tensor, init: Init | None = None) -> State:
        """Rows where ``mask [B]`` is True start anew, from ``init`` (zeros when omitted).

        Args:
            mask: ``[B]``, True where a row starts anew.
            init: initial memory, as for `recollect.recall`; zeros when omitted.
        """
        rows = mask.to(self.position.device)
        starts = [torch.zeros_like(w) for w in self.weights]
        given = () if init is None else (init,) if isinstance(init, Tensor) else tuple(init)
        dual = self.dual
        if dual is not None:
            pairs, given = given[: 1 + len(dual.rows)], given[1 + len(dual.rows) :]
            dual = dual.reset(rows, pairs)
        if given:
            starts = [a.to(w.dtype).expand_as(w) for a, w in zip(given, self.weights, strict=True)]

        def clear(x: Tensor) -> Tensor:
            shaped = rows.view(-1, *(1,) * (x.dim() - 1))
            return torch.where(shaped, torch.zeros((), dtype=x.dtype, device=x.device), x)

        fresh = self.map(clear)
        shaped = [rows.view(-1, *(1,) * (w.dim() - 1)) for w in self.weights]
        weights = tuple(
            torch.where(r, a, w) for r, a, w in zip(shaped, starts, self.weights, strict=True)
        )
        return dataclasses.replace(fresh, weights=weights, dual=dual, cache={}, known=None)

    def where(self, rows: Tensor, other: State) -> State:
        """These rows where ``rows [B]`` is True, and the other state's where not.

        Args:
            rows: ``[B]``.
            other: of the same recipe and sizes; growing buffers may have other lengths.
        """
        width, length = _longest((self, other))
        pairs = [replace(_widen(s, width, length), cache={}).tensors() for s in (self, other)]
        shaped = rows.to(self.position.device)
        chosen = iter(
            [
                torch.where(shaped.view(-1, *(1,) * (a.dim() - 1)), a, b.to(a.dtype))
                for a, b in zip(*pairs, strict=True)
            ]
        )
        return replace(self, cache={}).map(lambda _: next(chosen)).stating(None)

    def last(self, n: int) -> State:
        """The same with at most the newest n slots of associations, for who knows them to be all.

        Rows that start anew at different tokens leave empty slots on the left of what grows.

        Args:
            n: at least as many as any row needs.
        """
        buffer, dual = self.buffer, self.dual
        if buffer is not None and buffer.k.shape[1] > n:
            buffer = buffer.map(lambda x: x[:, -n:])
        if dual is not None and dual.k.shape[1] > n:
            dual = dual.map(lambda x: x[:, -n:])
        if buffer is self.buffer and dual is self.dual:
            return self
        return replace(self, buffer=buffer, dual=dual, cache={}, known=None)

    def to_dict(self) -> dict[str, Tensor]:
        """Flat names to plain tensors, ready for safetensors."""
        flat = {"position": self.position, "sizes": torch.tensor(self.sizes)}
        flat.update({f"weights.{i}": w for i, w in enumerate(self.weights)})
        for name, slot in self.slots.items():
            flat.update({f"slots.{name}.{i}": w for i, w in enumerate(slot)})
        if self.buffer is not None:
            flat.update({"buffer.k": self.buffer.k, "buffer.v": self.buffer.v})
            flat["buffer.mask"] = self.buffer.mask
            flat.update({f"buffer.rates.{n}": x for n, x in self.buffer.rates.items()})
        if self.dual is not None:
            flat.update(self.dual.to_dict())
        if self.ones is not None:
            flat["ones"] = self.ones
        if self.log_scale is not None:
            flat["log_scale"] = self.log_scale
        if self.written_by is not None:
            flat["written_by"] = text_tensor(self.written_by)
        return {name: x.contiguous() for name, x in flat.items()}

    @classmethod
    def from_dict(cls, flat: Mapping[str, Tensor]) -> State:
        """Rebuild what `to_dict` wrote.

        Raises:
            ValueError: no tensors by name, a name that no state has, or a part that is missing.
        """
        check_names(flat)
        slot_names = dict.fromkeys(n.split(".")[1] for n in flat if n.startswith("slots."))
        buffer, head = None, "buffer.rates."
        if "buffer.k" in flat:
            buffer = Buffer(
                k=flat["buffer.k"],
                v=flat["buffer.v"],
                mask=flat["buffer.mask"],
                rates={n[len(head) :]: x for n, x in flat.items() if n.startswith(head)},
            )
        (H, K, V), places = flat["sizes"].tolist(), set(flat["position"].flatten().tolist())
        state = cls(
            sizes=(H, K, V),
            weights=numbered(flat, "weights."),
            slots={name: numbered(flat, f"slots.{name}.") for name in slot_names},
            position=flat["position"],
            buffer=buffer,
            dual=KernelRows.from_dict(flat),
            ones=flat.get("ones"),
            log_scale=flat.get("log_scale"),
            written_by=read_text(flat, "written_by"),
        )
        full = state.dual is None or bool(state.dual.mask.all())
        return state.stating(places.pop() if len(places) == 1 and full else None)


def join_states(states: list[State]) -> State:
    """Stack rows; growing buffers are padded on the left to one length."""
    width, rows = _longest(states)
    # What an engine may spare the next one has as many sizes as there are states.
    padded = [replace(_widen(state, width, rows), cache={}) for state in states]
    columns = zip(*(state.tensors() for state in padded), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    sizes = {s.dual.k.shape[1] for s in states if s.dual is not None}
    seen = {state.seen if len(sizes) < 2 else None for state in states}
    together = padded[0].map(lambda _: next(joined))
    return together.stating(seen.pop() if len(seen) == 1 else None)


def _longest(states: Sequence[State]) -> tuple[int, int]:
    """Slots of the longest buffer, and of the most rows by key."""
    width = max((s.buffer.k.shape[1] for s in states if s.buffer is not None), default=0)
    return width, max((s.dual.k.shape[1] for s in states if s.dual is not None), default=0)


def _widen(state: State, width: int, rows: int) -> State:
    def pad(x: Tensor, size: int) -> Tensor:
        return torch.cat([x.new_zeros(x.shape[0], size - x.shape[1], *x.shape[2:]), x], dim=1)

    buffer: Buffer | None = None
    if state.buffer is not None:
        buffer = state.buffer.map(lambda x: pad(x, width))
    dual = None if state.dual is None else state.dual.map(lambda x: pad(x, rows))
    return replace(state, buffer=buffer, dual=dual)


# -- before the first token -----------------------------------------------------------------------


def initial_state(
    sized: SizedRecipe,
    *,
    B: int,
    dtype: torch.dtype,
    device: torch.device,
    init: Init | None = None,
) -> State:
    """The state before the first token: A₀ = ``init``, or zeros where that can learn.

    Args:
        sized: the recipe, and how many memories of what size.
        B: rows.
        dtype: of everything but what the algorithm keeps in float64.
        device: where.
        init: A₀, as for `recollect.recall`.

    Raises:
        RecipeError: a deep memory without ``init``, or one of the wrong shapes.
    """
    recipe, H, K, V = sized.recipe, sized.H, sized.K, sized.V
    if init is not None and recipe.nonparametric:
        k, v, rates = initial_associations(sized, init, B=B, dtype=dtype)
        position = torch.full((B,), k.shape[1], device=device)
        buffer = roll(recipe, None, k=k, v=v, rates=rates, lengths=None, position=position)
        state = State(
            sizes=(H, K, V), weights=(), position=position, buffer=buffer, written_by=sized.written
        )
        return state.stating(k.shape[1])
    shapes = sized.weights
    pairs: tuple[Tensor, ...] = ()
    if init is None:
        if recipe.needs_init():
            starts = recipe.init_shapes(K, V, pairs=1) if recipe.dual else shapes
            wanted = ", ".join(str([H, *shape]) for shape in starts)
            raise RecipeError(
                f"{recipe.memory.title} needs init: a deep memory of zeros has zero gradients and "
                f"never learns; give one tensor per map, of shapes {wanted}"
            )
        weights = tuple(torch.zeros(B, H, *s, dtype=dtype, device=device) for s in shapes)
    else:
        given = (init,) if isinstance(init, Tensor) else tuple(init)
        before = 1 + len(recipe.row_widths(V)) if recipe.dual else 0
        if len(given) != before + len(shapes) and not (before and not given and not shapes):
            what = f"{before} of its pairs and " if before else ""
            raise RecipeError(
                f"{recipe.memory.title} takes {what}{len(shapes)} map(s) and init has "
                f"{len(given)} tensor(s)"
            )
        pairs, given = given[:before], given[before:]
        for a, shape in zip(given, shapes, strict=True):
            if tuple(a.shape) not in ((H, *shape), (B, H, *shape)):
                raise RecipeError(
                    f"init of {recipe.memory.title} must have shape {[H, *shape]} (or one per row, "
                    f"{[B, H, *shape]}), not {list(a.shape)}"
                )
        weights = tuple(
            a.to(dtype=dtype, device=device).expand(B, H, *s)
            for a, s in zip(given, shapes, strict=True)
        )
    slots: dict[str, tuple[Tensor, ...]] = {}
    if weights or not recipe.dual:
        for name, (blank, wide) in sized.slots.items():
            slot_dtype = torch.float64 if wide else dtype
            slots[name] = tuple(
                torch.zeros(B, H, *s, dtype=slot_dtype, device=device) for s in blank
            )
    ones = (B, H, 1, sized.features)
    dual = None
    if recipe.dual:
        dual = initial_rows(recipe, pairs, B=B, H=H, K=K, V=V, dtype=dtype, device=device)
    position = torch.zeros(B, dtype=torch.long, device=device)
    return State(
        sizes=(H, K, V),
        written_by=sized.written,
        weights=weights,
        slots=slots,
        dual=dual,
        position=position,
        known=(position, 0),
        ones=torch.zeros(ones, dtype=dtype, device=device) if sized.normalised else None,
        log_scale=torch.zeros(B, H, dtype=dtype, device=device) if sized.stabilised else None,
    )
