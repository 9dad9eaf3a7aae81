"""Inputs of a layer's memory, and the state of a layer between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.state.moving import brief, mover
from recollect.state.state import State
from recollect.typing import Init

__all__ = ["Associations", "LayerState"]


@dataclass(kw_only=True)  # made for every decoded token: frozen ones take five times as long
class Associations:
    """The inputs of a layer's memory, and the tensors that the layer needs after it was read.

    T tokens have n associations each; with n = 1 the axis of n is missing.

    Attributes:
        q: queries ``[B, T, Hq, K]`` of Hq heads.
        k: keys ``[B, T, H, (n,) K]`` of H memories.
        v: values ``[B, T, H, (n,) V]``.
        gates: numbers of each token by name, ``[B, T, H, (n,) ...]``, as `recollect.recall` takes
            them.
        params: learned numbers by name, as `recollect.recall` takes them.
        plain: values before any rotation, of the shape of ``v``.
        phase: angles of the rotation of a complex decay, or ``None``.
        gated: input of the output gate ``[B, T, d_model]``.
        conv: last inputs of the short convolution, or ``None``.
        turned: last angles of a complex decay, or ``None``.
        shift: last token of the token shift, or ``None``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    params: dict[str, Tensor]
    plain: Tensor
    phase: Tensor | None
    gated: Tensor
    conv: Tensor | None
    turned: Tensor | None
    shift: Tensor | None


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """The state of a `MemoryLayer`; rows are independent sequences.

    Attributes:
        memory: the recipe's state, see `recollect.state.state.State`.
        conv: last inputs of the short convolution ``[B, width − 1, D]``, q, k and v beside each
            other; ``None`` without one.
        phase: cumulated angle of a complex decay ``[B, H, D/2]`` in float64, or ``None``.
        shift: the last token ``[B, 1, d_model]`` for the token shift, or ``None``.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, heads=2)
        >>> y, state = layer(torch.randn(2, 5, 8))
        >>> state.position
        tensor([5, 5])
        >>> y, state = layer(torch.randn(2, 1, 8), state)
        >>> state.position
        tensor([6, 6])
        >>> state = state.reset(torch.tensor([True, False]))
        >>> state.position
        tensor([0, 6])
    """

    memory: State
    conv: Tensor | None = None
    phase: Tensor | None = None
    shift: Tensor | None = None

    @property
    def _beside(self) -> dict[str, Tensor]:
        """What stands beside the memory, by name."""
        named = {"conv": self.conv, "phase": self.phase, "shift": self.shift}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def position(self) -> Tensor:
        """Tokens seen of the current document ``[B]``: also the phase of the rotary embedding."""
        return self.memory.position

    @property
    def rows(self) -> int:
        """B."""
        return self.memory.rows

    @property
    def seen(self) -> int | None:
        """Tokens that every row has seen, where the host knows it (`State.seen`)."""
        return self.memory.seen

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.memory.nbytes + sum(x.numel() * x.element_size() for x in self._beside.values())

    def map(self, f: Callable[[Tensor], Tensor]) -> LayerState:
        """Apply ``f`` to every tensor; the root of the methods below."""
        beside = {name: f(x) for name, x in self._beside.items()}
        return LayerState(memory=self.memory.map(f), **beside)

    def memories(self, f: Callable[[State], State]) -> LayerState:
        """Apply ``f`` to the memory's state, which it keeps as a whole.

        Args:
            f: of the state of one memory.
        """
        return dataclasses.replace(self, memory=f(self.memory))

    def detach(self) -> LayerState:
        """Cut the graph (truncated backpropagation)."""
        return self.map(Tensor.detach)

    def select(self, rows: Tensor) -> LayerState:
        """Rows by index, e.g. the survivors of a beam."""
        return self.map(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, n: int) -> LayerState:
        """Each row n times in a row."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))

    def to(
        self,
        *where: torch.device | str | torch.dtype | Tensor,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LayerState:
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

    def reset(self, mask: Tensor, init: Init | None = None) -> LayerState:
        """Rows where ``mask [B]`` is True start anew, their memory from ``init``.

        ``layer.initial_memory`` gives the ``init`` of a layer that learned one.

        Args:
            mask: ``[B]``, True where a row starts anew.
            init: initial memory, as for `recollect.recall`; zeros when omitted.
        """
        rows = mask.to(self.position.device).view(-1, 1, 1)
        beside = {n: torch.where(rows, 0.0, x).to(x.dtype) for n, x in self._beside.items()}
        return LayerState(memory=self.memory.reset(mask, init), **beside)

    def where(self, rows: Tensor, other: LayerState) -> LayerState:
        """These rows where ``rows [B]`` is True, and the other state's where not.

        Args:
            rows: ``[B]``.
            other: of the same layer.
        """
        shaped, theirs = rows.to(self.position.device).view(-1, 1, 1), other._beside
        beside = {n: torch.where(shaped, x, theirs[n].to(x.dtype)) for n, x in self._beside.items()}
        return LayerState(memory=self.memory.where(rows, other.memory), **beside)

    def last(self, n: int) -> LayerState:
        """The same with at most the newest n slots of associations (`State.last`).

        Args:
            n: at least as many as any row needs.
        """
        return dataclasses.replace(self, memory=self.memory.last(n))

    def to_dict(self) -> dict[str, Tensor]:
        """Flat names to plain tensors, ready for safetensors."""
        flat = {f"memory.{name}": x for name, x in self.memory.to_dict().items()}
        return {**flat, **{name: x.contiguous() for name, x in self._beside.items()}}

    @classmethod
    def from_dict(cls, flat: Mapping[str, Tensor]) -> LayerState:
        """Rebuild what `to_dict` wrote.

        Raises:
            ValueError: a name that no state has, or one that is missing.
        """
        head = "memory."
        for name in flat:
            if name not in ("conv", "phase", "shift") and not name.startswith(head):
                raise ValueError(f"{name!r} is no part of a layer's state")
        memory = {name[len(head) :]: x for name, x in flat.items() if name.startswith(head)}
        beside = {name: flat[name] for name in ("conv", "phase", "shift") if name in flat}
        return cls(memory=State.from_dict(memory), **beside)
