"""Objects that become objects of a subclass, and still copy and pickle."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["original_class", "specialize"]


@functools.cache
def _subclass(mixin: type, base: type) -> type:
    namespace = {
        "__module__": mixin.__module__,
        "__reduce_ex__": _reduce,
        "_mixin": mixin,
        "_original": base,
    }
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), namespace)


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle an object by its original class, of which the subclass is made again."""
    return _rebuild, (type(self)._mixin, type(self)._original), self.__getstate__()


def _rebuild(mixin: type, base: type) -> Any:
    cls: Any = _subclass(mixin, base)
    return cls.__new__(cls)


def specialize(instance: Any, mixin: type) -> None:
    """Turn an object into one of a subclass of the mixin and its own class, unless it is one.

    Python assigns a class only if the mixin and the class derive from a common base: `object` or
    `abc.ABC`.
    """
    if not isinstance(instance, mixin):
        instance.__class__ = _subclass(mixin, type(instance))


def original_class(instance: Any) -> type:
    """Return the class of an object before `specialize`."""
    return type(instance)._original  # type: ignore[no-any-return]
