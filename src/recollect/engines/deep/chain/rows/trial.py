"""Whether the kernels of a device give torch's numbers there, asked once before any is believed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recollect.choices.bias.losses import L2
from recollect.engines.deep.chain.activations import CURVES
from recollect.engines.deep.chain.rows.launch import Launch
from recollect.engines.deep.chain.trace import ChainSpec

__all__ = ["agree"]

Run = Callable[[ChainSpec, Sequence[Tensor]], tuple[Tensor, ...]]
"""Outputs and ends of all batches, from T, scale, k, v, raw, c, q, C and the memory."""

FAR = 1e-4
"""By which numbers of order 1 may differ: two orders of float32 operations differ by 1e-6."""


@functools.cache
def agree(run: Run, launch: Launch, device: torch.device) -> bool:
    """Whether a small call of two batches, with all its gradients, comes out alike.

    Args:
        run: of the engine. launch: of the kernels. device: theirs; it waits for the answer.
    """
    N, P, R, D, W = 2, 3, 5, 6, 12
    sizes = [(N, P, 2, 2), (N, P, R, 2), *3 * [(N, P, R, D)], (N, P, R, 2), (N, P, R, D)]
    sizes += [(N, P, R, R), (P, 2, 2, D, W)]
    bias = L2()
    spec = ChainSpec(
        curve=CURVES["gelu"],
        residual=True,
        bias=bias,
        gates=(),
        tall=(True, False),
        families=((0, 1),),
        keep=True,
        target=bias.target,
        rows=launch,
    )
    found: list[list[Tensor]] = []
    with torch.inference_mode(False), torch.enable_grad():
        for one in (spec, replace(spec, rows=None)):
            generator = torch.Generator().manual_seed(0)
            given = [
                (0.5 * torch.randn(size, generator=generator)).to(device).requires_grad_()
                for size in sizes
            ]
            out = run(one, given)
            slopes = torch.autograd.grad(out, given, [torch.ones_like(x) for x in out])
            found.append([x.detach() for x in (*out, *slopes)])
    far = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    if not far <= FAR:  # NaN too
        warnings.warn(
            f"kernels of deep memories give other numbers on {device} than torch's operations (by "
            f"{far:.2g}), which are taken in their place: please report it",
            stacklevel=2,
        )
        return False
    return True
