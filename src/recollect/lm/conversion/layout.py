"""Layouts of published models: the options of their ``config.json``, and their tensors.

A `Layout` relates parts of published tensors to parts of ours, one to one. Each `Piece` names a
part on both sides and the transforms between them, which are exact in both directions. So one
table of pieces converts both ways, and the shapes of published tensors follow from ours.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from recollect.lm.model.config import BASE_FIELDS, RecollectConfig
from recollect.messages import short_repr

__all__ = [
    "NEGATE",
    "QUANTIZED",
    "TAPS",
    "Layout",
    "Part",
    "Piece",
    "Transform",
    "gated_mlp_pieces",
    "parts",
    "reshape",
]

QUANTIZED = "the weights are quantised, and a conversion needs full weights"


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A map of tensors that loses no bit, and its inverse."""

    to_ours: Callable[[Tensor], Tensor]
    to_published: Callable[[Tensor], Tensor]


NEGATE = Transform(to_ours=Tensor.neg, to_published=Tensor.neg)

TAPS = Transform(  # of a depthwise convolution: [D, 1, w] <-> [w, D]
    to_ours=lambda x: x.squeeze(1).T, to_published=lambda x: x.T.unsqueeze(1)
)


def reshape(published: tuple[int, ...], ours: tuple[int, ...]) -> Transform:
    """Return the transform between two shapes of the same entries."""
    return Transform(to_ours=lambda x: x.reshape(ours), to_published=lambda x: x.reshape(published))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of a tensor along one dimension."""

    name: str  # name of the full tensor
    start: int = 0  # first index of the range
    stop: int | None = None  # index after the last one; None for the end of the tensor
    dim: int = 0  # dimension of the range

    def of(self, x: Tensor) -> Tensor:
        """Return this part of a tensor."""
        stop = x.shape[self.dim] if self.stop is None else self.stop
        return x.narrow(self.dim, self.start, stop - self.start)


def parts(name: str, sizes: Iterable[int], *, dim: int = 0) -> list[Part]:
    """Return the parts of a tensor that have these sizes and follow each other."""
    ends = [0, *itertools.accumulate(sizes)]
    return [
        Part(name=name, start=start, stop=stop, dim=dim) for start, stop in itertools.pairwise(ends)
    ]


@dataclass(frozen=True)
class Piece:
    """A part of a published tensor, and the part of our tensor with the same numbers."""

    published: Part | str  # part of the published tensor; a name for the full tensor
    ours: Part | str  # part of our tensor; a name for the full tensor
    transforms: tuple[Transform, ...] = ()  # maps from the published part to ours, in order

    @property
    def source(self) -> Part:
        """The published part."""
        return _as_part(self.published)

    @property
    def target(self) -> Part:
        """Our part."""
        return _as_part(self.ours)

    def to_ours(self, x: Tensor) -> Tensor:
        """Transform the published part to ours."""
        for transform in self.transforms:
            x = transform.to_ours(x)
        return x

    def to_published(self, x: Tensor) -> Tensor:
        """Transform our part to the published one."""
        for transform in reversed(self.transforms):
            x = transform.to_published(x)
        return x

    def within(self, published: str, ours: str) -> Piece:
        """Return this piece with prefixes before the names of its tensors."""
        return replace(
            self,
            published=replace(self.source, name=published + self.source.name),
            ours=replace(self.target, name=ours + self.target.name),
        )


def gated_mlp_pieces(config: RecollectConfig) -> list[Piece]:
    """Return the pieces of a block's gated MLP, whose first two maps are one tensor of ours."""
    width = config.intermediate_size
    gate_proj, up_proj = parts("mlp.gate_up.weight", [width, width])
    return [
        Piece("mlp.gate_proj.weight", gate_proj),
        Piece("mlp.up_proj.weight", up_proj),
        Piece("mlp.down_proj.weight", "mlp.down.weight"),
    ]


