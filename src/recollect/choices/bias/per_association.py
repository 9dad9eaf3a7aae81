"""What a loss returns: one number per association, of that association alone, differentiable."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.trial import Handed, accepts, outside, sample_numbers, tried, undeclared

if TYPE_CHECKING:
    from recollect.choices.member import Member

__all__ = ["check_returns"]

LEADING, V = (2, 3), 4
ALONE = slice(1, 2), slice(2, 3)


def check_returns(bias: Member, own: tuple[str, ...]) -> str | None:
    """What is wrong with what a bias's `loss` and `error` return, in one sentence.

    They are tried on six associations, once for each different bias. One that raises is not judged:
    it may be written for other sizes or another device, and its own call will say.

    Args:
        bias: the bias.
        own: which of the two it states itself.
    """
    return tried(_refusal, bias, own)


@lru_cache(maxsize=512)
def _refusal(bias: Member, own: tuple[str, ...]) -> str | None:
    with outside():
        dtype = torch.get_default_dtype()
        g = torch.Generator().manual_seed(0)
        p, v = torch.randn(2, *LEADING, V, generator=g, dtype=dtype)
        if type(p) is not Tensor:
            raise RuntimeError("no numbers to try it on")
        numbers = {name: x.to(dtype) for name, x in sample_numbers(bias, LEADING, V).items()}
        for name in own:
            wrong = _wrong(getattr(bias, name), name, (p, v, numbers), f"{bias.title}.{name}")
            if wrong is not None:
                return wrong if wrong.startswith(bias.title) else f"{bias.title}.{name} {wrong}"
    return None


def _wrong(
    function: Callable[..., Any],
    name: str,
    given: tuple[Tensor, Tensor, dict[str, Tensor]],
    what: str,
) -> str | None:
    p, v, numbers = given
    if not accepts(function, p, v, numbers):
        return f"must take (prediction, value, gates), not {inspect.signature(function)}"
    handed = Handed(numbers)
    p, v = p.clone().requires_grad_(), v.clone().requires_grad_(name == "error")
    try:
        found = function(p, v, handed)
        cut = {key: x[ALONE] for key, x in numbers.items()}
        alone = function(p[ALONE], v[ALONE], cut)
    except Exception:
        return undeclared(handed, what)
    one, axes, how = {
        "loss": ("one number per association", "[...]", "sum over the last axis alone, .sum(-1)"),
        "error": ("one slope per value channel", "[..., V]", "take no sum or mean"),
    }[name]
    wanted = f"return {one}, a tensor {axes} of predictions [..., V]"
    if not isinstance(found, Tensor):
        return f"must {wanted}, not {type(found).__name__}"
    shape = p.shape if name == "error" else p.shape[:-1]
    if found.shape != shape:
        return f"must {wanted}: of {tuple(p.shape)} it made {tuple(found.shape)}; {how}"
    if not found.requires_grad:
        return (
            "carries no gradient: write it in operations that autograd follows from the "
            "prediction to what it returns, without detach, item or no_grad"
        )
    tolerance = math.sqrt(torch.finfo(p.dtype).eps)
    if not torch.allclose(found[ALONE], alone, tolerance, tolerance, equal_nan=True):
        return (
            "gives an association another number alone than beside others: "
            f"{wanted}, each of its own prediction and value only"
        )
    return None
