"""Whether the kernels of a device give torch's numbers there, asked once before any is believed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from recollect.choices.bias.losses import L2
from recollect.choices.memory.maps import MLP
from recollect.engines.deep.chain.activations import CURVES
from recollect.engines.deep.chain.ends.ending import Ending
from recollect.engines.deep.chain.rows.launch import Launch
from recollect.engines.deep.chain.trace import ChainSpec

__all__ = ["agree", "captures_graph", "isolated", "largest"]

Run = Callable[[ChainSpec, Sequence[Tensor]], tuple[Tensor, ...]]
"""Outputs and ends of all batches, from T, scale, k, v, raw, c, q, C and the memory."""

FAR = {torch.float64: 1e-9, torch.float32: 2e-2}
"""By which numbers may differ, beside the largest of them. Products that round their factors (TF32,
bfloat16) may round two float32 numbers apart that were next to each other; those of float64 never
do, and show whether equations are right."""

_RESULTS: dict[tuple[Run, Launch, torch.device], bool] = {}


def captures_graph(device: torch.device) -> bool:
    """Whether the current stream captures a CUDA graph, in which the host cannot wait for a trial.

    Args:
        device: device of the call.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def isolated(grad: bool) -> Generator[None]:
    """Run a trial without the caller's inference mode, hooks of saved tensors and dispatch modes.

    The trial runs in the first call only. Activation checkpointing would count its saved tensors
    and operations, and would not find them when it runs the call again.

    Args:
        grad: whether autograd records.
    """
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x)
    with _disable_current_modes(), hooks, torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def largest(errors: Sequence[Tensor]) -> float:
    """Return the largest error, and NaN if one of them is NaN, which Python's ``max`` may skip.

    Args:
        errors: scalars.
    """
    return float(torch.stack([*errors]).detach().max())


def agree(run: Run, launch: Launch, device: torch.device) -> bool:
    """Whether a small call of two batches, with all its gradients, comes out alike.

    While a CUDA graph is captured, kernels without a result are refused, and a later call tries
    them.

    Args:
        run: of the engine. launch: of the kernels. device: theirs; it waits for the answer.
    """
    key = (run, launch, device)
    if key not in _RESULTS:
        if captures_graph(device):
            return False
        _RESULTS[key] = _try(run, launch, device)
    return _RESULTS[key]


def _try(run: Run, launch: Launch, device: torch.device) -> bool:
    N, P, R, D, W = 2, 3, 5, 6, 12
    sizes = [(N, P, 2, 2), (N, P, R, 2), *3 * [(N, P, R, D)], (N, P, R, 2), (N, P, R, D)]
    sizes += [(N, P, R, R), (P, 2, 2, D, W)]
    bias = L2()
    spec = ChainSpec(
        curve=CURVES["gelu"],
        ending=Ending(memory=MLP(), bias=bias, heads=1, target=bias.target),
        gates=(),
        params=(),
        tall=(True, False),
        families=((0, 1),),
        keep=True,
        rows=launch,
    )

    def numbers(spec: ChainSpec, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        values = [0.5 * torch.randn(size, generator=generator, device="cpu") for size in sizes]
        leaves = [x.to(device, dtype).requires_grad_() for x in values]
        out = run(spec, leaves)
        return [*out, *torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])]

    with isolated(True):
        for dtype, most in FAR.items():
            pairs = zip(numbers(spec, dtype), numbers(replace(spec, rows=None), dtype), strict=True)
            error = largest([(a - b).abs().max() / (1 + b.abs().max()) for a, b in pairs])
            if not error <= most:  # NaN too
                warnings.warn(
                    f"kernels of deep memories give other {dtype} numbers on {device} than "
                    f"torch's operations (by {error:.2g}), which are taken in their place: please "
                    "report it",
                    stacklevel=2,
                )
                return False
    return True
