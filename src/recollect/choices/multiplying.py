"""Which precision products take in a stretch of a program, of whatever code runs there.

Tensor cores multiply numbers of few bits and add in float32. `multiplying` says how many bits the
products inside it take: of an engine, of a member of somebody else's package, of a module used as a
memory. It catches the functions of torch that multiply matrices (`_PRODUCTS`) where both factors
are float32. Sums, solves, norms, softmax and decays stay what they are, and so does everything of
another type: as under ``torch.set_float32_matmul_precision``, float64 is not spoken of.

Backward passes that are written out run later and elsewhere. They remember what their forward pass
was asked for (`recollect.choices.gradients.HandWritten`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from recollect.choices.products import add_product, product, recorded

__all__ = ["innermost", "multiplying", "spacing"]


class _Innermost(threading.local):
    mode: _Multiplying | None = None


innermost = _Innermost()
"""``mode`` is what was entered last in this thread and not left yet; ``None`` where nothing was."""


def spacing(dtype: torch.dtype) -> float:
    """Relative distance of neighbouring numbers, as products of this type multiply them here.

    Args:
        dtype: of the factors.
    """
    mode = innermost.mode
    if mode is None or dtype != torch.float32:
        return torch.finfo(dtype).eps
    return {"float32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7}[mode.precision]


def multiplying(precision: str | None) -> AbstractContextManager[None]:
    """Products inside take this precision; ``None`` changes nothing.

    Args:
        precision: of `recollect.choices.products.PRECISIONS`.

    Examples:
        >>> from recollect.choices.multiplying import multiplying
        >>> x = torch.tensor([[1 + 2.0**-10]])
        >>> with multiplying("bf16"):
        ...     y = x @ x
        ...
        >>> y.item(), y.dtype
        (1.0, torch.float32)
    """
    return nullcontext() if precision is None else _entered(precision)


@contextmanager
def _entered(precision: str) -> Generator[None]:
    mode = _Multiplying(precision)
    before, innermost.mode = innermost.mode, mode
    try:
        with mode:
            yield
    finally:
        innermost.mode = before


class _Multiplying(TorchFunctionMode):
    """Gives products of float32 numbers the precision that was asked for."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        multiply = _PRODUCTS.get(func)
        if multiply is not None and self is innermost.mode:  # of several, the innermost says
            found = multiply(self.precision, *args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **kwargs) if kwargs else func(*args)


# -- functions of torch that multiply matrices -----------------------------------------------------
# Each takes a precision and the function's own arguments, and gives ``None`` for what is torch's
# matter: other types than float32, and what torch refuses in its own words.


def _float32(*tensors: Any) -> bool:
    return all(isinstance(x, Tensor) and x.dtype == torch.float32 for x in tensors)


