"""Casts in Triton's interpreter: ``python -m tests.gpu.casts`` prints how many differ from torch's.

A separate program, because the interpreter changes its process.
"""

from __future__ import annotations

import importlib

import torch

importlib.import_module("tests.gpu.interpreter")  # before Triton, whose interpreter it selects

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

__all__ = ["to_bfloat16"]


@triton.jit
def to_bfloat16(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write x as bfloat16."""
    n = tl.arange(0, N)
    tl.store(y + n, tl.load(x + n).to(tl.bfloat16))


if __name__ == "__main__":
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    y = torch.empty_like(x, dtype=torch.bfloat16)
    to_bfloat16[(1,)](x, y, N=1024)  # pyright: ignore[reportArgumentType]
    print(int((y != x.bfloat16()).sum()))
