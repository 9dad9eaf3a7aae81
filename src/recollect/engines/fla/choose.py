"""Selection of the operator of flash-linear-attention, and of its dtype, for a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from recollect.choices.matmul_precision import active, is_full_precision
from recollect.choices.runtime import is_cacheable
from recollect.engines.common.problem import Problem, requires_grad, state_dtype
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

__all__ = [
    "DEVICES",
    "MAX_RECURRENT_TOKENS",
    "Choice",
    "Offer",
    "allowed",
    "choose",
    "offer",
    "refusal",
]

DEVICES = {"cuda"}
"""Device types on which its kernels are used."""

MAX_RECURRENT_TOKENS = 16
"""Maximum number of tokens without a gradient for which the recurrent float32 kernel is used."""

MAX_RECURRENT_FEATURES = 256
"""Maximum number of key channels of the recurrent kernel, which needs a column in registers."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Operators of the package for a recipe at known sizes."""

    structure: Structure | None  # structure of the recipe, or None without operators
    operators: tuple[Operator, ...]  # operators that compute it, the most specific first
    reason: str | None  # reason why there are no operators, or None
    is_required: bool  # whether the caller requested engine="fla"

    @property
    def without_gated_backward(self) -> tuple[Operator, ...]:
        """Operators with a working backward pass if `gated_backward_raises`."""
        decay = None if self.structure is None else self.structure.decay
        return tuple(
            operator for operator in self.operators if decay not in operator.gated_backward
        )

    def __str__(self) -> str:
        if not self.operators:
            return f"not {PACKAGE}: {self.reason}"
        half, single = _by_type(self.operators)
        text = f"on CUDA with recollect-layers[gpu]: {half.name} of {PACKAGE}"
        if not half.uses_matmul:
            return text
        if single is half:
            text += ", if products may be bf16, fp16 or TF32"
        else:
            text += f", if products may be bf16 or fp16; {single.name}, if TF32"
        others = _by_type(self.without_gated_backward)
        pairs = zip((half, single), others, strict=True)
        replaced = {operator.name: other.name for operator, other in pairs if operator is not other}
        if not replaced:
            return text
        return (
            f"{text}\ntraining on {AFFECTED}: {' and '.join(dict.fromkeys(replaced.values()))} in "
            f"place of {' and '.join(replaced)}, whose backward pass raises there"
        )


def _by_type(operators: tuple[Operator, ...]) -> tuple[Operator, Operator]:
    """Return the first operator, which supports 16 bits, and the first that supports TF32."""
    half = operators[0]
    return half, next((operator for operator in operators if operator.float32), half)


def offer(bound: BoundRecipe, engine: str = "auto") -> Offer:
    """Return the operators of the package for a recipe; raise if a requested one does not exist."""
    if engine not in ("auto", "fla"):
        reason = f"engine={engine!r} does not use it"
        return Offer(structure=None, operators=(), reason=reason, is_required=False)
    recipe_structure, fitting, reason = structure(bound), (), None
    if isinstance(recipe_structure, str):
        recipe_structure, reason = None, recipe_structure
    else:
        candidates, features = tuple(operators(recipe_structure)), bound.num_features
        fitting = tuple(x for x in candidates if x.supports(torch.bfloat16, features))
        if not fitting:
            max_features = max((x.max_features or 0 for x in candidates), default=0)
            reason = f"its operators support at most {max_features} key features, not {features}"
    if engine == "fla" and reason is not None:
        raise RecipeError(
            f"engine='fla' cannot run this recipe: {reason}; use engine='auto', which uses "
            f"{PACKAGE} when it can"
        )
    return Offer(
        structure=recipe_structure, operators=fitting, reason=reason, is_required=engine == "fla"
    )


def allowed(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype for products of q, k and v, or ``None`` if no dtype is allowed.

    The kernels multiply in the dtype of their inputs, float32 as TF32, and accumulate in float32.
    Inside `matmul_precision`, the result is float32 for ``"tf32"`` and ``None`` for ``"float32"``,
    because no kernel multiplies in full float32.
    """
    if active.precision is not None:
        return torch.float32 if active.precision == "tf32" else None
    if dtype in (torch.bfloat16, torch.float16):
        return dtype
    return dtype if dtype == torch.float32 and not is_full_precision("cuda") else None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Operator and dtype of a call."""

    operator: Operator  # operator that runs the call
    dtype: torch.dtype  # dtype of its products
    is_recurrent: bool = False  # whether its recurrent function runs the call


def choose(problem: Problem, offered: Offer) -> Choice | str:
    """Return the operator for a call, or the reason why there is none."""
    reason = refusal(problem.q) or offered.reason
    if reason is not None:
        return reason
    recipe_structure, tokens, state = offered.structure, problem.k.shape[1], problem.state
    assert recipe_structure is not None  # implied by offered.reason is None
    if recipe_structure.memory in ("mean", "ridge") and tokens == 1:
        return "its operator cannot run a single token"
    if recipe_structure.memory == "mean" and state.buffer is not None and state.buffer.k.shape[1]:
        return "its attention starts at the first token, and the state contains earlier tokens"
    input_dtype = reduce(torch.promote_types, (problem.q.dtype, problem.k.dtype, problem.v.dtype))
    if state_dtype(problem.q, problem.k, problem.v) == torch.float64:
        return "it does not support float64"
    features, needs_gradient = problem.bound.num_features, requires_grad(problem)
    if tokens <= MAX_RECURRENT_TOKENS and features <= MAX_RECURRENT_FEATURES and not needs_gradient:
        for operator in offered.operators:
            if operator.token is not None:
                return Choice(operator=operator, dtype=torch.float32, is_recurrent=True)
    if not offered.operators[0].uses_matmul:
        return Choice(operator=offered.operators[0], dtype=torch.float32)
    dtype = allowed(input_dtype)
    if dtype is None and active.precision is not None:
        return "precision='float32' is requested, and it multiplies float32 as TF32"
    if dtype is None:
        return (
            "it multiplies float32 as TF32, and torch.get_float32_matmul_precision() is 'highest': "
            "set it to 'high', or pass bfloat16"
        )
    if dtype == torch.float16 and (problem.bound.has_features or problem.bound.is_stabilized):
        dtype = torch.float32  # TF32 has as many bits as float16 and a larger range
    raises = needs_gradient and gated_backward_raises()
    for operator in offered.without_gated_backward if raises else offered.operators:
        if operator.supports(dtype, features):
            return Choice(operator=operator, dtype=dtype)
    return f"its operators for this recipe do not support {str(dtype).removeprefix('torch.')}"


def refusal(x: Tensor) -> str | None:
    """Return the reason why the package cannot run a call with the input x, or ``None``."""
    if x.device.type not in DEVICES:
        return f"its kernels run on {' and '.join(sorted(DEVICES))}, not on {x.device.type}"
    if not installed():
        return f"{PACKAGE} and triton are not installed: install recollect-layers[gpu]"
    if not is_cacheable(x):
        return "its kernels cannot be part of a compiled graph"
    if not x.numel():
        return "the inputs are empty"
    return None
