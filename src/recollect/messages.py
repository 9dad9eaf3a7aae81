"""Errors and their texts: argument names as the user wrote them, values, suggestions."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = [
    "RecipeError",
    "UnregisteredMemberError",
    "argument_name",
    "renamed_arguments",
    "short_repr",
    "suggest_arguments",
    "suggestion",
]


class RecipeError(ValueError):
    """Error of a recipe or member without a meaning, with the conflict and a remedy.

    Examples:
        >>> rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=-1.0))
        Traceback (most recent call last):
            ...
        recollect.messages.RecipeError: algorithm.GradientDescent(lr=...) must be ...
    """


class UnregisteredMemberError(RecipeError):
    """Error of a recipe with a member whose module has not been imported."""


_NAMES: ContextVar[Mapping[str, str]] = ContextVar("names", default={})  # noqa: B039


@contextmanager
def renamed_arguments(names: Mapping[str, str]) -> Iterator[None]:
    """Rename arguments in messages; as a decorator, during every call.

    Renamings nest: a layer's ``d_model`` is a model's ``hidden_size``, a plan's ``width``.

    Args:
        names: new name by the name in the inner code; empty for an argument that cannot be given.

    Examples:
        >>> from recollect.messages import argument_name, renamed_arguments
        >>> with renamed_arguments({"hidden_size": "width"}):
        ...     with renamed_arguments({"d_model": "hidden_size"}):
        ...         argument_name("d_model")
        'width'
    """
    outer = _NAMES.get()
    inner = {name: outer.get(new, new) for name, new in names.items()}
    token = _NAMES.set({**outer, **inner})
    try:
        yield
    finally:
        _NAMES.reset(token)


def argument_name(name: str, default: str | None = None) -> str:
    """Return the user's name of an argument, by default its own."""
    return _NAMES.get().get(name, name if default is None else default)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 80, 80, 60


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return the known name closest to an unknown one, or the list of known names.

    Examples:
        >>> from recollect.messages import suggestion
        >>> suggestion("memmory", ["memory", "bias"]), suggestion("x", ["memory", "bias"])
        ("did you mean 'memory'?", 'it has memory, bias')
    """
    near = difflib.get_close_matches(name, known, n=1)
    near = near or [word for word in name.split("_") if word in known]  # initial_state: state
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it has {', '.join(known)}" if known else "it has none"


def short_repr(value: object) -> str:
    """Return the repr of a value, truncated; of a huge integer its number of digits.

    Examples:
        >>> from recollect.messages import short_repr
        >>> short_repr("gla"), short_repr(10**400)
        ("'gla'", 'a number of about 401 digits')
    """
    if isinstance(value, int) and value.bit_length() > 128:
        # Python refuses to write out integers of more than 4,300 digits.
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"
    return _SHORT.repr(value)


Call = TypeVar("Call", bound=Callable[..., Any])


def suggest_arguments(call: Call) -> Call:
    """Decorate a function or a dataclass: an unknown argument raises with the closest known name.

    Args:
        call: a function without ``**`` arguments, or a keyword-only dataclass.

    Examples:
        >>> from recollect.messages import suggest_arguments
        >>> @suggest_arguments
        ... def scaled(x, *, factor=2):
        ...     return factor * x
        >>> scaled(1, factr=3)
        Traceback (most recent call last):
        TypeError: scaled has no argument 'factr'; did you mean 'factor'?
    """
    function = call.__init__ if isinstance(call, type) else call
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    keywords_only = isinstance(call, type) and all(p.kind is p.KEYWORD_ONLY for p in parameters)
    if isinstance(call, type) and not keywords_only:
        return call  # type: ignore[return-value]  # a constructor of its own
    names = [p.name for p in parameters]
    title = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if keywords_only and len(args) > 1:
            example = f", such as {title}({names[0]}=...)" if names else ""
            raise TypeError(f"{title} takes its arguments by name{example}")
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{title} has no argument {name!r}; {suggestion(name, names)}")
        return function(*args, **kwargs)

    if isinstance(call, type):
        call.__init__ = checked
        return call  # type: ignore[return-value]
    return checked  # type: ignore[return-value]