def _as_part(part: Part | str) -> Part:
    return Part(name=part) if isinstance(part, str) else part


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published layout of models."""

    model_type: str  # model_type of its config.json
    architecture: str  # name of the class of its language model
    # options of its config.json that shape the model, and their default values
    defaults: Mapping[str, Any]
    # options that can have this value only
    required: Mapping[str, Any] = field(default_factory=dict)
    # options that do not change the outputs; written models have the defaults
    ignored: frozenset[str] = frozenset()
    # other names of options, which are read and written, too
    aliases: Mapping[str, str] = field(default_factory=dict)
    # returns options with one form of each value, before they are checked
    normalize: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    # prefix of names in place of "model.", in files of a part of a larger model; they are read, too
    nested_prefix: str = ""
    # prefixes of the names of published tensors that do not change the outputs
    ignored_prefixes: tuple[str, ...] = ()
    # returns our configuration of a model with these options; raises `ValueError` if there is none
    to_ours: Callable[[Mapping[str, Any]], RecollectConfig]
    # Returns the options of a model with our configuration. The caller checks that `to_ours` maps
    # them to this configuration.
    to_published: Callable[[RecollectConfig], Mapping[str, Any]]
    # yields the pieces of a model with these options and our configuration
    pieces: Callable[[Mapping[str, Any], RecollectConfig], Iterable[Piece]]

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a ``config.json`` with all defaults.

        Raises:
            ValueError: an option that is unknown, or has a value without a counterpart here.
        """
        config = self.normalize(self._without_aliases(config))
        for name, value in config.items():
            if name in self.required and _one_name(value) != _one_name(self.required[name]):
                raise ValueError(
                    f"the option {name!r} of {self.model_type} must be "
                    f"{self.required[name]!r} to be converted, not {short_repr(value)}"
                )
            if name == "quantization_config" and value is not None:
                raise ValueError(QUANTIZED)
            if name not in {*self.defaults, *self.required, *self.ignored, *BASE_FIELDS}:
                near = difflib.get_close_matches(name, self.defaults, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(
                    f"the option {name!r} is unknown to the converter of {self.model_type}{hint}: "
                    "if it has no effect on outputs, leave it out"
                )
        known = {name: config[name] for name in self.defaults if name in config}
        for name, value in known.items():
            default = self.defaults[name]
            is_token = name.endswith("token_id")  # checked by `RecollectConfig`
            if not is_token and (value is not None or default is not None):
                self._check_value(name, value, _kind(default))
        return {**self.defaults, **self.required, **known}

    def named_pieces(
        self, options: Mapping[str, Any], config: RecollectConfig, names: Iterable[str] = ()
    ) -> list[Piece]:
        """Return the pieces of a model, with the prefix that the names of its tensors have."""
        pieces = list(self.pieces(options, config))
        prefix = self.nested_prefix
        if not prefix or not any(name.startswith(prefix) for name in names):
            return pieces
        return [
            replace(
                piece,
                published=replace(
                    piece.source, name=re.sub(r"^model\.", prefix, piece.source.name)
                ),
            )
            for piece in pieces
        ]

    def _without_aliases(self, config: Mapping[str, Any]) -> dict[str, Any]:
        renamed = dict(config)
        for alias, name in self.aliases.items():
            if alias in renamed and renamed.setdefault(name, renamed[alias]) != renamed.pop(alias):
                raise ValueError(f"the options {alias!r} and {name!r} are one, and they differ")
        return renamed

    def _check_value(self, name: str, value: Any, kind: str) -> None:
        """Check that a value is of a kind, such as a number above 0."""
        is_number = isinstance(value, int | float) and type(value) is not bool
        is_valid = {
            "true or false": type(value) is bool,
            "a word": isinstance(value, str),
            "a number above 0": is_number and 0 < value < math.inf,
            "an integer above 0": type(value) is int and value > 0,
            "a list": isinstance(value, list | tuple),
            "a mapping": isinstance(value, Mapping),
        }
        if not is_valid[kind]:
            raise ValueError(
                f"the option {name!r} of {self.model_type} must be {kind}, not {short_repr(value)}"
            )


def _one_name(value: Any) -> Any:
    """Return a value with one of the two names of the activation x · sigmoid(x)."""
    return "silu" if value == "swish" else value


def _kind(default: Any) -> str:
    """Return the kind of value that an option with this default takes."""
    kinds: dict[type, str] = {bool: "true or false", str: "a word", float: "a number above 0"}
    kinds |= {list: "a list", dict: "a mapping"}
    return kinds.get(type(default), "an integer above 0")
