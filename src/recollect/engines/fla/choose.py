"""Whether flash-linear-attention takes a call, with which operator and in which type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from recollect.choices.matmul_precision import active, is_full_precision
from recollect.choices.runtime import is_cacheable
from recollect.engines.common.problem import Problem, state_dtype, wants_gradient
from recollect.engines.fla.operators import (
    AFFECTED,
    PACKAGE,
    Operator,
    gated_backward_raises,
    installed,
    operators,
)
from recollect.engines.fla.structure import Structure, structure
from recollect.messages import RecipeError
from recollect.recipe.bound import BoundRecipe

__all__ = ["DEVICES", "FEW", "Choice", "Offer", "allowed", "choose", "offer", "refusal"]

DEVICES = {"cuda"}
"""Types of devices that its kernels are taken on."""

FEW = 16
"""Tokens without a gradient that are computed one after the other, by one kernel in float32."""

WIDE = 256
"""Most key channels of that kernel, which holds a column of the memory in registers."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What the package has for a recipe at known sizes.

    Attributes:
        structure: of the recipe; ``None`` where nothing is on offer.
        operators: that compute it, the closest first.
        reason: why there is none.
        must: whether the caller takes nothing else (``engine="fla"``).
    """

    structure: Structure | None
    operators: tuple[Operator, ...]
    reason: str | None
    must: bool

    @property
    def without_gated_backward(self) -> tuple[Operator, ...]:
        """The operators that train where `gated_backward_raises`, the closest first."""
        decay = None if self.structure is None else self.structure.decay
        return tuple(one for one in self.operators if decay not in one.gated_backward)

    def __str__(self) -> str:
        if not self.operators:
            return f"not {PACKAGE}: {self.reason}"
        half, single = _by_type(self.operators)
        text = f"on CUDA with recollect-layers[gpu]: {half.name} of {PACKAGE}"
        if not half.multiplies:
            return text
        if single is half:
            text += ", where products may be bf16, fp16 or TF32"
        else:
            text += f", where products may be bf16 or fp16; {single.name}, where TF32"
        others = _by_type(self.without_gated_backward)
        pairs = zip((half, single), others, strict=True)
        replaced = {one.name: other.name for one, other in pairs if one is not other}
        if not replaced:
            return text
        return (
            f"{text}\ntraining on {AFFECTED}: {' and '.join(dict.fromkeys(replaced.values()))} in "
            f"place of {' and '.join(replaced)}, whose backward pass raises there"
        )


def _by_type(operators: tuple[Operator, ...]) -> tuple[Operator, Operator]:
    """The first operator that takes 16 bits, and the first that takes float32 as TF32."""
    half = operators[0]
    return half, next((one for one in operators if one.float32), half)


def offer(bound: BoundRecipe, engine: str = "auto") -> Offer:
    """What the package has for a recipe.

    Args:
        bound: the recipe.
        engine: as `recollect.recall` takes it.

    Raises:
        RecipeError: nothing, where ``engine="fla"`` takes nothing else.
    """
    must = engine == "fla"
    offers = _on_offer(bound, must) if engine in ("auto", "fla") else _not_asked(engine)
    if must and offers.reason is not None:
        raise RecipeError(
            f"engine='fla' cannot run this recipe: {offers.reason}; use engine='auto', which takes "
            f"{PACKAGE} where it can"
        )
    return offers


def _not_asked(engine: str) -> Offer:
    reason = f"engine={engine!r} does not take it"
    return Offer(structure=None, operators=(), reason=reason, must=False)


def _on_offer(bound: BoundRecipe, must: bool) -> Offer:
    what = structure(bound)
    if isinstance(what, str):
        return Offer(structure=None, operators=(), reason=what, must=must)
    features = bound.num_features
    fitting = tuple(one for one in operators(what) if one.takes(torch.bfloat16, features))
    reason = None
    if not fitting:
        widest = max((one.widest or 0 for one in operators(what)), default=0)
        reason = f"its operators take keys of at most {widest} features, not {features}"
    return Offer(structure=what, operators=fitting, reason=reason, must=must)


def allowed(dtype: torch.dtype) -> torch.dtype | None:
    """The type in which products of a call may be taken, or ``None``.

    Its kernels multiply in the type that they are given, float32 as TF32, and add in float32.
    Inside `matmul_precision` it is float32 for ``"tf32"``, and no type for ``"float32"``: no
    kernel multiplies all bits.

    Args:
        dtype: of q, k and v together.
    """
    if active.precision is not None:
        return torch.float32 if active.precision == "tf32" else None
    if dtype in (torch.bfloat16, torch.float16):
        return dtype
    return dtype if dtype == torch.float32 and not is_full_precision("cuda") else None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a call is run.

    Attributes:
        operator: that runs it.
        dtype: in which it multiplies.
        few: whether by its function for a few tokens.
    """

    operator: Operator
    dtype: torch.dtype
    few: bool = False


def choose(problem: Problem, offered: Offer) -> Choice | str:
    """The operator that takes a call, or why none does.

    Args:
        problem: the call.
        offered: what there is for its recipe.
    """
    reason = refusal(problem.q) or offered.reason
    if reason is not None:
        return reason
    what, tokens, state = offered.structure, problem.k.shape[1], problem.state
    assert what is not None  # there is no reason
    if what.memory in ("mean", "ridge") and tokens == 1:
        return "its operator has no way for one token"
    if what.memory == "mean" and state.buffer is not None and state.buffer.k.shape[1]:
        return "its attention begins at the first token, and the state holds others"
    given = reduce(torch.promote_types, (problem.q.dtype, problem.k.dtype, problem.v.dtype))
    if state_dtype(problem.q, problem.k, problem.v) == torch.float64:
        return "it has no float64"
    features, trains = problem.bound.num_features, wants_gradient(problem)
    if tokens <= FEW and features <= WIDE and not trains:
        for one in offered.operators:
            if one.token is not None:
                return Choice(operator=one, dtype=torch.float32, few=True)
    if not offered.operators[0].multiplies:
        return Choice(operator=offered.operators[0], dtype=torch.float32)
    dtype = allowed(given)
    if dtype is None and active.precision is not None:
        return "precision='float32' was asked for, and it multiplies float32 as TF32"
    if dtype is None:
        return (
            "it multiplies float32 as TF32, and torch.get_float32_matmul_precision() is 'highest': "
            "set it to 'high', or give bfloat16"
        )
    if dtype == torch.float16 and (problem.bound.has_features or problem.bound.is_stabilized):
        dtype = torch.float32  # of as many bits, and features may be large
    raises = trains and gated_backward_raises()
    for one in offered.without_gated_backward if raises else offered.operators:
        if one.takes(dtype, features):
            return Choice(operator=one, dtype=dtype)
    return f"its operators for this recipe do not take {str(dtype).removeprefix('torch.')}"


def refusal(x: Tensor) -> str | None:
    """Why the package is not taken where a tensor is, whatever the recipe.

    Args:
        x: of the call.
    """
    if x.device.type not in DEVICES:
        return f"its kernels run on {' and '.join(sorted(DEVICES))}, not on {x.device.type}"
    if not installed():
        return f"{PACKAGE} and triton are not installed: install recollect-layers[gpu]"
    if not is_cacheable(x):
        return "its kernels are no part of a compiled graph"
    if not x.numel():
        return "there is nothing to compute"
    return None
