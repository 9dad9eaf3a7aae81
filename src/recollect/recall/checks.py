"""Checks of a call: each failure is one sentence that says what, where, and what to do instead."""

# What a caller hands over is not what its annotation says.
# pyright: reportUnnecessaryIsInstance=none

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.fields import Gate, Param
from recollect.choices.member import RecipeError
from recollect.state.state import State
from recollect.typing import Init, Params

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = [
    "check_call",
    "check_gates",
    "check_mask",
    "check_params",
    "check_recipe",
    "check_state",
    "check_values",
]


def check_call(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None,
    init: Init | None,
    mask: Tensor | None,
    borders: Tensor | None,
) -> None:
    """Shapes, devices and dtypes of q, k, v, and arguments that exclude each other.

    Raises:
        ValueError: with names and shapes.
        RecipeError: a memory whose sizes do not fit, or ``init`` together with ``state``.
    """
    n = recipe.associations
    keys = "[B, T, H, K]" if n == 1 else f"[B, T, H, {n}, K]"
    for name, x, want, dims in (
        ("q", q, "[B, T, H, K]", 4),
        ("k", k, keys, 4 + (n > 1)),
        ("v", v, keys.replace("K", "V"), 4 + (n > 1)),
    ):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor {want}, not {type(x).__name__}")
        if x.dim() != dims:
            raise ValueError(f"{name} must have shape {want}, not {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, not {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must share one dtype; {name} is {x.dtype} and q is {q.dtype}: cast "
                "them"
            )
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on one device; {name} is on {x.device} and q on {q.device}"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in all axes but the last; k is {list(k.shape)} and v "
            f"{list(v.shape)}"
        )
    if n > 1 and k.shape[3] != n:
        raise ValueError(
            f"this recipe takes {n} associations per token, so k and v need axis 3 of size {n}, "
            "not "
            f"{k.shape[3]}"
        )
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q and k must agree in batch and tokens; q is {list(q.shape)} and k {list(k.shape)}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"queries and keys must have one size K; q has {q.shape[-1]} and k {k.shape[-1]}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads, which must be a positive multiple of the {k.shape[2]} of "
            "k and v"
        )
    K, V = k.shape[-1], v.shape[-1]
    if K == 0 or V == 0:
        raise ValueError(f"keys and values need at least one channel; K = {K} and V = {V}")
    if not recipe.nonparametric:
        recipe.shapes(K, V)
    if state is not None and init is not None:
        raise RecipeError("init and state exclude each other: a state already holds its memory")
    if mask is not None and borders is not None:
        raise ValueError(
            "attention_mask and cu_seqlens exclude each other: packed rows have no padding"
        )
    if mask is not None:
        check_mask(mask, k.shape[0], k.shape[1])
    rows = k.shape[0]
    if borders is not None:
        rows = _check_borders(borders, k)
    if state is not None:
        if not isinstance(state, State):
            raise ValueError(
                f"state must be what an earlier call returned, not {type(state).__name__}"
            )
        if state.rows != rows:
            what = "documents" if borders is not None else "rows"
            raise ValueError(f"the state has {state.rows} rows and this call {rows} {what}")
        if state.sizes != (k.shape[2], K, V):
            raise ValueError(
                f"the state is of (H, K, V) = {state.sizes} and this call of {(k.shape[2], K, V)}"
            )
        if state.position.device != k.device:
            raise ValueError(
                f"the state is on {state.position.device} and k on {k.device}: use "
                "state.to(device=...)"
            )
        check_state(recipe, state, K, V)


def check_recipe(recipe: object) -> None:
    """That a recipe is one.

    Raises:
        RecipeError: anything else, saying what to give.
    """
    from recollect.recipe.recipe import Recipe

    if not isinstance(recipe, Recipe):
        hint = f"; rc.zoo.get({recipe!r}).recipe is one" if isinstance(recipe, str) else ""
        raise RecipeError(f"recipe must be an rc.Recipe, not {type(recipe).__name__}{hint}")


def check_mask(mask: object, B: int, T: int) -> None:
    """That an attention mask says which tokens are real, and nothing else.

    Raises:
        ValueError: another shape, or values other than 0 and 1 (looked at on the CPU).
    """
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (B, T):
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have shape {[B, T]} [B, T], not {found}")
    if mask.device.type != "cpu" or mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    odd = mask[(mask != 0) & (mask != 1)]
    if odd.numel():
        raise ValueError(
            "attention_mask must hold 1 at real tokens and 0 elsewhere, and holds "
            f"{odd[0].item():g}"
        )


def check_state(recipe: Recipe, state: State, K: int, V: int) -> None:
    """That a state could be this recipe's: parts and shapes, not values.

    Raises:
        RecipeError: it belongs to another recipe.
    """
    shapes, buffer, read = recipe.shapes(K, V), state.buffer, recipe.memory.read
    held = None if buffer is None else buffer.k.shape[1]
    kept = state.slots if state.dual is None else state.dual.slots
    asked = {gate.name for gate in recipe.gates()}
    pairs = (
        (
            "weights of shapes",
            [list(w.shape[2:]) for w in state.weights],
            [list(s) for s in shapes],
        ),
        ("slots", sorted(kept), sorted(recipe.algorithm.slots)),
        ("a memory of ones", state.ones is not None, read.normalize != "none" and not recipe.dual),
        ("rows by key", state.dual is not None, recipe.dual),
        ("a scale", state.log_scale is not None, read.normalize == "floor"),
        ("associations kept", held, held if buffer is None else recipe.span or held),
        (
            "gates kept",
            sorted(asked & set(buffer.rates)) if buffer else sorted(asked),
            sorted(asked),
        ),
    )
    for what, has, needs in pairs:
        if has != needs:
            raise RecipeError(
                f"this state belongs to another recipe: it has {what} {has}, and this one needs "
                f"{needs}"
            )


