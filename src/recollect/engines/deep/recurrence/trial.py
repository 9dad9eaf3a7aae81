"""A comparison of the kernels with PyTorch operations, before their first use on a device."""

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

from recollect.engines.deep.chain.trace import ChainSpec
from recollect.engines.deep.recurrence.runner import dot_precision

__all__ = ["agrees"]

Run = Callable[[ChainSpec, Sequence[Tensor | None]], tuple[Tensor, ...]]
"""Outputs and the memory after all batches, from the flat inputs of the chain's function."""

BOUNDS = {"ieee": 1e-4, "tf32": 2e-2}
"""Largest relative difference, by the factors of products."""

_RESULTS: dict[tuple[object, ...], bool] = {}


def agrees(run: Run, spec: ChainSpec, sizes: Sequence[int], device: torch.device) -> bool:
    """Whether a small call gives the same outputs, and the same gradients if ``spec.keep``.

    The call has the structure and sizes of the caller's, so that its kernels are those of the
    trial. Results are kept for the process. While a CUDA graph is captured, the host cannot wait:
    kernels without a result are then refused, and a later call tries them.

    Args:
        run: of the engine.
        spec: with the kernels' runner.
        sizes: associations, queries, channels, hidden units and stacks.
        device: of the call. The trial waits for it.
    """
    ending, precision = spec.ending, dot_precision()
    structure = (ending.layer_norm, ending.residual, ending.bias.affine, spec.normalised)
    key = (spec.curve.name, spec.keep, *structure, *sizes, precision, device)
    if key not in _RESULTS:
        if _captures_graph(device):
            return False
        reason = _difference(run, spec, sizes, device, BOUNDS[precision])
        _RESULTS[key] = reason is None
        if reason is not None:
            warnings.warn(
                f"the Triton kernels of deep memories {reason} on {device}: PyTorch operations "
                "replace them, please report it",
                stacklevel=2,
            )
    return _RESULTS[key]


def _captures_graph(device: torch.device) -> bool:
    """Whether the stream captures a CUDA graph, in which the host cannot wait for a trial."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def _isolated(grad: bool) -> Generator[None]:
    """Run a trial without the caller's inference mode, hooks of saved tensors and dispatch modes.

    The trial runs in the first call only. Activation checkpointing would count its saved tensors
    and operations, and would not find them when it runs the call again.

    Args:
        grad: whether autograd records.
    """
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x)
    with _disable_current_modes(), hooks, torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _largest(errors: Sequence[Tensor]) -> float:
    """Return the largest error, and NaN if one of them is NaN, which Python's ``max`` may skip."""
    return float(torch.stack([*errors]).detach().max())


def _distance(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).norm() / y.norm().clamp_min(1e-30)


def _difference(
    run: Run, spec: ChainSpec, sizes: Sequence[int], device: torch.device, bound: float
) -> str | None:
    """Description of the largest difference if it exceeds ``bound``, or of an error."""
    R, Q, D, W, J = sizes
    N, P = 3, 2
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 0.5) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (scale * x).to(device).requires_grad_(spec.keep)

    with _isolated(spec.keep):
        T = draw(N, P, J, J)
        nearest = draw(N, P, R, D) if spec.ending.layer_norm and spec.normalised else None
        tokens = [draw(N, P, R, D, scale=D**-0.5), draw(N, P, R, D), draw(N, P, R, D)]
        coefficients = [draw(N, P, R, J, scale=0.1), draw(N, P, Q, D), draw(N, P, Q, R, scale=0.1)]
        params = [draw(1, D, scale=1.0) for _ in spec.params]
        start = [draw(P, 1, J, D, W, scale=x**-0.5) for x in (D, W)]
        inputs = [draw(N, P, Q, J), nearest, *tokens, *coefficients, *params, *start]
        leaves = [x for x in (T, *inputs) if x is not None]

        def results(spec: ChainSpec) -> list[Tensor]:
            out = run(spec, [T.triu(), *inputs])
            if not spec.keep:
                return [*out]
            return [*out, *torch.autograd.grad(out, leaves, [torch.ones_like(x) for x in out])]

        try:
            pairs = zip(results(spec), results(replace(spec, walker=None)), strict=True)
            error = _largest([_distance(x, y) for x, y in pairs])
        except torch.OutOfMemoryError:  # of the caller, whose call needs more memory
            raise
        except Exception as problem:  # of Triton, its compiler or the driver
            return f"do not run ({problem!r})"
    # The comparison is False for NaN too.
    return None if error <= bound else f"differ by {error:.2g}"
