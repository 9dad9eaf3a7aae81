"""Precision of all matrix products inside a context.

`matmul_precision` intercepts the torch functions in `_HANDLERS` if both factors are float32, in
engines, members and modules alike. Sums, solves, norms, softmax, decays and other dtypes are not
changed. Hand-written backward passes run later and restore the precision of their forward pass
(`recollect.choices.autograd.CustomFunction`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from recollect.choices.products import add_product, needs_grad, product

__all__ = ["active", "effective_eps", "matmul_precision"]


class _ActiveMode(threading.local):
    mode: _MatmulMode | None = None


active = _ActiveMode()
"""``mode`` is the innermost mode of this thread, or ``None``."""


def effective_eps(dtype: torch.dtype) -> float:
    """Return the machine epsilon of the factors of products, under the active precision.

    Args:
        dtype: of the factors.
    """
    mode = active.mode
    if mode is None or dtype != torch.float32:
        return torch.finfo(dtype).eps
    return {"float32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-7}[mode.precision]


def matmul_precision(precision: str | None) -> AbstractContextManager[None]:
    """Set the precision of products inside the context; ``None`` has no effect.

    Args:
        precision: one of `recollect.choices.products.PRECISIONS`.

    Examples:
        >>> from recollect.choices.matmul_precision import matmul_precision
        >>> x = torch.tensor([[1 + 2.0**-10]])
        >>> with matmul_precision("bf16"):
        ...     y = x @ x
        ...
        >>> y.item(), y.dtype
        (1.0, torch.float32)
    """
    return nullcontext() if precision is None else _enter(precision)


@contextmanager
def _enter(precision: str) -> Generator[None]:
    mode = _MatmulMode(precision)
    previous, active.mode = active.mode, mode
    try:
        with mode:
            yield
    finally:
        active.mode = previous


class _MatmulMode(TorchFunctionMode):
    """Replace products of float32 tensors."""

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
        handler = _HANDLERS.get(func)
        if handler is not None and self is active.mode:  # only the innermost mode acts
            result = handler(self.precision, *args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **kwargs) if kwargs else func(*args)


# -- handlers of torch functions -------------------------------------------------------------------
# Each takes a precision and the function's arguments. It returns ``None`` for calls that torch
# handles: other dtypes, and arguments that torch refuses with its own message.


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
        return out.copy_(_broadcast_matmul(precision, x, y))
    return _broadcast_matmul(precision, x, y)


def _broadcast_matmul(precision: str, x: Tensor, y: Tensor) -> Tensor:
    """Return ``x @ y`` of vectors, matrices or batches of matrices, with broadcasting."""
    if x.dim() == y.dim() == 2 or (x.dim() == y.dim() == 3 and x.shape[0] == y.shape[0]):
        return product(x, y, precision)
    if x.dim() == 1:
        return _broadcast_matmul(precision, x.unsqueeze(0), y).squeeze(-2 if y.dim() > 1 else 0)
    if y.dim() == 1:
        return _broadcast_matmul(precision, x, y.unsqueeze(-1)).squeeze(-1)
    n, k, m = x.shape[-2], x.shape[-1], y.shape[-1]
    if y.dim() == 2:
        rows = x.reshape(math.prod(x.shape[:-1]), k)
        return product(rows, y, precision).view(*x.shape[:-1], m)
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    count = math.prod(lead)
    x, y = x.expand(*lead, n, k), y.expand(*lead, k, m)
    result = product(x.reshape(count, n, k), y.reshape(count, k, m), precision)
    return result.view(*lead, n, m)


def _addmm(
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
    if x.dim() == 3 and not needs_grad(z, x, y) and z.shape == (*x.shape[:2], y.shape[-1]):
        return add_product(z, x, y, precision, beta=beta, alpha=alpha, out=out)
    result = _matmul(precision, x, y)
    if result is None:
        return None
    result = result if alpha == 1 else alpha * result
    if beta != 0:
        result = result + (z if beta == 1 else beta * z)
    return result if out is None else out.copy_(result)


def _addmm_(
    precision: str, z: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor | None:
    if not _float32(z, x, y):
        return None
    if x.dim() == 3 and not needs_grad(z, x, y):
        return add_product(z, x, y, precision, beta=beta, alpha=alpha, out=z)
    result = _matmul(precision, x, y)
    if result is None:
        return None
    if beta == 0:
        return z.copy_(result if alpha == 1 else alpha * result)
    return (z if beta == 1 else z.mul_(beta)).add_(result, alpha=alpha)


def _linear(precision: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    result = _matmul(precision, x, weight.mT if weight.dim() == 2 else weight)
    return result if result is None or bias is None else result + bias


# -- sums over named axes --------------------------------------------------------------------------

_Labelled = tuple[Tensor, str]
"""A tensor and one letter per axis, all different."""


def _einsum(precision: str, equation: Any, *operands: Any) -> Tensor | None:
    tensors = operands[0] if len(operands) == 1 and not _float32(*operands) else operands
    if not isinstance(equation, str) or len(tensors) < 2 or not _float32(*tensors):
        return None
    inputs, output = _parse_equation(equation, [x.dim() for x in tensors])
    if any(len(set(letters)) < len(letters) for letters in inputs):  # a diagonal
        return None
    terms: list[_Labelled] = []
    for i, (x, letters) in enumerate(zip(tensors, inputs, strict=True)):
        used = "".join([*inputs[:i], *inputs[i + 1 :], output])
        terms.append(_sum_unused_axes(x, letters, used))
    result, *rest = terms
    for i, term in enumerate(rest):
        used = output + "".join(letters for _, letters in rest[i + 1 :])
        result = _contract_pair(precision, result, term, used)
    x, letters = result
    return x.permute([letters.index(a) for a in output])


def _parse_equation(equation: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of inputs and output, with an ellipsis expanded to Greek capitals."""
    terms, arrow, output = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    named = [len(letters.replace("...", "")) for letters in inputs]
    sizes = [n - m for part, n, m in zip(inputs, dims, named, strict=True) if "..." in part]
    greek = "".join(chr(0x391 + i) for i in range(max(sizes, default=0)))
    expanded = [
        part.replace("...", greek[len(greek) - (n - m) :])
        for part, n, m in zip(inputs, dims, named, strict=True)
    ]
    if not arrow:
        letters = "".join(inputs).replace("...", "")
        output = "..." + "".join(sorted(a for a in set(letters) if letters.count(a) == 1))
    return expanded, output.replace("...", greek)


