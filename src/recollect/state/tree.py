"""Base class of states: frozen dataclasses whose fields hold tensors."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from recollect.messages import short_repr

__all__ = ["UNSAVED", "TensorTree", "align_right", "encode_text", "where_rows"]

UNSAVED = {"saved": False}
"""Metadata of a field that `TensorTree.to_dict` leaves out."""


class TensorTree:
    """Base class of states: frozen dataclasses whose fields hold tensors.

    A field holds a tensor, another tree, a tuple or mapping of these, or ``None``. Text, whole
    numbers and other objects are constants of the tree. Keys of mappings are visited in sorted
    order. The dotted names of the tensors (``weights.0``, ``buffer.rates.lr``) are the keys of
    `to_dict`, and the annotations of the fields decide how `from_dict` reads them.
    """

    def flatten(self) -> tuple[list[str], list[Tensor]]:
        """Return the dotted names of all tensors, and the tensors."""
        names: list[str] = []
        tensors: list[Tensor] = []
        _flatten(vars(self), "", names, tensors)
        return names, tensors

    def with_tensors(self, tensors: Iterable[Tensor]) -> Self:
        """Return a copy with other tensors, in the order of `flatten`."""
        remaining = iter(tensors)
        return replace(
            cast(Any, self), **{name: _filled(x, remaining) for name, x in vars(self).items()}
        )

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``f`` to every tensor."""
        return self.with_tensors([f(x) for x in self.flatten()[1]])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.flatten()[1])

    def detach(self) -> Self:
        """Cut the graph (truncated backpropagation)."""
        return self.map(Tensor.detach)

    def select(self, rows: Tensor) -> Self:
        """Select batch elements by index, for example the surviving beams.

        Args:
            rows: indices ``[n]``.
        """
        return self.map(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, n: int) -> Self:
        """Repeat each batch element n times in a row."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))

    def to(
        self,
        *args: object,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Move all tensors like `torch.Tensor.to`; a dtype applies to floating-point tensors.

        Args:
            args: a device, a dtype, or a tensor that has both.
            device: device of the result; unchanged by default.
            dtype: type of floating-point tensors; unchanged by default.

        Raises:
            ValueError: another argument, or two devices or dtypes.
        """
        target: dict[str, Any] = {"device": device, "dtype": dtype}
        for arg in args:
            if isinstance(arg, Tensor):
                named: dict[str, Any] = {"device": arg.device, "dtype": arg.dtype}
            elif isinstance(arg, torch.dtype):
                named = {"dtype": arg}
            elif isinstance(arg, torch.device | str) or type(arg) is int:
                named = {"device": arg}
            else:
                raise ValueError(
                    f"state.to takes a device, a dtype or a tensor, like torch.Tensor.to, not "
                    f"{short_repr(arg)}"
                )
            for name, value in named.items():
                if target[name] is not None:
                    raise ValueError(
                        f"state.to takes one {name}, not both {target[name]} and {value}"
                    )
                target[name] = value
        device, dtype = target["device"], target["dtype"]
        return self.map(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype))

    def __repr__(self) -> str:
        """Return one line with the types and shapes of tensors, without their values."""
        return _summary(self)

    def to_dict(self) -> dict[str, Tensor]:
        """Return contiguous tensors by dotted name, ready for safetensors."""
        flat: dict[str, Tensor] = {}
        for field in fields(cast(Any, self)):
            if field.metadata.get("saved", True):
                flat |= _saved(getattr(self, field.name), field.name)
        return flat

    @classmethod
    def from_dict(cls, flat: Mapping[str, Tensor]) -> Self:
        """Rebuild a state from the result of `to_dict`.

        Raises:
            ValueError: an unknown name, a missing one, or values that are not tensors.
        """
        if not isinstance(flat, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"a state is read from tensors by name, not from {short_repr(flat)}")
        for name, x in flat.items():
            if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{name!r} of a state must be a tensor, not {short_repr(x)}")
        return cls._read(flat, "")

    @classmethod
    def _read(cls, flat: Mapping[str, Tensor], prefix: str) -> Self:
        """Rebuild the tree from tensors whose full names begin with ``prefix``."""
        groups, kinds = _groups(flat), typing.get_type_hints(cls)
        saved = {f.name: f for f in fields(cast(Any, cls)) if f.metadata.get("saved", True)}
        for name in groups.keys() - saved.keys():
            rest = next(iter(groups[name]))
            raise _unknown(f"{prefix}{name}.{rest}" if rest else f"{prefix}{name}")
        values: dict[str, Any] = {}
        for name, field in saved.items():
            if name in groups:
                values[name] = _read_value(kinds[name], groups[name], f"{prefix}{name}")
            elif field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"this is not a recollect state: {prefix + name!r} is missing")
        return cls(**values)


def where_rows(rows: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """Return batch elements of ``x`` if ``rows [B]`` is True, and of ``other`` if not."""
    return torch.where(rows.to(other.device).view(-1, *(1,) * (other.dim() - 1)), x, other)


def align_right(x: Tensor, n: int) -> Tensor:
    """Return the last n slots of ``x [B, m, ...]``, with zeros on the left if there are fewer."""
    missing = n - x.shape[1]
    if missing <= 0:
        return x[:, x.shape[1] - n :]
    return torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], dim=1)


