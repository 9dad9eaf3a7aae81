"""The product of two float32 matrices at full or reduced precision.

===========  ====================================================================================
precision    factors of the product; sums are always float32
===========  ====================================================================================
``float32``  all 24 bits, independent of PyTorch's setting
``tf32``     11 bits on a device with TF32 (CUDA); elsewhere as ``float32``
``bf16``     rounded to bfloat16, 8 bits
===========  ====================================================================================

Gradients of any order are products of that precision, in all threads of autograd.
PyTorch's TF32 setting is global to the process. It is changed for one product at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.runtime import without_autocast
from recollect.messages import short_repr

__all__ = ["PRECISIONS", "add_product", "check_precision_name", "needs_grad", "product"]

PRECISIONS = ("float32", "tf32", "bf16")
"""Valid names. ``None`` keeps PyTorch's own setting."""


def check_precision_name(precision: object, name: str = "precision") -> None:
    """Raise unless a precision is one of `PRECISIONS` or ``None``.

    Args:
        precision: value of the caller.
        name: name of the argument or field, for the message.

    Raises:
        ValueError: the value is not valid.
    """
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(
            f"{name} must be 'float32', 'tf32' or 'bf16', or None for PyTorch's own setting, not "
            f"{short_repr(precision)}"
        )


def needs_grad(*tensors: Tensor) -> bool:
    """Whether a gradient of a result of these tensors may be needed."""
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def product(x: Tensor, y: Tensor, precision: str) -> Tensor:
    """Return x y of ``[n, k]`` and ``[k, m]``, or of ``[b, n, k]`` and ``[b, k, m]``.

    Args:
        x, y: float32.
        precision: one of `PRECISIONS`.
    """
    if needs_grad(x, y):
        return cast(Tensor, _Product.apply(x, y, precision))
    return _matmul(x, y, precision)


def add_product(
    z: Tensor, x: Tensor, y: Tensor, precision: str, *, beta: Any, alpha: Any, out: Tensor | None
) -> Tensor:
    """Return beta z + alpha x y of three-dimensional tensors in one pass, without gradients.

    Args:
        z: ``[b, n, m]``, float32.
        x, y: as for `product`.
        precision: one of `PRECISIONS`.
        beta, alpha: numbers.
        out: output tensor, possibly ``z``.
    """
    if precision != "bf16":
        return _with_fp32_precision(
            *(torch.baddbmm, x.device.type, precision, z, x, y),
            beta=beta, alpha=alpha, out=out,
        )  # fmt: skip
    if not _has_fp32_accumulate(x):
        wide = (factor.to(torch.bfloat16).to(torch.float32) for factor in (x, y))
        return torch.baddbmm(z, *wide, beta=beta, alpha=alpha, out=out)
    # baddbmm with out_dtype has no meta kernel and reads z from `out`.
    result = _matmul(x, y, precision)
    if beta == 0:
        return torch.mul(result, alpha, out=out)
    return torch.add(z if beta == 1 else beta * z, result, alpha=alpha, out=out)


def _matmul(x: Tensor, y: Tensor, precision: str) -> Tensor:
    multiply: Any = torch.mm if x.dim() == 2 else torch.bmm
    if precision != "bf16":
        return _with_fp32_precision(multiply, x.device.type, precision, x, y)
    x, y = x.to(torch.bfloat16), y.to(torch.bfloat16)
    if _has_fp32_accumulate(x):
        return cast(Tensor, multiply(x, y, torch.float32))
    # The product of two 8-bit mantissas is exact in float32, so the sums are equal.
    return cast(Tensor, multiply(x.to(torch.float32), y.to(torch.float32)))


def _has_fp32_accumulate(x: Tensor) -> bool:
    """Whether torch returns float32 sums of bfloat16 products on this device."""
    return x.device.type == "cuda" and torch.version.hip is None


class _Product(torch.autograd.Function):
    """Product with gradients of the same precision."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, precision: str) -> Tensor:
        return _matmul(x, y, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        x, y, ctx.precision = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, y), (g,), needs = ctx.saved_tensors, grad_outputs, ctx.needs_input_grad
        with without_autocast(g.device.type):
            dx = product(g, y.mT, ctx.precision) if needs[0] else None
            dy = product(x.mT, g, ctx.precision) if needs[1] else None
        return dx, dy, None


# -- the TF32 setting of the process ---------------------------------------------------------------

_precision_lock = threading.Lock()


def _with_fp32_precision(
    multiply: Callable[..., Tensor], device: str, precision: str, *args: Any, **kwargs: Any
) -> Tensor:
    """Run one product with the TF32 setting of the precision, then restore the setting.

    PyTorch has an old and a new name for the setting, and raises if the old one is read while they
    differ. Products read the new one, and the lock excludes other readers.
    """
    backends: Any = torch.backends
    setting = backends.mkldnn.matmul if device in ("cpu", "xpu") else backends.cuda.matmul
    target = "tf32" if precision == "tf32" and device != "cpu" else "ieee"
    with _precision_lock:
        previous = setting.fp32_precision
        if previous == target or (previous == "none" and target == "ieee"):
            return multiply(*args, **kwargs)
        setting.fp32_precision = "none"
        inherited = setting.fp32_precision == previous  # from the setting for all of torch
        setting.fp32_precision = target
        try:
            return multiply(*args, **kwargs)
        finally:
            setting.fp32_precision = "none" if inherited else previous
