"""PyTorch modes during a call: inference mode and autocast are left, transforms refused.

A memory learns by a gradient also where nobody trains. Inference mode forbids autograd, even for
numbers made and forgotten inside one call, so an engine that takes its inner gradient by autograd
leaves the mode for the length of the call, without asking for an outer gradient that the caller
switched off, and is given copies of what was made in it. Autocast is left too: engines keep their
sums in float32 themselves. Function transforms and forward-mode derivatives are unknown to backward
passes written by hand, and refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recollect.choices.devices import without_autocast
from recollect.choices.multiplying import multiplying
from recollect.engines.common.problem import Problem, tensors

__all__ = [
    "full_precision",
    "leaves_inference",
    "ordinary",
    "ordinary_mode",
    "ordinary_problem",
    "refuse_transforms",
    "solving",
    "with_autograd",
]


def leaves_inference(problem: Problem, *more: Tensor, inner_gradients: bool) -> bool:
    """Whether autograd would refuse numbers that this call differentiates.

    Inside inference mode that matters to inner gradients alone; outside of it to any gradient, of a
    state that was made inside, say.
    """
    if torch.compiler.is_compiling():
        return False
    if not (inner_gradients or torch.is_grad_enabled()):
        return False  # nobody differentiates
    if torch.is_inference_mode_enabled():
        return inner_gradients
    return any(map(Tensor.is_inference, (*tensors(problem), *more)))


@contextmanager
def ordinary_mode() -> Generator[None]:
    """Leave inference mode; whether an outer gradient is asked for stays as it was."""
    outer = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(outer):
        yield


def ordinary(x: Tensor) -> Tensor:
    """The same numbers in a tensor that was not made in inference mode."""
    return x.clone() if x.is_inference() else x


def ordinary_problem(problem: Problem) -> Problem:
    """The same problem of such tensors."""
    return dataclasses.replace(
        problem,
        q=ordinary(problem.q),
        k=ordinary(problem.k),
        v=ordinary(problem.v),
        rates={name: ordinary(x) for name, x in problem.rates.items()},
        params={name: ordinary(x) for name, x in problem.params.items()},
        state=problem.state.map(ordinary),
        lengths=None if problem.lengths is None else ordinary(problem.lengths),
    )


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Without autocast, where it is on."""
    return without_autocast(device.type)


def solving(device: torch.device, precision: str | None) -> AbstractContextManager[object]:
    """What an engine runs in: without autocast, and with products of this precision.

    Args:
        device: of the call.
        precision: of `recollect.choices.products.PRECISIONS`; ``None`` is what PyTorch is set to.
    """
    if precision is None:
        return full_precision(device)
    return _multiplying(device, precision)


@contextmanager
def _multiplying(device: torch.device, precision: str) -> Generator[None]:
    with full_precision(device), multiplying(precision):
        yield


def refuse_transforms(given: Iterable[object]) -> None:
    """Refuse to run inside `torch.func` transforms, or on tensors with a tangent.

    Args:
        given: what may carry a tangent; looked at only inside a dual level.

    Raises:
        RuntimeError: inside ``vmap``, ``grad``, ``jvp`` and their kin, or given a dual tensor.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError(
            "recollect does not run inside the transforms of torch.func (vmap, grad, jvp, jacrev, "
            "...): most recipes need inner gradients or backward passes that these do not know; "
            "use the batch axis B in place of vmap, and torch.autograd.grad in place of grad"
        )
    level: int = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    if level >= 0 and any(_is_dual(x) for x in given):
        raise RuntimeError(
            "recollect has no forward-mode derivatives (torch.autograd.forward_ad): most recipes "
            "need inner gradients or backward passes that it does not know; use torch.autograd.grad"
        )


def _is_dual(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


@contextmanager
def with_autograd() -> Generator[None]:
    """Let operations of one's own take gradients inside: torch runs them where none are recorded.

    What is excluded on the way into an operation (the keys of autograd) is taken back; whether
    gradients are wanted is still a matter of ``torch.enable_grad``.
    """
    kept = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        kept = kept.remove(getattr(torch._C.DispatchKey, key))
    kept = kept.remove(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), kept):
        yield