# -- flattening -----------------------------------------------------------------------------------


def _flatten(node: Mapping[str, Any], prefix: str, names: list[str], tensors: list[Tensor]) -> None:
    """Append the names and tensors of a node's children."""
    for name, child in node.items():  # called for every token: without generators
        if isinstance(child, Tensor):
            names.append(prefix + name)
            tensors.append(child)
        elif isinstance(child, TensorTree):
            _flatten(vars(child), f"{prefix}{name}.", names, tensors)
        elif isinstance(child, tuple):
            _flatten({str(i): x for i, x in enumerate(child)}, f"{prefix}{name}.", names, tensors)
        elif child and isinstance(child, Mapping):
            _flatten(_sorted(child), f"{prefix}{name}.", names, tensors)


def _sorted(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: node[name] for name in sorted(node)}


def _filled(node: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a node with its tensors replaced by the next ones."""
    if isinstance(node, Tensor):
        return next(tensors)
    if isinstance(node, TensorTree):
        return node.with_tensors(tensors)
    if isinstance(node, Mapping):
        return {name: _filled(child, tensors) for name, child in _sorted(node).items()}
    return tuple([_filled(x, tensors) for x in node]) if isinstance(node, tuple) else node


def _summary(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_summary(x)}" for name, x in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_summary, value))}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value):
        return repr(value)
    parts = [(f.name, getattr(value, f.name)) for f in fields(value) if f.repr]
    is_empty = [x is None or (isinstance(x, tuple | Mapping) and not x) for _, x in parts]
    shown_parts = [f"{n}={_summary(x)}" for (n, x), e in zip(parts, is_empty, strict=True) if not e]
    return f"{type(value).__name__}({', '.join(shown_parts)})"


# -- saved states ---------------------------------------------------------------------------------


def encode_text(text: str) -> Tensor:
    """Return the bytes of a text as a tensor."""
    return torch.tensor([*text.encode()], dtype=torch.uint8)


def _saved(value: Any, name: str) -> dict[str, Tensor]:
    """Return the tensors that represent a value, by dotted name."""
    if isinstance(value, Tensor):
        return {name: value.contiguous()}
    if isinstance(value, str):
        return {name: encode_text(value)}
    if isinstance(value, int) or (isinstance(value, tuple) and value and type(value[0]) is int):
        return {name: torch.tensor(value)}
    if isinstance(value, TensorTree):
        return {f"{name}.{key}": x for key, x in value.to_dict().items()}
    items = value.items() if isinstance(value, Mapping) else enumerate(value or ())
    return {k: x for key, child in items for k, x in _saved(child, f"{name}.{key}").items()}


def _groups(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group tensors by the first part of their names."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, x in flat.items():
        head, _, rest = name.partition(".")
        groups.setdefault(head, {})[rest] = x
    return groups


def _unknown(name: str) -> ValueError:
    return ValueError(f"{name!r} is not part of a recollect state")


def _read_value(kind: Any, flat: Mapping[str, Tensor], name: str) -> Any:
    """Return a value of an annotated type from tensors by the rest of their names."""
    args = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):  # the only type, or the tree of these fields
        matches = [a for a in args[1:] if _groups(flat).keys() <= typing.get_type_hints(a).keys()]
        return _read_value([*matches, args[0]][0], flat, name)
    if isinstance(kind, type) and issubclass(kind, TensorTree):
        return kind._read(flat, f"{name}.")  # pyright: ignore[reportPrivateUsage]
    if origin is not None and issubclass(origin, Mapping):
        return {
            key: _read_value(args[1], inner, f"{name}.{key}")
            for key, inner in _groups(flat).items()
        }
    if origin is tuple and args[0] is Tensor:
        return _read_tuple(flat, name)
    for rest in flat.keys() - {""}:
        raise _unknown(f"{name}.{rest}")
    x = flat[""]
    if kind is Tensor:
        return x
    if kind is not str:
        numbers: Any = x.tolist()
        if kind is int and isinstance(numbers, int):
            return numbers
        if kind is not int and isinstance(numbers, list) and len(numbers) == len(args):
            return tuple(numbers)
        raise ValueError(f"{name!r} of a state must be {len(args) or 1} whole number(s)")
    try:
        if x.dtype == torch.uint8 and x.dim() == 1 and len(x):
            return bytes(x.tolist()).decode()
    except UnicodeDecodeError:
        pass
    raise ValueError(f"{name!r} of a state must be text, as one row of its bytes in UTF-8")


def _read_tuple(flat: Mapping[str, Tensor], name: str) -> tuple[Tensor, ...]:
    """Return the tensors ``0``, ``1``, ... in order."""
    for index in flat:
        if not index.isdecimal():
            raise _unknown(f"{name}.{index}" if index else name)
    by_index = {int(index): x for index, x in flat.items()}
    for index in range(len(by_index)):
        if index not in by_index:
            raise ValueError(
                f"this state lacks the tensor {name}.{index}: it has {name}.{max(by_index)}"
            )
    return tuple(by_index[index] for index in range(len(by_index)))
