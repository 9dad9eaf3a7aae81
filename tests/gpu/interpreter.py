"""Triton's interpreter, repaired: kernels written for a GPU run on the CPU, with a GPU's rounding.

Importing this file sets ``TRITON_INTERPRET``, which Triton reads when kernels are defined, and
replaces parts of Triton for the rest of the process: only a process of its own may do so
(`tests.gpu.operators`). What the interpreter gets wrong (seen in Triton 3.6 to 3.9), and what is
put in its place:

* ``tl.dot`` of bfloat16 multiplies raw bits, and of float32 ignores ``input_precision``: products
  are of what a tensor core reads (bfloat16 as numbers, TF32 as 10 bits), summed in float32;
* casts of float32 to bfloat16 cut bits off: they round to nearest;
* sums, products, comparisons and ``tl.sum`` of bfloat16 work on raw bits, without a word: they are
  those of the numbers, rounded to bfloat16; some versions have no constants of it;
* ``@triton.autotune`` asks for a driver: the first configuration is taken;
* loop variables are plain integers, where a GPU has scalars with ``.to``, and bounds of a loop may
  be the interpreter's own numbers;
* ``tl.gather`` by another name is not found.

It runs programs one after the other, so races and barriers are not seen, and nothing says whether a
GPU would accept a kernel's shapes or have room for it.
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
# What the package tried to be quick with on other devices.
os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")

import numpy as np
import triton.language as tl
from triton.runtime import autotuner
from triton.runtime import interpreter as own

__all__ = ["mend"]

warnings.filterwarnings("ignore", message="Triton is not supported on current platform")


# -- bfloat16 --------------------------------------------------------------------------------------


def _numbers(x: Any) -> Any:
    """What a handle holds, as numbers: bfloat16 is kept in 16 bits without a sign."""
    if x.dtype.scalar != tl.bfloat16:
        return x.data
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def _bits(x: Any) -> Any:
    """float32 numbers as bfloat16, to the nearest and to even ones."""
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
    """Casts round to nearest: the interpreter cuts off the bits that bfloat16 does not have."""
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
    """The numbers that a tensor core reads."""
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
    """A loop variable: on a GPU it has a type that may be changed."""

    def to(self, *_: object) -> int:
        return self


def _range(*bounds: Any) -> Iterator[int]:
    return map(_Scalar, builtins.range(*map(_whole, bounds)))


def _whole(x: Any) -> int:
    """An int of an int, or of the interpreter's tensor of one."""
    handle = getattr(x, "handle", None)
    return int(x) if handle is None else int(handle.data.reshape(-1)[0])


_patched = own._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, *scope: Any) -> None:
    """The interpreter's numbers count as integers, where older versions take them for arrays."""
    _patched(tensor, *scope)
    if scope:
        scope[0].set_attr(tensor, "__index__", _whole)


own._patch_lang_tensor = _patch_lang_tensor


def _gather(*args: Any, **kwargs: Any) -> Any:
    """What ``tl.gather`` is while a kernel runs, for who has imported it by another name."""
    return tl.gather(*args, **kwargs)


def mend(package: str) -> None:
    """Repair what kernels of a package find in their own modules: loops, and names of ``tl``'s.

    Args:
        package: whose modules, as far as they have been imported.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and hasattr(module, "triton"):
            module.range = _range
            if hasattr(module, "gather"):
                module.gather = _gather
