"""Checks of the methods that a member overrides, beyond those that every call makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.features.base import Features
from recollect.choices.member import Member
from recollect.choices.memory.base import Memory
from recollect.choices.overrides import check_weight_shapes
from recollect.choices.retention.base import Retention
from recollect.fields import Param, Range
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import require
from recollect.testing.declared import normal
from recollect.testing.inputs import draw_params

__all__ = ["check_user_code", "sample_numbers"]

ONE = slice(1, 2), slice(2, 3)
"""One of the 2 × 3 associations or maps that the methods are called with."""


class _RecordingDict(dict[str, Any]):
    """Values by name, which records the names that are missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.missing: list[str] = []

    def __missing__(self, name: str) -> Any:
        self.missing.append(name)
        raise KeyError(name)


def check_user_code(member: Member) -> str | None:
    """Overridden methods read declared numbers only, and treat each association or map alone."""
    if isinstance(member, Bias):
        p, v = normal(2, 3, 4, seed=1).requires_grad_(), normal(2, 3, 4, seed=2)
        gates = sample_numbers(member, (2, 3), 4)
        for name in ("loss", "error"):
            if getattr(type(member), name) is not getattr(Bias, name):
                value = v.clone().requires_grad_(name == "error")  # a loss depends on p
                _check_independence(member, name, (p, value), gates)
    elif isinstance(member, Retention):
        A = normal(2, 3, 4, 5, seed=1).requires_grad_()
        gates = sample_numbers(member, (2, 3, 1), 1)
        _check_independence(member, "link", (A.clone(),), gates)
    elif isinstance(member, Memory) and type(member).forward is not Memory.forward:
        shapes = check_weight_shapes(member.title, member.shapes(4, 4))
        weights = [normal(1, 1, *shape, seed=3) for shape in shapes]
        x, params = normal(1, 1, 3, 4, seed=1), _sample_params(member, member.axes(4, 4, 4))
        _call(member, "forward", lambda *args: member.forward(weights, x, *args), (x,), params)
    elif isinstance(member, Features) and type(member).phi is not Features.phi:
        x, position = normal(1, 3, 1, 2, 4, seed=1), torch.arange(3)[None]
        params = _sample_params(member, {**member.axes(4), "F": member.dim(4)})
        _call(member, "phi", lambda p: member.phi(x, p, "key", position), (), params)
    else:
        return "it has no such method"
    return None


def _call(
    member: Member,
    name: str,
    function: Callable[..., Any],
    args: tuple[Tensor, ...],
    values: Mapping[str, Tensor],
) -> Any:
    """Call a method with values by name; raise if it reads a name that the member lacks."""
    recorded = _RecordingDict(values)
    try:
        return function(*args, recorded)
    except KeyError:
        if not recorded.missing:
            raise
    missing, kind = recorded.missing[0], "input" if name in ("loss", "error", "link") else "learned"
    has = f"it declares {', '.join(sorted(values))}" if values else "it declares none"
    raise AssertionError(
        f"{member.title}.{name} reads the quantity {missing!r}, and {has}: declare it as a field, "
        f'such as {missing} = rc.quantity("{kind}")'
    )


def _check_independence(
    member: Member, name: str, args: tuple[Tensor, ...], values: Mapping[str, Tensor]
) -> None:
    """Check the gradient and dtype of a result, and that one entry does not depend on others."""
    method, title = getattr(member, name), f"{member.title}.{name}"
    copies = [x.detach().clone() for x in args]
    result = _call(member, name, method, args, values)
    require(
        all(torch.equal(x, old) for x, old in zip(args, copies, strict=True)),
        f"{title} changes its argument in place: return a new tensor",
    )
    require(
        result.requires_grad,
        f"{title} carries no gradient: write it in operations that autograd follows from its "
        "arguments to its result, without detach, item or no_grad",
    )
    require(
        result.dtype == args[0].dtype,
        f"{title} must return a tensor of the dtype of its argument, {args[0].dtype}, not "
        f"{result.dtype}",
    )
    one = {key: x[ONE] for key, x in values.items()}
    single = _call(member, name, method, tuple(x[ONE].clone() for x in copies), one)
    tolerance = math.sqrt(torch.finfo(result.dtype).eps)
    advice = "the last two axes of A" if name == "link" else "the last axis"
    require(
        torch.allclose(result[ONE], single, tolerance, tolerance, equal_nan=True),
        f"{title} returns another value for an entry of a batch than for the entry alone: reduce "
        f"over {advice} only",
    )


def _sample_params(member: Memory | Features, axes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return random params of a memory or feature map, each ``[1, ...]``."""
    sizes = {**Recipe().axes(4, 4), **axes}
    return draw_params(member, sizes, torch.Generator().manual_seed(0))


def sample_numbers(
    member: Bias | Retention, leading: tuple[int, ...], V: int, seed: int = 0
) -> dict[str, Tensor]:
    """Return random quantities of a member inside their ranges, ``[*leading, 1 or V]`` by name."""
    g = torch.Generator().manual_seed(seed)
    numbers = {
        name: torch.full((*leading, 1), value, dtype=torch.float64)
        for name, value in member.constants().items()
    }
    for item in (*member.gates(), *member.params()):
        start = item.init[0] if isinstance(item.init, tuple) else item.init
        u = torch.rand(*leading, V if item.axes else 1, generator=g, dtype=torch.float64)
        log = isinstance(item, Param) and item.is_log
        value = start + u * (_other_end(item.range, start) - start)
        numbers[f"log_{item.name}" if log else item.name] = value.log() if log else value
    return numbers


def _other_end(bounds: Range, start: float) -> float:
    """Return a number of an interval: up to 1 beyond the start, or halfway to the bound."""
    if bounds.high is None or bounds.high > start:
        return start + (1.0 if bounds.high is None else min(1.0, (bounds.high - start) / 2))
    return start - (1.0 if bounds.low is None else min(1.0, (start - bounds.low) / 2))