def _matmul(precision: str, x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor | None:
    if not _float32(x, y) or not (x.dim() and y.dim()):
        return None
    if x.shape[-1] != y.shape[-2 if y.dim() > 1 else -1]:
        return None
    if out is not None:
        if x.dim() == y.dim() == out.dim() == 3:
            return add_product(out, x, y, precision, beta=0, alpha=1, out=out)
        return out.copy_(_times(precision, x, y))
    return _times(precision, x, y)


def _times(precision: str, x: Tensor, y: Tensor) -> Tensor:
    """x y as ``@`` takes its axes: vectors, matrices, and leading axes that are repeated."""
    if x.dim() == y.dim() == 2 or (x.dim() == y.dim() == 3 and x.shape[0] == y.shape[0]):
        return product(x, y, precision)
    if x.dim() == 1:
        return _times(precision, x.unsqueeze(0), y).squeeze(-2 if y.dim() > 1 else 0)
    if y.dim() == 1:
        return _times(precision, x, y.unsqueeze(-1)).squeeze(-1)
    n, k, m = x.shape[-2], x.shape[-1], y.shape[-1]
    if y.dim() == 2:
        rows = x.reshape(math.prod(x.shape[:-1]), k)
        return product(rows, y, precision).view(*x.shape[:-1], m)
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    count = math.prod(lead)
    x, y = x.expand(*lead, n, k), y.expand(*lead, k, m)
    found = product(x.reshape(count, n, k), y.reshape(count, k, m), precision)
    return found.view(*lead, n, m)


def _plus(
    precision: str,
    z: Tensor,
    x: Tensor,
    y: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    out: Tensor | None = None,
) -> Tensor | None:
    """``addmm``, ``addmv`` and ``baddbmm``: beta z + alpha x y."""
    if not _float32(z, x, y):
        return None
    given = (z, x, y)
    if x.dim() == 3 and not recorded(*given) and z.shape == (*x.shape[:2], y.shape[-1]):
        return add_product(z, x, y, precision, beta=beta, alpha=alpha, out=out)
    found = _matmul(precision, x, y)
    if found is None:
        return None
    found = found if alpha == 1 else alpha * found
    if beta != 0:
        found = found + (z if beta == 1 else beta * z)
    return found if out is None else out.copy_(found)


def _plus_in_place(
    precision: str, z: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor | None:
    if not _float32(z, x, y):
        return None
    if x.dim() == 3 and not recorded(z, x, y):
        return add_product(z, x, y, precision, beta=beta, alpha=alpha, out=z)
    found = _matmul(precision, x, y)
    if found is None:
        return None
    if beta == 0:
        return z.copy_(found if alpha == 1 else alpha * found)
    return (z if beta == 1 else z.mul_(beta)).add_(found, alpha=alpha)


def _linear(precision: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    found = _matmul(precision, x, weight.mT if weight.dim() == 2 else weight)
    return found if found is None or bias is None else found + bias


def _multi_dot(precision: str, tensors: Sequence[Tensor], **rest: Any) -> Tensor | None:
    if rest or not _float32(*tensors):
        return None
    return reduce(lambda x, y: _times(precision, x, y), tensors)


# -- sums over named axes --------------------------------------------------------------------------

_Named = tuple[Tensor, str]
"""A tensor and a letter for each of its axes, none twice."""


def _einsum(precision: str, equation: Any, *operands: Any) -> Tensor | None:
    tensors = operands[0] if len(operands) == 1 and not _float32(*operands) else operands
    if not isinstance(equation, str) or len(tensors) < 2 or not _float32(*tensors):
        return None
    parts, kept = _letters(equation, [x.dim() for x in tensors])
    terms: list[_Named] = []
    for at, (x, letters) in enumerate(zip(tensors, parts, strict=True)):
        wanted = "".join([*parts[:at], *parts[at + 1 :], kept])
        terms.append(_reduced(x, letters, wanted))
    first, *rest = terms
    for at, term in enumerate(rest):
        wanted = kept + "".join(letters for _, letters in rest[at + 1 :])
        first = _contracted(precision, first, term, wanted)
    x, letters = first
    return x.permute([letters.index(a) for a in kept])


def _letters(equation: str, axes: Sequence[int]) -> tuple[list[str], str]:
    """Letters of every operand and of the result; an ellipsis stands for capital Greek ones."""
    given, arrow, kept = equation.replace(" ", "").partition("->")
    parts = given.split(",")
    named = [len(part.replace("...", "")) for part in parts]
    sizes = [n - m for part, n, m in zip(parts, axes, named, strict=True) if "..." in part]
    rest = "".join(chr(0x391 + i) for i in range(max(sizes, default=0)))
    written = [
        part.replace("...", rest[len(rest) - (n - m) :])
        for part, n, m in zip(parts, axes, named, strict=True)
    ]
    if not arrow:
        seen = "".join(parts).replace("...", "")
        kept = "..." + "".join(sorted(a for a in set(seen) if seen.count(a) == 1))
    return written, kept.replace("...", rest)


def _reduced(x: Tensor, letters: str, wanted: str) -> _Named:
    """Diagonals of letters that stand twice, and sums over those that nobody wants."""
    left = "".join(dict.fromkeys(a for a in letters if a in wanted))
    if left == letters:
        return x, letters
    names = {a: chr(ord("a") + i) for i, a in enumerate(dict.fromkeys(letters))}
    said = ("".join(names[a] for a in part) for part in (letters, left))
    return torch.einsum("->".join(said), x), left


def _contracted(precision: str, one: _Named, other: _Named, wanted: str) -> _Named:
    """One product of two tensors, summed over the letters of both that nobody wants."""
    (x, a), (y, b) = one, other
    both = [c for c in a if c in b]
    summed = [c for c in both if c not in wanted]
    kept = [c for c in both if c in wanted]
    left, right = [c for c in a if c not in b], [c for c in b if c not in a]
    x = x.permute([a.index(c) for c in (*kept, *left, *summed)])
    y = y.permute([b.index(c) for c in (*kept, *summed, *right)])
    letters = "".join((*kept, *left, *right))
    n, s = len(kept), len(summed)
    lead = torch.broadcast_shapes(x.shape[:n], y.shape[:n])
    inner = torch.broadcast_shapes(x.shape[x.dim() - s :], y.shape[n : n + s])
    rows, columns = x.shape[n : x.dim() - s], y.shape[n + s :]
    x, y = x.expand((*lead, *rows, *inner)), y.expand((*lead, *inner, *columns))
    count, k = math.prod(lead), math.prod(inner)
    if not summed:  # nothing is added up, so nothing is a matter of tensor cores
        x = x.reshape((*lead, *rows, *[1] * len(right)))
        return x * y.reshape((*lead, *[1] * len(left), *columns)), letters
    x = x.reshape(count, math.prod(rows), k)
    found = product(x, y.reshape(count, k, math.prod(columns)), precision)
    return found.view((*lead, *rows, *columns)), letters


def _tensordot(
    precision: str, a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None
) -> Tensor | None:
    if not _float32(a, b) or out is not None or isinstance(dims, Tensor):
        return None
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    pairs = [[int(i) % x.dim() for i in side] for side, x in zip(dims, (a, b), strict=True)]
    x = [chr(ord("a") + i) for i in range(a.dim())]
    y = [chr(ord("A") + i) for i in range(b.dim())]
    for i, j in zip(*pairs, strict=True):
        y[j] = x[i]
    kept = "".join(c for c in (*x, *y) if (c in x) != (c in y))
    return _einsum(precision, f"{''.join(x)},{''.join(y)}->{kept}", a, b)


def _inner(precision: str, x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor | None:
    if not (_float32(x, y) and x.dim() and y.dim()):
        return None
    return _tensordot(precision, x, y, ([-1], [-1]), out)


# -- attention -------------------------------------------------------------------------------------


def _attention(
    precision: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Fused where a mask is not added; what is added to logits stays float32."""
    if precision != "bf16" or not _float32(query, key, value):
        return None
    if attn_mask is None or attn_mask.dtype == torch.bool:
        q, k, v = (x.to(torch.bfloat16) for x in (query, key, value))
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found.to(torch.float32)
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    logits = _times(precision, query * (scale or query.shape[-1] ** -0.5), key.mT) + attn_mask
    weights = functional.dropout(logits.softmax(-1), dropout_p)
    return _times(precision, weights, value)


_PRODUCTS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm), _matmul),
    **dict.fromkeys((torch.mv, torch.dot), _matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), _matmul),
    **dict.fromkeys((Tensor.mv, Tensor.dot), _matmul),
    **dict.fromkeys((torch.addmm, torch.addmv, torch.baddbmm), _plus),
    **dict.fromkeys((Tensor.addmm, Tensor.addmv, Tensor.baddbmm), _plus),
    **dict.fromkeys((Tensor.addmm_, Tensor.addmv_, Tensor.baddbmm_), _plus_in_place),
    **dict.fromkeys((torch.inner, Tensor.inner), _inner),
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    torch.linalg.multi_dot: _multi_dot,
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
}
"""What is caught; convolutions, distances and attention modules of torch are not."""
