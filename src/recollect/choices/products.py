"""The product of two matrices of float32 numbers, of all their bits or of fewer.

===========  ==================================================================================
precision    what x y multiplies; it adds in float32
===========  ==================================================================================
``float32``  all 24 bits, whatever the process allows
``tf32``     11 bits where the device has TF32 (CUDA); elsewhere as ``float32``
``bf16``     x and y rounded to bfloat16, 8 bits
===========  ==================================================================================

A product's gradients are products of the same precision, any number of times, also where autograd
takes them later, in a thread of its own. PyTorch's switch for TF32 belongs to the process, so it is
turned for one product and turned back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.devices import without_autocast
from recollect.wording import shown

__all__ = ["PRECISIONS", "add_product", "check_precision_name", "product", "recorded"]

PRECISIONS = ("float32", "tf32", "bf16")
"""What may be asked for; ``None`` leaves it to PyTorch's own setting."""


def check_precision_name(precision: object, where: str = "precision") -> None:
    """That a precision is one of `PRECISIONS`, or ``None``.

    Args:
        precision: as the caller gave it.
        where: what it was given as, for the message.

    Raises:
        ValueError: something else.
    """
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(
            f"{where} must be 'float32', 'tf32' or 'bf16', or None for what PyTorch is set to, not "
            f"{shown(precision)}"
        )


def recorded(*tensors: Tensor) -> bool:
    """Whether somebody may ask for a gradient of what is made of these tensors."""
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def product(x: Tensor, y: Tensor, precision: str) -> Tensor:
    """x y of ``[n, k]`` and ``[k, m]``, or of ``[b, n, k]`` and ``[b, k, m]``.

    Args:
        x, y: float32.
        precision: of `PRECISIONS`.
    """
    if recorded(x, y):
        return cast(Tensor, _Product.apply(x, y, precision))
    return _multiplied(x, y, precision)


def add_product(
    z: Tensor, x: Tensor, y: Tensor, precision: str, *, beta: Any, alpha: Any, out: Tensor | None
) -> Tensor:
    """beta z + alpha x y of three axes in one pass, where nothing is `recorded`.

    Args:
        z: ``[b, n, m]``, float32.
        x, y: as for `product`.
        precision: of `PRECISIONS`.
        beta, alpha: numbers.
        out: where it goes; may be ``z``.
    """
    if precision != "bf16":
        return _switched(
            *(torch.baddbmm, x.device.type, precision, z, x, y),
            beta=beta, alpha=alpha, out=out,
        )  # fmt: skip
    if not _adds_wider(x):
        wide = (factor.to(torch.bfloat16).to(torch.float32) for factor in (x, y))
        return torch.baddbmm(z, *wide, beta=beta, alpha=alpha, out=out)
    # torch's own sum of this kind has no shapes alone, and takes what stands in `out` for z.
    found = _multiplied(x, y, precision)
    if beta == 0:
        return torch.mul(found, alpha, out=out)
    return torch.add(z if beta == 1 else beta * z, found, alpha=alpha, out=out)


def _multiplied(x: Tensor, y: Tensor, precision: str) -> Tensor:
    multiply: Any = torch.mm if x.dim() == 2 else torch.bmm
    if precision != "bf16":
        return _switched(multiply, x.device.type, precision, x, y)
    x, y = x.to(torch.bfloat16), y.to(torch.bfloat16)
    if _adds_wider(x):
        return cast(Tensor, multiply(x, y, torch.float32))
    # Products of 8 bits fit into 16: these sums are the same.
    return cast(Tensor, multiply(x.to(torch.float32), y.to(torch.float32)))


def _adds_wider(x: Tensor) -> bool:
    """Whether torch gives float32 sums of bfloat16 products on this device."""
    return x.device.type == "cuda" and torch.version.hip is None


class _Product(torch.autograd.Function):
    """A product whose gradients are products like it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, precision: str) -> Tensor:
        return _multiplied(x, y, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        x, y, ctx.precision = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, y), (g,), needs = ctx.saved_tensors, above, ctx.needs_input_grad
        with without_autocast(g.device.type):
            dx = product(g, y.mT, ctx.precision) if needs[0] else None
            dy = product(x.mT, g, ctx.precision) if needs[1] else None
        return dx, dy, None


# -- the process's switch -------------------------------------------------------------------------

_turning = threading.Lock()


def _switched(
    multiply: Callable[..., Tensor], device: str, precision: str, *args: Any, **kwargs: Any
) -> Tensor:
    """One product with the process's switch where it is asked to be.

    PyTorch has an old and a new name for the switch, and refuses to read the old one where the new
    one says more than it can. Products read the new one, and nobody reads the old one meanwhile.
    """
    backends: Any = torch.backends
    switch = backends.mkldnn.matmul if device in ("cpu", "xpu") else backends.cuda.matmul
    wanted = "tf32" if precision == "tf32" and device != "cpu" else "ieee"
    with _turning:
        before = switch.fp32_precision
        if before == wanted or (before == "none" and wanted == "ieee"):
            return multiply(*args, **kwargs)
        switch.fp32_precision = "none"
        inherited = switch.fp32_precision == before  # from what is said for all of torch
        switch.fp32_precision = wanted
        try:
            return multiply(*args, **kwargs)
        finally:
            switch.fp32_precision = "none" if inherited else before