def _sum_unused_axes(x: Tensor, letters: str, used: str) -> _Labelled:
    """Sum over axes that neither the other factors nor the output use."""
    unused = [i for i, a in enumerate(letters) if a not in used]
    return (x.sum(unused) if unused else x), "".join(a for a in letters if a in used)


def _contract_pair(precision: str, one: _Labelled, other: _Labelled, used: str) -> _Labelled:
    """Multiply two tensors and sum over their common letters that are not used later."""
    (x, a), (y, b) = one, other
    common = [c for c in a if c in b]
    summed = [c for c in common if c not in used]
    batch = [c for c in common if c in used]
    rows_of, columns_of = [c for c in a if c not in b], [c for c in b if c not in a]
    x = x.permute([a.index(c) for c in (*batch, *rows_of, *summed)])
    y = y.permute([b.index(c) for c in (*batch, *summed, *columns_of)])
    letters = "".join((*batch, *rows_of, *columns_of))
    n, s = len(batch), len(summed)
    lead = torch.broadcast_shapes(x.shape[:n], y.shape[:n])
    inner = torch.broadcast_shapes(x.shape[x.dim() - s :], y.shape[n : n + s])
    rows, columns = x.shape[n : x.dim() - s], y.shape[n + s :]
    x, y = x.expand((*lead, *rows, *inner)), y.expand((*lead, *inner, *columns))
    count, k = math.prod(lead), math.prod(inner)
    if not summed:  # an outer product, which has no sum to run on tensor cores
        x = x.reshape((*lead, *rows, *[1] * len(columns_of)))
        return x * y.reshape((*lead, *[1] * len(rows_of), *columns)), letters
    x = x.reshape(count, math.prod(rows), k)
    result = product(x, y.reshape(count, k, math.prod(columns)), precision)
    return result.view((*lead, *rows, *columns)), letters


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
    """Use fused attention unless a mask is added to the logits, which stay float32."""
    if precision != "bf16" or not _float32(query, key, value):
        return None
    if attn_mask is None or attn_mask.dtype == torch.bool:
        q, k, v = (x.to(torch.bfloat16) for x in (query, key, value))
        result = functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result.to(torch.float32)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    logits = (
        _broadcast_matmul(precision, query * (scale or query.shape[-1] ** -0.5), key.mT) + attn_mask
    )
    weights = functional.dropout(logits.softmax(-1), dropout_p)
    return _broadcast_matmul(precision, weights, value)


_HANDLERS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm), _matmul),
    **dict.fromkeys((torch.mv, torch.dot), _matmul),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm), _matmul),
    **dict.fromkeys((Tensor.mv, Tensor.dot), _matmul),
    **dict.fromkeys((torch.addmm, torch.addmv, torch.baddbmm), _addmm),
    **dict.fromkeys((Tensor.addmm, Tensor.addmv, Tensor.baddbmm), _addmm),
    **dict.fromkeys((Tensor.addmm_, Tensor.addmv_, Tensor.baddbmm_), _addmm_),
    torch.einsum: _einsum,
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
}
"""Intercepted functions. All others keep PyTorch's own precision: convolutions, distances,
attention modules, ``tensordot``, ``inner``, ``multi_dot`` and an ``einsum`` of a diagonal."""
