"""The state of a composition: the states of its parts, and what it keeps beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recollect.layer.state import LayerState
from recollect.state.flat import read_text, text_tensor
from recollect.state.moving import brief, mover
from recollect.state.state import State

__all__ = ["AnyState", "MixerState", "state_from"]


@dataclass(frozen=True, kw_only=True)
class MixerState:
    """What a composition remembers between calls; rows are independent sequences.

    It has the interface of `LayerState`, so caches, beams and truncated backpropagation treat both
    alike.

    Attributes:
        parts: the states of the parts by name.
        tensors: what the composition keeps beside them, rows first.
        clock: the part that sees every token of the text; where none does, the tensor that counts
            them.
        prefix: learned tokens that this part saw before the text.

    Examples:
        >>> layer = rc.blocks.build(rc.blocks.Chain("gla", "delta_net"), d_model=8, heads=2)
        >>> y, state = layer(torch.randn(2, 5, 8))
        >>> state.position
        tensor([5, 5])
        >>> state.select(torch.tensor([1])).rows
        1
    """

    parts: Mapping[str, AnyState]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    clock: str
    prefix: int = 0

    @property
    def _counter(self) -> AnyState | None:
        return self.parts.get(self.clock)

    @property
    def position(self) -> Tensor:
        """Tokens of the text that were seen ``[B]``."""
        seen = self._counter.position if self._counter else self.tensors[self.clock]
        return (seen - self.prefix).clamp_min(0) if self.prefix else seen

    @property
    def seen(self) -> int | None:
        """Tokens that every row has seen, where the host knows it (`State.seen`)."""
        seen = self._counter.seen if self._counter else None
        return None if seen is None else max(seen - self.prefix, 0)

    @property
    def rows(self) -> int:
        """B."""
        return self._counter.rows if self._counter else self.tensors[self.clock].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        own = sum(x.numel() * x.element_size() for x in self.tensors.values())
        return own + sum(part.nbytes for part in self.parts.values())

    def _changed(
        self, of_part: Callable[[Any], Any], of_tensor: Callable[[Tensor], Tensor]
    ) -> MixerState:
        return MixerState(
            parts={name: of_part(part) for name, part in self.parts.items()},
            tensors={name: of_tensor(x) for name, x in self.tensors.items()},
            clock=self.clock,
            prefix=self.prefix,
        )

    def map(self, f: Callable[[Tensor], Tensor]) -> MixerState:
        """Apply ``f`` to every tensor; the root of most methods below."""
        return self._changed(lambda part: part.map(f), f)

    def memories(self, f: Callable[[State], State]) -> MixerState:
        """Apply ``f`` to the state of every memory in it.

        Args:
            f: of the state of one memory.
        """
        return self._changed(lambda part: part.memories(f), lambda x: x)

    def detach(self) -> MixerState:
        """Cut the graph (truncated backpropagation)."""
        return self.map(Tensor.detach)

    def select(self, rows: Tensor) -> MixerState:
        """Rows by index, e.g. the survivors of a beam."""
        return self.map(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, n: int) -> MixerState:
        """Each row n times in a row."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))

    def to(
        self,
        *where: torch.device | str | torch.dtype | Tensor,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> MixerState:
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

    def reset(self, mask: Tensor, init: Mapping[str, Any] | None = None) -> MixerState:
        """Rows where ``mask [B]`` is True start anew.

        ``layer.initial_memory`` gives the ``init`` of parts that learned one.

        Args:
            mask: ``[B]``, True where a row starts anew.
            init: initial memories by part; zeros for those that are missing.
        """
        given: Mapping[str, Any] = {} if init is None else init

        def clear(x: Tensor) -> Tensor:
            rows = mask.to(x.device).view(-1, *(1,) * (x.dim() - 1))
            return torch.where(rows, torch.zeros((), dtype=x.dtype, device=x.device), x)

        return MixerState(
            # A part that is read at another time than it is written starts as the one it is of.
            parts={name: part.reset(mask, given.get(name)) for name, part in self.parts.items()},
            tensors={name: clear(x) for name, x in self.tensors.items()},
            clock=self.clock,
            prefix=self.prefix,
        )

    def to_dict(self) -> dict[str, Tensor]:
        """Flat names to plain tensors, ready for safetensors."""
        flat = {"clock": text_tensor(self.clock), "prefix": torch.tensor(self.prefix)}
        flat |= {f"tensors.{name}": x.contiguous() for name, x in self.tensors.items()}
        for name, part in self.parts.items():
            flat |= {f"parts.{name}.{inner}": x for inner, x in part.to_dict().items()}
        # A memory and how it stood earlier may share what was not written since; files may not.
        held: set[int] = set()
        for name, x in flat.items():
            if x.data_ptr() in held:
                flat[name] = x.clone()
            held.add(x.data_ptr())
        return flat

    @classmethod
    def from_dict(cls, flat: Mapping[str, Tensor]) -> MixerState:
        """Rebuild what `to_dict` wrote.

        Raises:
            ValueError: a name that no state has, or one that is missing.
        """
        clock, prefix = read_text(flat, "clock"), flat.get("prefix")
        inner: dict[str, dict[str, Tensor]] = {}
        tensors: dict[str, Tensor] = {}
        for name, x in flat.items():
            head, _, rest = name.partition(".")
            if head == "parts" and "." in rest:
                part, _, last = rest.partition(".")
                inner.setdefault(part, {})[last] = x
            elif head == "tensors" and rest:
                tensors[rest] = x
            elif name not in ("clock", "prefix"):
                raise ValueError(f"{name!r} is no part of a composition's state")
        if clock is None or (clock not in inner and clock not in tensors) or prefix is None:
            raise ValueError("this is no state of a composition: its clock or prefix is missing")
        return cls(
            parts={name: state_from(part) for name, part in inner.items()},
            tensors=tensors,
            clock=clock,
            prefix=int(prefix),
        )


AnyState = LayerState | MixerState
"""The state of a recipe's layer, or of a composition of several."""


def state_from(flat: Mapping[str, Tensor]) -> AnyState:
    """Rebuild what either kind of state wrote with ``to_dict``.

    Args:
        flat: tensors by name.

    Raises:
        ValueError: a name that no state has, or one that is missing.
    """
    return MixerState.from_dict(flat) if "clock" in flat else LayerState.from_dict(flat)