def _check_borders(borders: Tensor, k: Tensor) -> int:
    if k.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents in one row, so B must be 1, not {k.shape[0]}")
    tensor = isinstance(borders, Tensor)
    if not tensor or borders.dim() != 1 or borders.numel() < 2 or borders.is_floating_point():
        raise ValueError("cu_seqlens must be a tensor of whole numbers [N + 1], from 0 to T")
    ends = borders.tolist()
    if ends[0] != 0 or ends[-1] != k.shape[1] or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {k.shape[1]} without falling, not {_short(ends)}"
        )
    return len(ends) - 1


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ...]"


def _wanted(gate: Gate, recipe: Recipe, sizes: Mapping[str, int], lead: list[int]) -> list[int]:
    extra = [recipe.associations] if recipe.per_association(gate) else []
    return [*lead, *extra, *(sizes[axis] for axis in gate.axes)]


def check_gates(
    recipe: Recipe, gates: Mapping[str, Tensor], *, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """Names, shapes and devices of the gates.

    Raises:
        RecipeError: missing, unknown, or of the wrong shape or device.
    """
    asked = {gate.name: gate for gate in recipe.gates()}
    missing, unknown = asked.keys() - gates.keys(), gates.keys() - asked.keys()
    lead = list(k.shape[:3])
    sizes = recipe.axes(k.shape[-1], v.shape[-1])
    if missing:
        name = sorted(missing)[0]
        gate = asked[name]
        shape = _wanted(gate, recipe, sizes, lead)
        raise RecipeError(
            f"gate {name!r} is missing: {gate.owner} needs it with shape {shape}, values "
            f"{gate.range}"
        )
    if unknown:
        needs = ", ".join(sorted(asked)) or "none"
        raise RecipeError(
            f"gate {sorted(unknown)[0]!r} is unknown to this recipe, which needs: {needs}"
        )
    for name, gate in asked.items():
        x, shape = gates[name], _wanted(gate, recipe, sizes, lead)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise RecipeError(f"gate {name!r} must be a floating-point tensor of shape {shape}")
        if list(x.shape) != shape:
            raise RecipeError(
                f"gate {name!r} of {gate.owner} must have shape {shape}, not {list(x.shape)}"
            )
        if x.device != q.device:
            raise RecipeError(f"gate {name!r} is on {x.device} and q on {q.device}: move it")


def check_values(recipe: Recipe, gates: Mapping[str, Tensor], params: Params) -> None:
    """Ranges of gates and params, on the CPU (a GPU would have to wait for the answer).

    Raises:
        RecipeError: a value outside its range.
    """
    asked: list[tuple[str, Gate | Param, Tensor]] = [
        *(("gate", gate, gates[gate.name]) for gate in recipe.gates()),
        *(("param", param, params[param.name]) for param in recipe.params()),
    ]
    for kind, item, given in asked:
        x = given.detach()
        if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.numel():
            continue
        least, most = x.aminmax()
        low, high, span = least.item(), most.item(), item.range
        bad = (
            low
            if span.low is not None and (low < span.low or (span.low_open and low == span.low))
            else high
            if span.high is not None
            and (high > span.high or (span.high_open and high == span.high))
            else None
        )
        if bad is not None:
            hint = " (decays are given as logarithms)" if item.name.startswith("log_") else ""
            raise RecipeError(
                f"{kind} {item.name!r} of {item.owner} must be {span}, and holds {bad:.4g}{hint}"
            )


def check_params(
    recipe: Recipe, params: Mapping[str, Tensor], *, H: int, K: int, V: int, like: Tensor
) -> None:
    """Names, shapes and devices of the params.

    Raises:
        RecipeError: missing, unknown, or of the wrong shape or device.
    """
    asked = {param.name: param for param in recipe.params()}
    sizes = recipe.axes(K, V)
    missing, unknown = asked.keys() - params.keys(), params.keys() - asked.keys()
    if missing:
        param = asked[sorted(missing)[0]]
        shape = [H, *(sizes[axis] for axis in param.axes)]
        raise RecipeError(
            f"param {param.name!r} is missing: {param.owner} needs it with shape {shape}"
        )
    if unknown:
        needs = ", ".join(sorted(asked)) or "none"
        raise RecipeError(
            f"param {sorted(unknown)[0]!r} is unknown to this recipe, which needs: {needs}"
        )
    for name, param in asked.items():
        shape, x = [H, *(sizes[axis] for axis in param.axes)], params[name]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise RecipeError(f"param {name!r} must be a floating-point tensor of shape {shape}")
        if list(params[name].shape) != shape:
            raise RecipeError(
                f"param {name!r} of {param.owner} must have shape {shape}, not "
                f"{list(params[name].shape)}"
            )
        if params[name].device != like.device:
            raise RecipeError(
                f"param {name!r} is on {params[name].device} and q on {like.device}: move it"
            )
