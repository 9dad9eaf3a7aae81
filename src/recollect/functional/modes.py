"""PyTorch modes during a call: inference mode, autocast, and the precision of products.

A memory takes inner gradients also when no model is trained. Inference mode forbids autograd, even
for tensors that one call makes and drops. An engine that takes inner gradients by autograd
therefore runs outside the mode, on copies of the tensors that were made in it. Outer gradients stay
switched off if the caller switched them off. Autocast is switched off, because engines accumulate
in float32 themselves.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from recollect.choices.matmul_precision import matmul_precision
from recollect.choices.runtime import without_autocast
from recollect.engines.common.problem import Problem, problem_tensors

__all__ = [
    "autograd_inside_op",
    "engine_context",
    "must_leave_inference_mode",
    "outside_inference_mode",
    "problem_without_inference_flag",
    "without_inference_flag",
]


def must_leave_inference_mode(problem: Problem, *more: Tensor, uses_inner_autograd: bool) -> bool:
    """Return whether autograd would refuse tensors that this call differentiates.

    Inside inference mode, the call takes inner gradients only. Outside, it may differentiate a
    tensor that was made inside, for example in a state.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.is_inference_mode_enabled():
        return uses_inner_autograd
    return any(map(Tensor.is_inference, (*problem_tensors(problem), *more)))


@contextmanager
def outside_inference_mode() -> Generator[None]:
    """Leave inference mode, and keep the setting of ``torch.enable_grad``."""
    grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad_enabled):
        yield


def without_inference_flag(x: Tensor) -> Tensor:
    """Return a copy of a tensor that was made in inference mode, and other tensors as they are."""
    return x.clone() if x.is_inference() else x


def problem_without_inference_flag(problem: Problem) -> Problem:
    """Return a problem of `without_inference_flag` tensors."""
    return problem.map(without_inference_flag)


@contextmanager
def engine_context(device: torch.device, precision: str) -> Generator[None]:
    """Switch autocast off and set the precision of products."""
    with without_autocast(device.type), matmul_precision(precision, device.type):
        yield


@contextmanager
def autograd_inside_op() -> Generator[None]:
    """Enable autograd inside a custom op, in which PyTorch disables it.

    The dispatch keys of autograd, which PyTorch excludes on the way into an op, are included again.
    ``torch.enable_grad`` still decides whether gradients are recorded.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    excluded = excluded.remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield
