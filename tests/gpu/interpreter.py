"""Triton's interpreter with repairs: GPU kernels run on the CPU, with a GPU's rounding.

Importing this module sets ``TRITON_INTERPRET``, which Triton reads when kernels are defined, and
replaces parts of Triton for the rest of the process, so only a separate process may import it
(`tests.gpu.operators`). Faults of the interpreter (in Triton 3.6 to 3.9) and their repairs:

* ``tl.dot`` of bfloat16 multiplies raw bits, and of float32 ignores ``input_precision``: products
  are of the operands of a tensor core (bfloat16 as numbers, TF32 as 10 bits), summed in float32;
* casts of float32 to bfloat16 cut bits off: they round to nearest;
* sums, products, comparisons and ``tl.sum`` of bfloat16 use raw bits without a warning: they use
  the numbers, rounded to bfloat16; some versions have no constants of it;
* ``@triton.autotune`` needs a driver: the first configuration is used;
* loop variables are plain integers, while a GPU has scalars with ``.to``, and bounds of a loop may
  be numbers of the interpreter;
* ``tl.gather`` under another name is missing.

The interpreter runs programs one after another, so it detects neither races nor missing barriers,
and does not check that a GPU accepts a kernel's shapes or has memory for them.
"""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("Triton was imported before its interpreter was chosen: import this first")
os.environ["TRITON_INTERPRET"] = "1"
# Shortcuts of the package for other devices.
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")

import numpy as np
import triton.language as tl
from triton.runtime import autotuner
from triton.runtime import interpreter as own

__all__ = ["mend"]

warnings.filterwarnings("ignore", message="Triton is not supported on current platform")


# -- bfloat16 --------------------------------------------------------------------------------------


def _numbers(x: Any) -> Any:
    """Return the numbers of a handle, which stores bfloat16 in 16 bits without a sign."""
    if x.dtype.scalar != tl.bfloat16:
        return x.data
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def _bits(x: Any) -> Any:
    """Return float32 numbers as bfloat16, rounded to nearest and ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


_binary, _unary = own.InterpreterBuilder.binary_op, own.InterpreterBuilder.unary_op


def _binary_op(self: Any, a: Any, b: Any, op: Callable[..., Any]) -> Any:
    kind = a.dtype.scalar
    if kind != tl.bfloat16:
        return _binary(self, a, b, op)
    with np.errstate(all="ignore"):
        result = op(_numbers(a), _numbers(b))
    return own.TensorHandle(result if result.dtype == np.bool_ else _bits(result), kind)


def _unary_op(self: Any, x: Any, op: Callable[..., Any]) -> Any:
    kind = x.dtype.scalar
    if kind != tl.bfloat16:
        return _unary(self, x, op)
    return own.TensorHandle(_bits(op(_numbers(x))), kind)


def _constant(self: Any, value: float) -> Any:
    return own.TensorHandle(_bits(np.array([value], dtype=np.float32)), tl.bfloat16)


_sum = own.ReduceOps.sum


def _sum_of(self: Any, x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return _sum(self, x)
    total = np.sum(_numbers(x.handle), axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(_bits(total), x.dtype)


_float = own._convert_float


def _convert_float(data: Any, kind: Any, to: Any, rounding: Any) -> Any:
    """Round casts to nearest: the interpreter cuts off the bits that bfloat16 lacks."""
    if kind == tl.float32 and to == tl.bfloat16:
        return _bits(data)
    return _float(data, kind, to, rounding)


own._convert_float = _convert_float
own.ReduceOps.sum = _sum_of
own.InterpreterBuilder.get_bf16 = _constant
own.InterpreterBuilder.binary_op = _binary_op
own.InterpreterBuilder.unary_op = _unary_op


# -- products ------------------------------------------------------------------------------------


def _read(x: Any, *, tf32: bool) -> Any:
    """Return the operands of a tensor core."""
    data = _numbers(x)
    if tf32 and x.dtype.scalar == tl.float32:
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        with np.errstate(over="ignore"):
            return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return data


def _dot(_: Any, a: Any, b: Any, d: Any, input_precision: Any, __: int) -> Any:
    tf32 = str(input_precision).rpartition(".")[-1].upper() == "TF32"
    kind = d.data.dtype
    x, y = (_read(part, tf32=tf32).astype(kind) for part in (a, b))
    with np.errstate(all="ignore"):
        return own.TensorHandle(np.matmul(x, y, dtype=kind) + d.data, d.dtype.scalar)


own.InterpreterBuilder.create_dot = _dot


# -- configurations --------------------------------------------------------------------------------

_tuned: Callable[..., None] = autotuner.Autotuner.__init__


def _first_alone(self: Any, fn: Any, names: Any, configs: Sequence[Any], *a: Any, **k: Any) -> None:
    _tuned(self, fn, names, list(configs)[:1], *a, **k)


autotuner.Autotuner.__init__ = _first_alone


# -- scalars ---------------------------------------------------------------------------------------


class _Scalar(int):
    """A loop variable with a type that can change, as on a GPU."""

    def to(self, *_: object) -> int:
        return self


def _range(*bounds: Any) -> Iterator[int]:
    return map(_Scalar, builtins.range(*map(_as_int, bounds)))


def _as_int(x: Any) -> int:
    """Return an int from an int, or from the interpreter's tensor of one."""
    handle = getattr(x, "handle", None)
    return int(x) if handle is None else int(handle.data.reshape(-1)[0])


_patched = own._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, *scope: Any) -> None:
    """Count the interpreter's numbers as integers; older versions treat them as arrays."""
    _patched(tensor, *scope)
    if scope:
        scope[0].set_attr(tensor, "__index__", _as_int)


own._patch_lang_tensor = _patch_lang_tensor


def _gather(*args: Any, **kwargs: Any) -> Any:
    """Return ``tl.gather`` of a running kernel, for modules that import it by another name."""
    return tl.gather(*args, **kwargs)


def mend(package: str) -> None:
    """Repair the names that kernels of a package find in their modules: loops, and names of ``tl``.

    Args:
        package: the package, of which only imported modules are repaired.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and hasattr(module, "triton"):
            module.range = _range
            if hasattr(module, "gather"):
                module.gather = _gather
