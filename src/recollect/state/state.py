"""State: everything a recipe remembers between calls, the same for every engine.

Weights are those at the *start* of the open inner batch; the raw associations of that batch and of
the window stand beside them in fixed slots, so any engine continues any other's state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from recollect.recipe.recipe import Recipe
from recollect.state.flat import check_names, numbered, read_text, text_tensor
from recollect.state.kernel_rows import KernelRows
from recollect.typing import Init, Weights

__all__ = ["Buffer", "State", "join_states", "roll"]


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Raw associations with their gates, newest last and aligned right.

    Attributes:
        k: ``[B, n, H, K]``. v: ``[B, n, H, V]``.
        rates: every resolved number by name, ``[B, n, H, ...]``.
        mask: ``[B, n]``, False where a slot holds nothing (its numbers are then 0).
    """

    k: Tensor
    v: Tensor
    rates: Mapping[str, Tensor]
    mask: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> Buffer:
        """Apply ``f`` to every tensor."""
        return Buffer(
            k=f(self.k),
            v=f(self.v),
            rates={name: f(x) for name, x in self.rates.items()},
            mask=f(self.mask),
        )


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
    written_by: str | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> State:
        """Apply ``f`` to every tensor; the root of most methods below."""
        return State(
            sizes=self.sizes,
            weights=tuple(f(w) for w in self.weights),
            position=f(self.position),
            slots={name: tuple(f(w) for w in slot) for name, slot in sorted(self.slots.items())},
            buffer=None if self.buffer is None else self.buffer.map(f),
            dual=None if self.dual is None else self.dual.map(f),
            ones=None if self.ones is None else f(self.ones),
            log_scale=None if self.log_scale is None else f(self.log_scale),
            cache={name: f(x) for name, x in self.cache.items()},
            written_by=self.written_by,
        )

    def moved(self, **changed: object) -> State:
        """The state one token on: parts that it changed by name, and no cache.

        As `dataclasses.replace`, and a twentieth of its time: every decoded token makes one.
        """
        after = object.__new__(State)
        after.__dict__.update(self.__dict__, position=self.position + 1, cache={}, **changed)
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
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """Move; ``dtype`` applies to floating-point tensors.

        Args:
            device: where tensors go; they stay when omitted.
            dtype: of floating-point tensors; theirs when omitted.
        """
        return self.map(
            lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None)
        )

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
        return dataclasses.replace(fresh, weights=weights, dual=dual, cache={})

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
        H, K, V = flat["sizes"].tolist()
        return cls(
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


def join_states(states: list[State]) -> State:
    """Stack rows; growing buffers are padded on the left to one length."""
    width = max((s.buffer.k.shape[1] for s in states if s.buffer is not None), default=0)
    rows = max((s.dual.k.shape[1] for s in states if s.dual is not None), default=0)
    # What an engine may spare the next one has as many sizes as there are states.
    padded = [replace(_widen(state, width, rows), cache={}) for state in states]
    columns = zip(*(state.tensors() for state in padded), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return padded[0].map(lambda _: next(joined))


def _widen(state: State, width: int, rows: int) -> State:
    def pad(x: Tensor, size: int) -> Tensor:
        return torch.cat([x.new_zeros(x.shape[0], size - x.shape[1], *x.shape[2:]), x], dim=1)

    buffer: Buffer | None = None
    if state.buffer is not None:
        buffer = state.buffer.map(lambda x: pad(x, width))
    dual = None if state.dual is None else state.dual.map(lambda x: pad(x, rows))
    return replace(state, buffer=buffer, dual=dual)


# -- the buffer after new tokens ------------------------------------------------------------------


def _grown(old: Buffer | None, *, k: Tensor, v: Tensor, rates: Mapping[str, Tensor]) -> Buffer:
    """Everything, in rows without padding: what was held, then the new."""
    mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if old is None:
        # The caller's tensors stay the caller's, to be changed or freed.
        own = {name: _copied(x) for name, x in rates.items()}
        return Buffer(k=_copied(k), v=_copied(v), rates=own, mask=mask)
    return Buffer(
        k=torch.cat([old.k.to(k.dtype), k], dim=1),
        v=torch.cat([old.v.to(v.dtype), v], dim=1),
        rates={name: torch.cat([old.rates[name].to(x), x], 1) for name, x in rates.items()},
        mask=torch.cat([old.mask, mask], dim=1),
    )


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def roll(
    recipe: Recipe,
    old: Buffer | None,
    *,
    k: Tensor,
    v: Tensor,
    rates: Mapping[str, Tensor],
    lengths: Tensor | None,
    position: Tensor,
) -> Buffer | None:
    """The buffer after new tokens: per row, those of the window and of the open inner batch.

    ``position`` is that after the new tokens. Cost O(n) in the number of slots, not in T.
    """
    span = recipe.span
    if span == 0:
        return None
    B, T = k.shape[:2]
    if span is None and lengths is None:
        return _grown(old, k=k, v=v, rates=rates)
    buffered = 0 if old is None else old.k.shape[1]
    slots = buffered + T if span is None else span
    history = recipe.history
    wanted = position if history is None else position % recipe.algorithm.batch + history
    wanted = torch.minimum(position, wanted)
    if lengths is None:
        return _ended(old, slots, wanted, k=k, v=v, rates=rates)
    # Joined tokens form one run per row: old ones aligned right, new ones aligned left.
    end = buffered + lengths  # [B]
    index = end[:, None] - slots + torch.arange(slots, device=k.device)  # [B, n]
    mask = (index >= end[:, None] - wanted[:, None]) & (index >= 0)
    if old is not None:
        inside = index.clamp(0, buffered - 1) if buffered else index
        mask &= (
            torch.where(index < buffered, old.mask.gather(1, inside), True) if buffered else True
        )
    index = index.clamp(0, max(buffered + T - 1, 0))

    def pick(new: Tensor, past: Tensor | None) -> Tensor:
        # Slice before joining so that a long call does not copy all of its tokens.
        joined = new if past is None else torch.cat([past.to(new.dtype), new], dim=1)
        shaped = index.view(B, slots, *(1,) * (new.dim() - 2)).expand(-1, -1, *new.shape[2:])
        shown = mask.view(B, slots, *(1,) * (new.dim() - 2))
        if joined.shape[1] == 0:
            return new.new_zeros(B, slots, *new.shape[2:])
        return torch.where(
            shown, joined.gather(1, shaped), torch.zeros((), dtype=new.dtype).to(new)
        )

    return Buffer(
        k=pick(k, None if old is None else old.k),
        v=pick(v, None if old is None else old.v),
        rates={n: pick(x, None if old is None else old.rates[n]) for n, x in rates.items()},
        mask=mask,
    )


def _ended(
    old: Buffer | None,
    slots: int,
    wanted: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    rates: Mapping[str, Tensor],
) -> Buffer:
    """The last ``slots`` of what was held and rows without padding, of which ``wanted`` count."""
    B, T = k.shape[:2]
    past = max(slots - T, 0)  # slots that new tokens do not reach
    buffered = 0 if old is None else min(old.k.shape[1], past)
    mask = torch.arange(slots, 0, -1, device=k.device) <= wanted[:, None]
    if past > buffered:
        mask[:, : past - buffered] = False
    if old is not None and buffered:
        mask[:, past - buffered : past] &= old.mask[:, old.mask.shape[1] - buffered :]
    empty = ~mask
    shaped: dict[int, Tensor] = {}

    def pick(new: Tensor, older: Tensor | None) -> Tensor:
        parts = [new if slots - past == T else new[:, T - (slots - past) :]]
        if older is not None and buffered:
            parts.insert(0, older[:, older.shape[1] - buffered :].to(new.dtype))
        if buffered < past:
            parts.insert(0, new.new_zeros(B, past - buffered, *new.shape[2:]))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if new.dim() not in shaped:
            shaped[new.dim()] = empty.view(B, slots, *(1,) * (new.dim() - 2))
        return joined.masked_fill(shaped[new.dim()], 0.0)

    return Buffer(
        k=pick(k, None if old is None else old.k),
        v=pick(v, None if old is None else old.v),
        rates={n: pick(x, None if old is None else old.rates[n]) for n, x in rates.items()},
        mask=mask,
    )
