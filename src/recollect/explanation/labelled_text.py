"""Labelled lines of an explanation as text, HTML and data for JSON."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recollect.fields import Gate, Param
from recollect.report.notebook import definition_table

__all__ = ["EQUATION_LABELS", "SIZE", "Block", "LabelledText", "fields_to_json", "shape_text"]

SIZE = 64
"""K and V of the numbers in an explanation."""

EQUATION_LABELS = ("composes", "problem", "write", "read", "where", "ties")
"""Labels of blocks with equations, or with the meaning of their symbols."""

LABEL_WIDTH = 9

Block = tuple[str, tuple[str, ...]]
"""A label, and its lines."""


class LabelledText(ABC):
    """A title and labelled lines."""

    title: str

    @abstractmethod
    def _lines(self) -> Iterable[tuple[str, Sequence[str]]]:
        """Return labels and lines in order; labels without lines are not printed."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Labels and their lines, in the order of printing; an empty line separates parts."""
        return tuple((label, tuple(lines)) for label, lines in self._lines() if lines)

    @property
    def equations(self) -> tuple[Block, ...]:
        """Blocks with equations, or with the meaning of their symbols."""
        return tuple(block for block in self.blocks if block[0] in EQUATION_LABELS)

    def __str__(self) -> str:
        text = [self.title]
        for label, lines in self.blocks:
            labels = (label, *("" for _ in lines[1:]))
            text += [
                f"{x:<{LABEL_WIDTH}}{line}".rstrip() for x, line in zip(labels, lines, strict=True)
            ]
        return "\n".join(text)

    def _repr_html_(self) -> str:
        return definition_table(f"`{self.title}`", self.blocks, equations=EQUATION_LABELS)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as data for JSON."""
        return fields_to_json(self)


def fields_to_json(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as data for JSON."""
    return {field.name: to_json(getattr(item, field.name)) for field in dataclasses.fields(item)}


def to_json(value: Any) -> Any:
    """Return a value of an explanation as data for JSON."""
    if isinstance(value, Gate | Param):
        return _declaration(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return fields_to_json(value)
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def _declaration(item: Gate | Param) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": item.name,
        "owner": item.owner,
        "shape": shape_text(item),
        "range": str(item.range),
        "init": list(item.init) if isinstance(item.init, tuple) else item.init,
    }
    if isinstance(item, Gate):
        return {**entry, "per_association": item.per_association}
    return {**entry, "draw": item.draw, "learned": item.learned}


def shape_text(item: Gate | Param) -> str:
    """Return the shape of a gate or param, such as ``[B, T, H, K]``."""
    return f"[{', '.join(('B, T, H' if isinstance(item, Gate) else 'H', *item.axes))}]"
