"""Checks of the arguments of a call; each message states an alternative."""

# Callers may pass other types than the annotations.
# pyright: reportUnnecessaryIsInstance=none

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from recollect.choices.runtime import can_read_values, has_data
from recollect.engines.base import Engine
from recollect.engines.common.problem import Problem, state_dtype
from recollect.fields import Gate, int_check, validate
from recollect.messages import RecipeError, short_repr, suggestion
from recollect.recipe.bound import BoundRecipe, SizedQuantity
from recollect.recipe.canonical import first_difference, is_valid
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.typing import Gates, Init, Params

__all__ = [
    "DENSE",
    "as_mapping",
    "check_boundaries",
    "check_call",
    "check_finite",
    "check_flags",
    "check_init",
    "check_key_norms",
    "check_mask",
    "check_params",
    "check_precision",
    "check_rows",
    "check_state",
    "check_state_sizes",
    "check_tensors",
    "check_values",
    "layout_name",
    "may_contain_nan",
    "refuse_transforms",
    "tensors_of",
]

_HALF = (torch.bfloat16, torch.float16)
_NEEDS_VALUES = (
    "{name} moves tokens by its numbers, and tensors of the meta device and fake ones have shapes "
    "alone: leave it out, or give real tensors throughout"
)
DENSE = "give x.to_dense(), or x.to_padded_tensor(0) with an attention_mask"


# -- single arguments -----------------------------------------------------------------------------


def layout_name(x: Tensor) -> str:
    """Name the layout of a tensor that is not dense, for a message."""
    return "a nested one" if x.is_nested else f"one of layout {x.layout}"


