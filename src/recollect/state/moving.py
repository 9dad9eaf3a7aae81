"""What all states have in common: how they are moved, as tensors are, and how they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recollect.wording import shown

__all__ = ["brief", "mover"]


def mover(
    where: tuple[object, ...],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[Tensor], Tensor]:
    """What moves each tensor of a state, as `torch.Tensor.to` does.

    Args:
        where: a device, a dtype, or a tensor that has both, in the order in which they were given.
        device: by name.
        dtype: of floating-point tensors; others keep theirs.

    Raises:
        ValueError: something else, or one of them twice.
    """
    found: dict[str, Any] = {"device": device, "dtype": dtype}
    for one in where:
        if isinstance(one, Tensor):
            named = {"device": one.device, "dtype": one.dtype}
        elif isinstance(one, torch.dtype):
            named = {"dtype": one}
        elif isinstance(one, torch.device | str | int) and not isinstance(one, bool):
            named = {"device": one}
        else:
            raise ValueError(
                "state.to takes a device, a dtype or a tensor, as torch's own does, not "
                f"{shown(one)}"
            )
        for name, value in named.items():
            if found[name] is not None:
                raise ValueError(f"state.to was given two of {name}: {found[name]} and {value}")
            found[name] = value
    place, kind = found["device"], found["dtype"]
    return lambda x: x.to(device=place, dtype=kind if x.is_floating_point() else None)


def brief(state: Any) -> str:
    """A state on one line: what it holds by name, tensors by type and shape and not by numbers.

    Parts that are not there are left out.

    Args:
        state: a dataclass.

    Examples:
        >>> from recollect.state.buffer import Buffer
        >>> from recollect.state.moving import brief
        >>> x = torch.zeros(1, 3, 2, 8)
        >>> buffer = Buffer(k=x, v=x[..., :4], rates={"lr": x[..., 0]}, mask=x[..., 0, 0] > 0)
        >>> print(brief(buffer))
        Buffer(k=float32[1, 3, 2, 8], v=float32[1, 3, 2, 4], rates={lr: float32[1, 3, 2]},
               mask=bool[1, 3])
    """
    parts = []
    for one in dataclasses.fields(state):
        value = getattr(state, one.name)
        if (
            one.repr
            and value is not None
            and not (isinstance(value, tuple | Mapping) and not value)
        ):
            parts.append(f"{one.name}={_brief(value)}")
    return f"{type(state).__name__}({', '.join(parts)})"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_brief(x)}" for name, x in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_brief, value))}{',' if len(value) == 1 else ''})"
    return brief(value) if dataclasses.is_dataclass(value) else repr(value)
