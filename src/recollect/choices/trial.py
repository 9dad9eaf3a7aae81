"""What a member's own code gives, tried once on a few numbers when the member is made.

Members are known here by what is asked of them alone, as they themselves import this file.

Code that raises is not judged: it may be written for other sizes or another device, and its own
call will say. That it asks for a number which nobody declared is said, because no call has it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from recollect.fields import as_whole

__all__ = ["Handed", "check_forward", "check_phi", "check_shapes", "outside", "tried", "undeclared"]

SIZE = 4
Shapes = tuple[tuple[int, ...], ...]


class Handed(dict[str, Any]):
    """Numbers by name, and what was asked for beside them; other tables may lack keys too."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.lacks: list[str] = []

    def __missing__(self, name: str) -> Any:
        self.lacks.append(name)
        raise KeyError(name)


@contextmanager
def outside() -> Generator[None]:
    """As outside of whatever a recipe is made in: inference mode, a device context, autocast.

    What is drawn at random there changes nothing of what is drawn later.
    """
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield


def tried(find: Any, *given: Any) -> str | None:
    """What a trial found, remembered for members that are equal; ``None`` where none can be made.

    Args:
        find: the trial, under `functools.lru_cache`.
        given: the member, and what else the trial takes.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        hash(given[0])
    except TypeError:  # a member of one's own
        find = find.__wrapped__
    try:
        return find(*given)
    except RuntimeError:  # in a transform of torch.func, or a mode without numbers: not now
        return None


def undeclared(given: Handed, what: str, *, kind: str = "token") -> str | None:
    """What to say of code that asked for a number by a name which it does not declare.

    Args:
        given: the numbers that it was handed.
        what: how it is named, e.g. ``"bias.Mine.loss"``.
        kind: how it might be declared.
    """
    if not given.lacks:
        return None
    name = given.lacks[0]
    has = f"it declares {', '.join(sorted(given))}" if given else "it declares none"
    return (
        f"{what} reads the number {name!r}, and {has}: declare it as a field, such as "
        f'{name} = rc.quantity("{kind}")'
    )


def check_shapes(title: str, shapes: object) -> tuple[Shapes, str | None]:
    """The shapes of a memory's weights as tuples, or what is wrong with them.

    Args:
        title: of the memory.
        shapes: what its `shapes` returned.
    """
    try:
        made = [[as_whole(size) for size in shape] for shape in shapes]  # type: ignore[union-attr,attr-defined]
    except TypeError:
        made = []
    stated = tuple(tuple(size for size in shape if size is not None) for shape in made)
    real = all(size >= 1 for shape in stated for size in shape)
    if stated and real and list(map(len, stated)) == list(map(len, made)):
        return stated, None
    return (), (
        f"{title}.shapes must return one tuple of sizes for each of its weights, such as "
        f"((V, F),), and not {shapes!r}"
    )


def _too_small(stated: Any) -> bool:
    """Whether a trial of these few channels leaves a map without any, as a quarter of them may."""
    shapes = stated if isinstance(stated, tuple) else ()
    return any(size == 0 for shape in shapes if isinstance(shape, tuple) for size in shape)


def _params(member: Any, sizes: Mapping[str, int]) -> Handed | None:
    """A member's params of one head; ``None`` where an axis is not known here."""
    found = Handed({})
    for param in member.params():
        if not set(param.axes) <= sizes.keys():
            return None
        start = param.init[0] if isinstance(param.init, tuple) else param.init
        shape = [1, *(sizes[axis] for axis in param.axes)]
        found[param.name] = torch.full(shape, float(start or 0.5))
    return found


def check_forward(memory: Any) -> str | None:
    """What is wrong with a memory that should give one vector of V numbers for every key.

    That is its `shapes`, what its `forward` gives, or a param that it does not declare.
    """
    return tried(_forward, memory)


def check_phi(features: Any) -> str | None:
    """What is wrong with a map that should give as many features as it declares.

    That is what its `phi` gives, or a param that it does not declare.
    """
    return tried(_phi, features)


@lru_cache(maxsize=512)
def _forward(memory: Any) -> str | None:
    with outside():
        try:
            stated = memory.shapes(SIZE, SIZE)
        except Exception:
            return None
        if _too_small(stated):
            return None
        shapes, wrong = check_shapes(memory.title, stated)
        params = _params(memory, {"K": SIZE, "F": SIZE, "V": SIZE, "J": 1})
        if wrong is not None or params is None:
            return wrong
        weights = [torch.full((1, 1, *shape), 0.5) for shape in shapes]
        x = torch.full((1, 1, 3, SIZE), 0.5)
        what = f"{memory.title}.forward"
        try:
            y = memory.forward(weights, x, x, params)
        except Exception:
            return undeclared(params, what, kind="static")
        return _vectors(y, what, x.shape, "[B, H, N, V]")


@lru_cache(maxsize=512)
def _phi(features: Any) -> str | None:
    with outside():
        try:
            F, axes = features.dim(SIZE), features.axes(SIZE)
        except Exception:
            return None
        if F == 0:  # of a trial this small
            return None
        params = _params(features, {**axes, "K": SIZE, "F": F})
        if params is None:
            return None
        x, position = torch.full((1, 3, 1, 2, SIZE), 0.5), torch.arange(3)[None]
        what = f"{features.title}.phi"
        try:
            y = features.phi(x, params, "key", position)
        except Exception:
            return undeclared(params, what, kind="static")
        return _vectors(y, what, (*x.shape[:-1], F), f"[B, T, H, N, F] with F = dim({SIZE}) = {F}")


def _vectors(y: Any, what: str, shape: tuple[int, ...], said: str) -> str | None:
    if isinstance(y, Tensor) and y.shape == shape:
        return None
    found = f"{tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
    return f"{what} must return a tensor {said}, here {tuple(shape)}, and not {found}"
