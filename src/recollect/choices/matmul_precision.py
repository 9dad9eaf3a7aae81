"""The precision of products of float32 numbers, by PyTorch's own setting for them.

===========  =====================================================================
precision    factors of products; sums are always float32
===========  =====================================================================
``float32``  all 24 bits, independent of PyTorch's setting
``tf32``     11 bits on a device with TF32 (CUDA); elsewhere as ``float32``
===========  =====================================================================

PyTorch's setting is global to the process: inside the context it applies to all threads. Custom
backward passes restore the precision of their forward pass
(`recollect.choices.autograd.CustomFunction`). Gradients that autograd derives follow the setting
that is in force during the backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from recollect.messages import short_repr

__all__ = [
    "PRECISIONS",
    "active",
    "check_precision_name",
    "effective_eps",
    "is_full_precision",
    "matmul_precision",
    "precision_error",
]

PRECISIONS = ("float32", "tf32")
"""Valid names. ``None`` keeps PyTorch's own setting."""


def check_precision_name(precision: object) -> None:
    """Raise unless a precision is one of `PRECISIONS` or ``None``."""
    if precision is not None and precision not in PRECISIONS:
        expected = "'float32' or 'tf32', or None for PyTorch's own setting"
        raise ValueError(f"precision {precision_error(precision, expected)}")


def precision_error(precision: object, expected: str) -> str:
    """Return the error message for an invalid precision, without the name of the argument."""
    message = f"must be {expected}, not {short_repr(precision)}"
    if precision != "bf16":
        return message
    return (
        f"{message}: for products in bfloat16 use autocast or a bfloat16 model, with which "
        "flash-linear-attention's operators multiply in bfloat16"
    )


class _Active(threading.local):
    precision: str | None = None


active = _Active()
"""``precision`` is the requested precision of this thread's products, or ``None``."""


def effective_eps(dtype: torch.dtype) -> float:
    """Return the machine epsilon of the factors of products, under the active precision."""
    if active.precision == "tf32" and dtype == torch.float32:
        return 2.0**-10
    return torch.finfo(dtype).eps


@contextmanager
def matmul_precision(precision: str | None, device_type: str) -> Generator[None]:
    """Set the precision of products inside the context; ``None`` has no effect.

    Args:
        precision: one of `PRECISIONS`.
        device_type: type of the device that multiplies.

    Examples:
        >>> from recollect.choices.matmul_precision import matmul_precision
        >>> with matmul_precision("tf32", "cuda"):
        ...     print(torch.backends.cuda.matmul.fp32_precision)
        ...
        tf32
    """
    if precision is None:
        yield
        return
    value = "tf32" if precision == "tf32" and device_type != "cpu" else "ieee"
    previous, active.precision = active.precision, precision
    try:
        with _setting(device_type).requested(value):
            yield
    finally:
        active.precision = previous


def is_full_precision(device_type: str) -> bool:
    """Return whether PyTorch's setting keeps all bits of the factors of float32 products.

    ``torch.get_float32_matmul_precision`` raises if the setting has no old name.
    """
    return _setting(device_type).value in ("none", "ieee")


class _Setting:
    """PyTorch's setting of one backend, which all threads share.

    The latest request decides. After the last request ends, the setting is as before the first one.
    PyTorch has an old and a new name for the setting, and raises if the old one is read while they
    differ. Products read the new one.
    """

    def __init__(self, backend: Any) -> None:
        self._matmul = backend
        self._lock = threading.Lock()
        self._requests: dict[object, str] = {}
        self._previous = "none"

    @property
    def value(self) -> str:
        """The value that products read."""
        return str(self._matmul.fp32_precision)

    @contextmanager
    def requested(self, value: str) -> Generator[None]:
        key = object()
        with self._lock:
            if not self._requests:
                self._previous = self._own_value()
            self._requests[key] = value
            self._apply()
        try:
            yield
        finally:
            with self._lock:
                del self._requests[key]
                self._apply()

    def _own_value(self) -> str:
        """Return the value, or ``"none"`` if it is inherited from the setting for all of torch."""
        value = self.value
        if value == "none":
            return "none"
        self._matmul.fp32_precision = "none"
        if self.value == value:
            return "none"
        self._matmul.fp32_precision = value
        return value

    def _apply(self) -> None:
        value = next(reversed(self._requests.values()), self._previous)
        if value != self.value and (value, self.value) != ("ieee", "none"):
            self._matmul.fp32_precision = value


_onednn = _Setting(torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_cublas = _Setting(torch.backends.cuda.matmul)


def _setting(device_type: str) -> _Setting:
    return _onednn if device_type in ("cpu", "xpu") else _cublas
