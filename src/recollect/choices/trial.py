"""What a member's own code gives, tried once on a few numbers when the member is made.

Members are known here by what is asked of them alone, as they themselves import this file.

Code that raises is not judged: it may be written for other sizes or another device, and its own
call will say. That it asks for a number which nobody declared is said, because no call has it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from recollect.fields import Range, as_whole

__all__ = [
    "Handed",
    "accepts",
    "check_forward",
    "check_link",
    "check_phi",
    "check_shapes",
    "outside",
    "sample_numbers",
    "tried",
    "undeclared",
]

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


def check_link(retention: Any) -> str | None:
    """Return the fault of a retention's `link` in one sentence, or ``None``.

    Args:
        retention: the retention, whose `link` is tried on six maps.
    """
    return tried(_link, retention)


@lru_cache(maxsize=512)
def _link(retention: Any) -> str | None:
    with outside():
        leading, what = (2, 3), f"{retention.title}.link"
        dtype = torch.get_default_dtype()
        numbers = sample_numbers(retention, (*leading, 1), 1)
        gates = Handed({name: x.to(dtype) for name, x in numbers.items()})
        g = torch.Generator().manual_seed(0)
        maps = torch.randn(*leading, SIZE, SIZE + 1, generator=g, dtype=dtype)
        if type(maps) is not Tensor:
            raise RuntimeError("a mode without numbers")
        A = maps.clone().requires_grad_().clone()  # no leaf, so that a change in place is seen
        if not accepts(retention.link, A, gates):
            return f"{what} must take (A, gates), not {inspect.signature(retention.link)}"
        try:
            W = retention.link(A, gates)
            own_gates = {name: x[1:, 2:] for name, x in gates.items()}
            single_map = retention.link(maps[1:, 2:].clone(), own_gates)
        except Exception:
            return undeclared(gates, what)
        must = f"{what} must return W, a tensor of the shape and dtype of A"
        if not isinstance(W, Tensor):
            return f"{must}, not {type(W).__name__}"
        if W.shape != maps.shape or W.dtype != dtype:
            expected = f"{tuple(maps.shape)} of {dtype}"
            return f"{must}, here {expected}, not {tuple(W.shape)} of {W.dtype}"
        if not torch.equal(A, maps):
            return f"{what} changes A in place: return W as a new tensor and leave A as it is"
        if not W.requires_grad:
            return (
                f"{what} carries no gradient: write it in operations that autograd follows from A "
                "to W, without detach, item or no_grad"
            )
        tolerance = math.sqrt(torch.finfo(dtype).eps)
        if not torch.allclose(W[1:, 2:], single_map, tolerance, tolerance, equal_nan=True):
            return (
                f"{what} gives a map another W alone than next to the maps of other sequences and "
                "heads: reduce over the last two axes of A only, with keepdim=True"
            )
    return None


def accepts(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function accepts the arguments; true if it states no signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a scripted function
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def sample_numbers(
    member: Any, leading: tuple[int, ...], V: int, seed: int = 0
) -> dict[str, Tensor]:
    """Numbers of a bias or a retention inside their ranges: ``[*leading, 1 or V]`` by name.

    Args:
        member: the bias or retention.
        leading: axes of the associations.
        V: value channels.
        seed: of the draw.
    """
    g = torch.Generator().manual_seed(seed)
    numbers = {
        name: torch.full((*leading, 1), value, dtype=torch.float64)
        for name, value in member.constants().items()
    }
    for item in (*member.gates(), *member.params()):
        start = item.init[0] if isinstance(item.init, tuple) else item.init
        u = torch.rand(*leading, V if item.axes else 1, generator=g, dtype=torch.float64)
        log = item.name in member.logs()
        value = start + u * (_inside(item.range, start) - start)
        numbers[f"log_{item.name}" if log else item.name] = value.log() if log else value
    return numbers


def _inside(span: Range, start: float) -> float:
    """Another number of an interval: up to one beyond ``start``, or halfway to the border."""
    if span.high is None or span.high > start:
        return start + (1.0 if span.high is None else min(1.0, (span.high - start) / 2))
    return start - (1.0 if span.low is None else min(1.0, (start - span.low) / 2))
