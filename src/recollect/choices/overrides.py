"""Checks of the methods that a member overrides: their parameters and their results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from recollect.choices.member import Member
from recollect.fields import as_int
from recollect.messages import RecipeError

__all__ = ["check_override", "check_shape", "check_weight_shapes"]


def check_override(
    cls: type[Member],
    name: str,
    parameters: str,
    returns: str = "",
    shape: Callable[..., tuple[int, ...]] | None = None,
) -> None:
    """Check the signature of a method that a class defines, and the shape of its results.

    ``__init_subclass__`` calls this function. Inherited methods are not checked.
    """
    method = cls.__dict__.get(name)
    if not inspect.isfunction(method):
        return
    signature, title = inspect.signature(method), f"{cls.choice}.{cls.__name__}.{name}"
    try:
        signature.bind(*range(1 + len(parameters.split(", "))))
    except TypeError:
        actual = ", ".join(str(one) for one in list(signature.parameters.values())[1:])
        raise RecipeError(f"{title} must take ({parameters}), not ({actual})") from None
    if shape is None:
        return

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        return check_shape(title, result, shape(*args, **kwargs), returns)

    setattr(cls, name, wrapper)


def check_shape(title: str, result: Any, shape: tuple[int, ...], returns: str) -> Any:
    """Return the result of a member's method; raise unless it is a tensor of the given shape."""
    if isinstance(result, Tensor) and result.shape == shape:
        return result
    other = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise RecipeError(
        f"{title} must return {returns}: expected a tensor of shape {tuple(shape)}, not {other}"
    )


def check_weight_shapes(title: str, shapes: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a memory's weights as tuples; raise unless they are sizes of tensors."""
    try:
        sizes = tuple(tuple(as_int(size) for size in shape) for shape in shapes)
    except TypeError:
        sizes = ()
    if sizes and all(size is not None and size >= 1 for shape in sizes for size in shape):
        return sizes  # type: ignore[return-value]  # no size is None
    raise RecipeError(
        f"{title}.shapes must return one tuple of sizes for each of its weights, such as "
        f"((V, F),), and not {shapes!r}"
    )