def check_flags(**flags: object) -> None:
    """Raise ValueError for the first flag that is not a bool: the word "no" would be true."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise ValueError(f"{name} must be True or False, not {short_repr(value)}")


def check_tensors(recipe: Recipe, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if shapes, devices or dtypes of q, k and v do not fit."""
    n = recipe.associations_per_token
    keys = "[B, T, H, K]" if n == 1 else f"[B, T, H, {n}, K]"
    for name, x, shape, dims in (
        ("q", q, "[B, T, H, K]", 4),
        ("k", k, keys, 4 + (n > 1)),
        ("v", v, keys.replace("K", "V"), 4 + (n > 1)),
    ):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor {shape}, not {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested:
            raise ValueError(f"{name} must be a dense tensor, not {layout_name(x)}: {DENSE}")
        if x.dim() != dims:
            raise ValueError(f"{name} must have shape {shape}, not {list(x.shape)}")
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
            f"not {k.shape[3]}"
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


def as_mapping(tensors: Gates | Params | None, kind: str) -> Mapping[str, Tensor]:
    """Return gates or params by name; empty for ``None``. Raise ValueError for another type."""
    if tensors is None:
        return {}
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{kind} must map names to tensors, not {type(tensors).__name__}")
    return tensors


def check_mask(mask: object, like: Tensor) -> None:
    """Raise ValueError unless a mask marks real tokens of ``like [B, T, ...]`` by 1, others by 0.

    Values are checked on the CPU only.
    """
    B, T = like.shape[:2]
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (B, T):
        actual = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have shape {[B, T]} [B, T], not {actual}")
    if mask.layout is not torch.strided:
        raise ValueError(f"attention_mask must be a dense tensor, not {layout_name(mask)}: {DENSE}")
    if not (has_data(mask) and has_data(like)):
        raise ValueError(_NEEDS_VALUES.format(name="attention_mask"))
    if mask.dtype == torch.bool or not can_read_values(mask):
        return
    invalid = mask[(mask != 0) & (mask != 1)]
    if invalid.numel():
        raise ValueError(
            "attention_mask must be 1 at valid tokens and 0 elsewhere, and contains "
            f"{invalid[0].item():g}"
        )


def check_boundaries(boundaries: Tensor, k: Tensor) -> int:
    """Return the number of documents in the one sequence of ``k [1, T, ...]``.

    Raises:
        ValueError: boundaries that do not rise from 0 to T, or several sequences.
    """
    if k.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents in one row, so B must be 1, not {k.shape[0]}")
    if (
        not isinstance(boundaries, Tensor)
        or boundaries.dim() != 1
        or boundaries.numel() < 2
        or boundaries.is_floating_point()
    ):
        raise ValueError("cu_seqlens must be a tensor of whole numbers [N + 1], from 0 to T")
    if not (has_data(boundaries) and has_data(k)):
        raise ValueError(_NEEDS_VALUES.format(name="cu_seqlens"))
    offsets = boundaries.tolist()
    rises = all(a <= b for a, b in itertools.pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != k.shape[1] or not rises:
        text = str(offsets) if len(offsets) <= 8 else f"[{', '.join(map(str, offsets[:6]))}, ...]"
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {k.shape[1]} without falling, not {text}"
        )
    return len(offsets) - 1


def check_rows(mask: Tensor | None, boundaries: Tensor | None, x: Tensor) -> int:
    """Check the mask or the boundaries of ``x [B, T, ...]``; return the number of sequences."""
    if mask is not None and boundaries is not None:
        raise ValueError(
            "attention_mask and cu_seqlens exclude each other: packed rows have no padding"
        )
    if mask is not None:
        check_mask(mask, x)
    return x.shape[0] if boundaries is None else check_boundaries(boundaries, x)


def tensors_of(init: Init) -> tuple[Tensor, ...]:
    """Return an initial memory as a tuple of tensors. Raise ValueError for another type."""
    parts = (init,) if isinstance(init, Tensor) or not isinstance(init, Iterable) else tuple(init)
    for x in parts:
        if not isinstance(x, Tensor):
            raise ValueError(
                f"initial_memory must be a tensor, or several, not {type(x).__name__} {x!r}"
            )
    return parts


def refuse_transforms(tensors: Iterable[object]) -> None:
    """Raise RuntimeError inside `torch.func` transforms, or for tensors with a tangent.

    Hand-written backward passes support neither. Tensors are checked inside a dual level only.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError(
            "recollect does not run inside the transforms of torch.func (vmap, grad, jvp, jacrev, "
            "...), which do not support its inner gradients and backward passes: use the batch "
            "axis B instead of vmap, and torch.autograd.grad instead of grad"
        )
    level: int = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    if level < 0:
        return
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                "recollect does not support forward-mode derivatives (torch.autograd.forward_ad): "
                "use torch.autograd.grad"
            )


# -- a call ---------------------------------------------------------------------------------------


def check_call(call: Problem) -> None:
    """Check all arguments except q, k and v.

    Raises:
        ValueError: types, shapes, devices or values that do not fit.
        RecipeError: gates or params that the recipe does not declare, or of other shapes;
            ``initial_memory`` together with ``state``; reads after the end of a window.
    """
    state = call.state
    if state is not None and call.initial_memory is not None:
        raise RecipeError(
            "initial_memory and state exclude each other: a state contains its memory"
        )
    rows = check_rows(call.attention_mask, call.cu_seqlens, call.k)
    if state is not None:
        _check_call_state(state, rows, call)
    if call.chunk_size is not None:
        call.chunk_size = validate("chunk_size", int_check(1), call.chunk_size)
    if not call.trusted:
        lead = list(call.k.shape[:2])
        _check_quantities("gate", call.bound.gates, call.gates, lead=lead, like=call.q)
        check_params(call.bound, call.params, like=call.q)
    if not call.causal and any(
        part.horizon is not None for part in call.bound.recipe.context.restrictions
    ):
        raise RecipeError(
            "causal=False reads after all tokens are memorised, and a window contains only the "
            "last ones: use context.KernelWeighted(kernel=...) without restrictions"
        )


def _check_call_state(state: State, rows: int, call: Problem) -> None:
    if not isinstance(state, State):
        raise ValueError(f"state must be a state that recall returned, not {type(state).__name__}")
    if state.rows != rows:
        kind = "rows" if call.cu_seqlens is None else "documents"
        raise ValueError(f"the state has {state.rows} rows, and this call has {rows} {kind}")
    bound = call.bound
    check_state_sizes(bound, state)
    if state.position.device != call.k.device:
        raise ValueError(
            f"the state is on {state.position.device} and k on {call.k.device}: use "
            "state.to(device=...)"
        )
    if state.host_position is None and not has_data(state.position):
        raise ValueError(
            "batch elements of this state have different positions, which determine shapes, and "
            "the meta device has no values: start without a state"
        )
    check_state(bound, state)
    check_precision(state, state_dtype(call.q, call.k, call.v), bound.engine)


def check_state_sizes(bound: BoundRecipe, state: State) -> None:
    """Raise ValueError if a state has other sizes H, K and V than a bound recipe."""
    if state.sizes != (bound.H, bound.K, bound.V):
        raise ValueError(
            f"the state is of (H, K, V) = {state.sizes} and this call of "
            f"{(bound.H, bound.K, bound.V)}"
        )


def check_precision(state: State, dtype: torch.dtype, engine: Engine) -> None:
    """Raise ValueError if a state has too many or too few digits for inputs of this dtype.

    A float64 state needs float64 inputs. A state that was rounded to half precision is refused if
    the engine needs its digits.
    """
    if not engine.accepts_half_precision_state:
        several = (state.weights, *state.algorithm_state.values())
        for tensors in several if state.kernel_rows is None else (*several, state.kernel_rows.rows):
            for x in tensors:
                if x.dtype in _HALF:
                    raise ValueError(
                        f"tensors of this state were rounded to {x.dtype}, and the {engine.name} "
                        f"engine needs {dtype}: keep the state as a call returned it, or convert "
                        f"it by state.to(dtype={dtype})"
                    )
    if dtype == torch.float32 and state.dtype == torch.float64:
        raise ValueError(
            "the state is float64 and the inputs are not: pass float64 inputs, or round the "
            "state by state.to(dtype=torch.float32)"
        )


def check_state(bound: BoundRecipe, state: State) -> None:
    """Raise RecipeError if a state belongs to another recipe, by its id, parts and shapes."""
    recipe, buffer = bound.recipe, state.buffer
    if state.recipe_id != bound.recipe_id and state.recipe_id is not None:
        if not is_valid(state.recipe_id):
            raise RecipeError(
                f"recipe_id of this state, {short_repr(state.recipe_id)}, is not the text of a "
                "recipe: it was changed after it was saved, so start without a state"
            )
        choice, state_member, member = first_difference(state.recipe_id, bound.recipe_id)
        raise RecipeError(
            f"this state belongs to another recipe: its {choice} is {state_member}, not "
            f"{member}; continue it with the recipe that wrote it, or start without a state"
        )
    rows = state.kernel_rows
    shapes: list[tuple[int, ...]] = []
    for w in state.weights:  # runs for every token: no generators
        shapes.append(tuple(w.shape[2:]))
    slots = state.algorithm_state if rows is None else rows.slots
    parts: tuple[tuple[str, object, object], ...] = (
        ("weights of shapes", tuple(shapes), bound.weight_shapes),
        ("slots", slots.keys(), bound.slot_shapes.keys()),
        ("a memory of ones", state.normalizer is not None, bound.has_normalizer),
        ("rows by key", rows is not None, recipe.uses_kernel_rows),
        ("a scale", state.log_scale is not None, bound.is_stabilized),
    )
    if buffer is not None:
        size, required = buffer.k.shape[1], bound.gates.keys() | bound.constants.keys()
        required -= {recipe.memory.slope_gate}
        parts = (
            *parts,
            ("associations kept", size, recipe.buffer_size or size),
            ("numbers kept", required & buffer.rates.keys(), required),
        )
    for part, actual, expected in parts:
        if actual != expected:
            raise RecipeError(
                f"this state belongs to another recipe: it has {part} {_listed(actual)}, and this "
                f"one needs {_listed(expected)}"
            )


def _listed(value: object) -> str:
    """Join names in alphabetical order, or shapes in their own, for a message."""
    if not isinstance(value, Iterable):
        return str(value)
    items = map(list, value) if isinstance(value, tuple) else sorted(value)
    return ", ".join(map(str, items)) or "none"


# -- gates and params -----------------------------------------------------------------------------


def check_params(bound: BoundRecipe, params: Mapping[str, Tensor], *, like: Tensor) -> None:
    """Raise RecipeError for params that are missing, unknown, or of the wrong shape or device."""
    _check_quantities("param", bound.params, params, lead=[], like=like)


def _check_quantities(
    kind: str,
    declared: Mapping[str, SizedQuantity],
    tensors: Mapping[str, Tensor],
    *,
    lead: list[int],
    like: Tensor,
) -> None:
    missing, unknown = declared.keys() - tensors.keys(), tensors.keys() - declared.keys()
    unknown_text = ""
    if unknown:
        wrong = sorted(unknown)[0]
        near = suggestion(wrong, sorted(missing or declared))
        hint = f"; {near}" if near.startswith("did") else ""
        unknown_text = f"{wrong!r} is unknown to this recipe"
        if not missing:
            needs = ", ".join(sorted(declared)) or "none"
            raise RecipeError(f"{kind} {unknown_text}, which needs: {needs}{hint}")
        unknown_text = f"; {unknown_text}{hint}"
    if missing:
        name = sorted(missing)[0]
        quantity, shape = declared[name].declared, [*lead, *declared[name].shape]
        values = f", values {quantity.range}" if isinstance(quantity, Gate) else ""
        raise RecipeError(
            f"{kind} {name!r} is missing: {quantity.owner} needs it with shape {shape}{values}"
            f"{unknown_text}"
        )
    for name, quantity in declared.items():
        x, shape = tensors[name], [*lead, *quantity.shape]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise RecipeError(f"{kind} {name!r} must be a floating-point tensor of shape {shape}")
        if x.layout is not torch.strided:
            raise RecipeError(f"{kind} {name!r} must be a dense tensor: give its to_dense()")
        if list(x.shape) != shape:
            raise RecipeError(
                f"{kind} {name!r} of {quantity.declared.owner} must have shape {shape}, not "
                f"{list(x.shape)}"
            )
        if x.device != like.device:
            raise RecipeError(f"{kind} {name!r} is on {x.device} and q on {like.device}: move it")


def check_values(bound: BoundRecipe, gates: Mapping[str, Tensor], params: Params) -> None:
    """Raise RecipeError for a value of a gate or param outside its range, on the CPU only."""
    for kind, declared, tensors in (("gate", bound.gates, gates), ("param", bound.params, params)):
        for name, quantity in declared.items():
            x = tensors[name].detach()
            if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.numel():
                continue
            if type(x) is not Tensor and not can_read_values(x):
                continue
            low, high = (end.item() for end in x.aminmax())
            span = quantity.declared.range
            out_of_range = None
            if span.low is not None and (low < span.low or (span.low_open and low == span.low)):
                out_of_range = low
            elif span.high is not None and (
                high > span.high or (span.high_open and high == span.high)
            ):
                out_of_range = high
            if out_of_range is not None:
                hint = " (decays are given as logarithms)" if quantity.declared.is_log else ""
                raise RecipeError(
                    f"{kind} {name!r} of {quantity.declared.owner} must be {span}, and holds "
                    f"{out_of_range:.4g}{hint}"
                )


# -- NaN and infinities ---------------------------------------------------------------------------


def may_contain_nan(tensors: Iterable[Tensor]) -> bool:
    """Return whether floating-point CPU tensors may contain a NaN or an infinity.

    A finite sum proves that there is none. Tensors on other devices are not read.
    """
    if torch.compiler.is_compiling():
        return False
    for x in tensors:  # runs for every token: no generators
        if x.device.type != "cpu" or not x.is_floating_point():
            continue
        total = (x.detach() if x.requires_grad else x).sum()
        # In a fake mode, results of real parameters are fake.
        readable = type(total) is Tensor or can_read_values(total)
        if readable and not math.isfinite(total.item()):
            return True
    return False


def check_init(init: Init) -> None:
    """Raise ValueError for an initial memory with NaN or infinities, on the CPU."""
    tensors = tensors_of(init)
    if not may_contain_nan(tensors):
        return
    for x in tensors:
        if not bool(x.isfinite().all()):
            raise ValueError(
                f"initial_memory has {_not_finite(x)}, and must be finite: mend its source"
            )


def _not_finite(x: Tensor) -> str:
    return "a NaN" if bool(x.isnan().any()) else "an infinity"


def check_key_norms(call: Problem) -> None:
    """Raise ValueError for keys and queries for which a normalized read would be 0/0, on the CPU.

    The features of long vectors leave the range of the dtype.
    """
    recipe = call.bound.recipe
    if recipe.memory.read.normalize != "sum":
        return
    features, dtype = recipe.features, state_dtype(call.q, call.k, call.v)
    limit = features.longest(call.k.shape[-1], dtype)
    if limit is None:
        return
    for name, x in (("key", call.k), ("query", call.q)):
        if not can_read_values(x) or not x.numel():
            continue
        lengths = x.detach().to(dtype).norm(dim=-1).amax(-1)  # [B, T]
        if call.lengths is not None:  # padding may hold anything
            steps = torch.arange(lengths.shape[1])
            lengths = torch.where(steps < call.lengths[:, None], lengths, 0.0)
        longest = lengths.max().item()
        if longest > limit:
            raise ValueError(
                f"{features.title} cannot lift a {name} of length {longest:.3g}: beyond "
                f"{limit:.3g} its features leave the range of {dtype}, and the read would be 0/0; "
                "give it shorter ones (LayerOptions(qk_norm='rms'), or normalise the layer's "
                "input), a higher temperature, or float64"
            )


def check_finite(call: Problem) -> None:
    """Raise ValueError for NaN and infinities in the inputs, with the caller's row and token.

    A log decay of −inf is valid: it forgets everything.
    """
    if not may_contain_nan((call.q, call.k, call.v, *call.gates.values(), *call.params.values())):
        return
    logs = {f"gate {name!r}" for name, gate in call.bound.gates.items() if gate.declared.is_log}
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    inputs |= {f"gate {name!r}": x for name, x in call.gates.items()}
    inputs |= {f"param {name!r}": x for name, x in call.params.items()}
    for name, x in inputs.items():
        if not may_contain_nan((x,)):
            continue
        x = x.detach()
        invalid = ~(x < torch.inf) if name in logs else ~x.isfinite()
        if not bool(invalid.any()):
            continue
        kind = _not_finite(x)
        if name.startswith("param"):
            raise ValueError(f"{name} has {kind}, and must be finite: mend its source")
        row, token = (invalid.nonzero()[0, :2]).tolist()
        if call.source_index is not None:
            token = int(call.source_index[row, token])
        raise ValueError(
            f"{name} has {kind} at row {0 if call.rows_are_documents else row}, token {token}: the "
            "memory would carry it to every later token; mask that token or mend its source"
        )
