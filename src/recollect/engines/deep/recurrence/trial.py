"""A comparison of the kernels with PyTorch operations, before their first use on a device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from recollect.engines.deep.chain.chain import ChainSpec
from recollect.engines.deep.recurrence.runner import dot_precision

__all__ = ["agrees"]

Run = Callable[[ChainSpec, Mapping[str, Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
"""Function from the inputs of a chain by name and its maps to its outputs and final maps."""

BOUNDS = {"ieee": 1e-4, "tf32": 2e-2}
"""Largest relative difference, by the precision of products."""

_RESULTS: dict[tuple[object, ...], bool] = {}


def agrees(
    run: Run,
    spec: ChainSpec,  # with the kernels' runner
    sizes: Sequence[int],  # associations, queries, channels, hidden units and stacks
    device: torch.device,
) -> bool:
    """Return whether the kernels give the outputs and gradients of PyTorch operations.

    A small call has the structure and sizes of the caller's, and therefore its kernels. Results are
    cached for the process. The host cannot wait while a CUDA graph is captured. Kernels without a
    result are then rejected, and a later call runs the trial.
    Gradients are compared if ``spec.save_for_backward``. The trial synchronizes with the device.
    """
    output_head, precision = spec.output_head, dot_precision()
    structure = (
        output_head.layer_norm,
        output_head.residual,
        output_head.bias.affine,
        spec.uses_step_scales,
    )
    key = (spec.activation.name, spec.save_for_backward, *structure, *sizes, precision, device)
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
    """Return whether the stream captures a CUDA graph, in which the host cannot wait."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def _isolated(grad: bool) -> Generator[None]:
    """Leave the caller's inference mode, saved-tensor hooks and dispatch modes during a trial.

    Only the first call runs the trial. Activation checkpointing would record the trial's
    operations, and would miss them when it recomputes the call.
    """
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x)
    with _disable_current_modes(), hooks, torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _largest(errors: Sequence[Tensor]) -> float:
    """Return the largest error, or NaN if an error is NaN, which Python's ``max`` may skip."""
    return float(torch.stack([*errors]).detach().max())


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the relative distance of x from y."""
    return (x - y).norm() / y.norm().clamp_min(1e-30)


def _difference(
    run: Run, spec: ChainSpec, sizes: Sequence[int], device: torch.device, bound: float
) -> str | None:
    """Return a description of a difference above ``bound`` or of an error, else ``None``."""
    R, Q, D, W, J = sizes
    N, P = 3, 2
    spec = replace(spec, output_head=replace(spec.output_head, heads=1))  # as the norm's params
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 0.5) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (scale * x).to(device).requires_grad_(spec.save_for_backward)

    with _isolated(spec.save_for_backward):
        norm = spec.output_head.layer_norm
        tensors = {"T": draw(N, P, J, J)}
        if norm and spec.uses_step_scales:
            tensors["head nearest_value"] = draw(N, P, R, D)
        tensors |= {"k": draw(N, P, R, D, scale=D**-0.5), "head v": draw(N, P, R, D)}
        tensors |= {"head raw": draw(N, P, R, D), "c": draw(N, P, R, J, scale=0.1)}
        tensors |= {"q": draw(N, P, Q, D), "C": draw(N, P, Q, R, scale=0.1)}
        for name in ("norm_weight", "norm_bias") if norm else ():
            tensors[f"param {name}"] = draw(1, D, scale=1.0)
        start = [draw(P, J, D, W, scale=x**-0.5) for x in (D, W)]
        tensors["scale"] = draw(N, P, Q, J)
        leaves = [*tensors.values(), *start]

        def results(spec: ChainSpec) -> list[Tensor]:
            out = run(spec, tensors | {"T": tensors["T"].triu()}, start)
            if not spec.save_for_backward:
                return [*out]
            ones = [torch.ones_like(x) for x in out]
            grads = torch.autograd.grad(
                out, leaves, ones, allow_unused=True, materialize_grads=True
            )
            return [*out, *grads]

        try:
            pairs = zip(results(spec), results(replace(spec, runner=None)), strict=True)
            error = _largest([_distance(x, y) for x, y in pairs])
        except torch.OutOfMemoryError:  # the caller needs more memory too
            raise
        except Exception as problem:  # from Triton, its compiler or the driver
            return f"do not run ({problem!r})"
    # The comparison is False for NaN too.
    return None if error <= bound else f"differ by {error:.2g}"
