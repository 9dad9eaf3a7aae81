"""Names of arguments in messages: those that the user wrote, wherever the check stands."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["hinted", "named_arguments", "nearest", "shown", "suggests", "word_for", "worded"]

_WORDS: ContextVar[Mapping[str, str]] = ContextVar("words", default={})  # noqa: B039


@contextmanager
def worded(words: Mapping[str, str]) -> Iterator[None]:
    """Inside, messages name arguments by other words; as a decorator, during every call.

    These nest: a layer's ``d_model`` is a model's ``hidden_size``, which is ``width`` in a plan.

    Args:
        words: by the name that the code inside has; empty for what cannot be given out here.

    Examples:
        >>> from recollect.wording import word_for, worded
        >>> with worded({"hidden_size": "width"}), worded({"d_model": "hidden_size"}):
        ...     word_for("d_model")
        'width'
    """
    outer = _WORDS.get()
    inner = {name: outer.get(word, word) for name, word in words.items()}
    token = _WORDS.set({**outer, **inner})
    try:
        yield
    finally:
        _WORDS.reset(token)


def word_for(name: str, otherwise: str | None = None) -> str:
    """What the user calls an argument.

    Args:
        name: that the code has for it.
        otherwise: where nobody has said; the name itself if omitted.
    """
    return _WORDS.get().get(name, name if otherwise is None else otherwise)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 80, 80, 60


def nearest(name: str, known: Sequence[str]) -> str:
    """What to say beside a name that is not known: the nearest one, or all there are.

    Args:
        name: as it was written.
        known: the names that there are.

    Examples:
        >>> from recollect.wording import nearest
        >>> nearest("memmory", ["memory", "bias"]), nearest("x", ["memory", "bias"])
        ("did you mean 'memory'?", 'it has memory, bias')
    """
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it has {', '.join(known)}" if known else "it has none"


def suggests(module: str, known: Sequence[str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``, which tells who mistypes a name the nearest one.

    Checkers of types must not see it: to them a module that has one has every name.

    Args:
        module: its name.
        known: the names that it has.

    Examples:
        >>> rc.bias.Hubber
        Traceback (most recent call last):
        AttributeError: ... has no attribute 'Hubber'; did you mean 'Huber'?
    """

    def __getattr__(name: str) -> Any:
        near = nearest(name, known)
        hint = f"; {near}" if near.startswith("did") and name[:1] != "_" else ""
        # With a name that is given Python does not look for a near one itself, and say it twice.
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return __getattr__


def shown(value: object) -> str:
    """A value as a message writes it: as Python does, cut where it is long.

    Args:
        value: of any kind; a number of more digits than a message holds is said by their count.

    Examples:
        >>> from recollect.wording import shown
        >>> shown("gla"), shown(10**400)
        ("'gla'", 'a number of about 401 digits')
    """
    if isinstance(value, int) and value.bit_length() > 128:
        # Python refuses to write out integers of more than 4,300 digits.
        return f"a number of about {int(value.bit_length() * 0.30103) + 1:,} digits"
    return _SHORT.repr(value)


Call = TypeVar("Call", bound=Callable[..., Any])


def hinted(call: Call) -> Call:
    """Decorator over a function: what it has no argument for is refused, with the nearest.

    Args:
        call: without ``**`` arguments; its signature stays readable.

    Raises:
        TypeError: when it is called, as Python itself has it.

    Examples:
        >>> from recollect.wording import hinted
        >>> @hinted
        ... def scaled(x, *, factor=2):
        ...     return factor * x
        >>> scaled(1, factr=3)
        Traceback (most recent call last):
        TypeError: scaled has no argument 'factr'; did you mean 'factor'?
    """
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    title = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in names:
                raise TypeError(f"{title} has no argument {name!r}; {nearest(name, names)}")
        return call(*args, **given)

    return checked  # type: ignore[return-value]


Made = TypeVar("Made", bound=type[Any])


def named_arguments(cls: Made) -> Made:
    """Class decorator over a dataclass: what it has no field for is refused, with the nearest.

    A class that takes its arguments in a way of its own keeps it.

    Raises:
        TypeError: when an instance is made, as Python itself has it.
    """
    made = cls.__init__
    _, *takes = inspect.signature(made).parameters.values()
    if any(one.kind is not one.KEYWORD_ONLY for one in takes):
        return cls
    names = [one.name for one in takes]

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if args:
            first = f", such as {cls.__name__}({names[0]}=...)" if names else ""
            raise TypeError(f"{cls.__name__} takes its arguments by name{first}")
        for name in given:
            if name not in names:
                raise TypeError(f"{cls.__name__} has no argument {name!r}; {nearest(name, names)}")
        made(self, **given)

    cls.__init__ = __init__
    return cls
