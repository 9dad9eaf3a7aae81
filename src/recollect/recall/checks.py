"""Checks of the arguments of a call; each failure is one sentence with what to do instead."""

# What a caller hands over is not what its annotation says.
# pyright: reportUnnecessaryIsInstance=none

# More than 400 lines: every check of a call, in the order in which they are made.

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from recollect.choices.devices import holds, looks
from recollect.choices.fields import Gate
from recollect.choices.member import RecipeError
from recollect.engines.common.problem import state_dtype
from recollect.engines.select import Engine
from recollect.fields import held, whole
from recollect.recall.arguments import check_borders, check_mask
from recollect.recall.call import Call
from recollect.recipe.normal_form import differing, is_normal_form
from recollect.recipe.sized import SizedNumber, SizedRecipe
from recollect.state.state import State
from recollect.typing import Init, Params
from recollect.wording import nearest, shown

_HALF = (torch.bfloat16, torch.float16)
FEW = 64
"""Numbers that are looked at one by one sooner than by an operation on all of them."""

__all__ = [
    "check_call",
    "check_init",
    "check_params",
    "check_precision",
    "check_state",
    "check_values",
    "refuse_long",
    "refuse_nan",
    "suspicious",
    "tensors_of",
]


def check_call(call: Call) -> None:
    """Everything beside q, k and v: arguments that exclude each other, state, gates and params.

    Raises:
        ValueError: with names and shapes.
        RecipeError: numbers that the recipe does not ask for, or not in that shape; ``init``
            together with ``state``; reads after the end of a window.
    """
    state, mask, borders, chunk = call.state, call.attention_mask, call.cu_seqlens, call.chunk_size
    if state is not None and call.init is not None:
        raise RecipeError("init and state exclude each other: a state already holds its memory")
    if mask is not None and borders is not None:
        raise ValueError(
            "attention_mask and cu_seqlens exclude each other: packed rows have no padding"
        )
    if mask is not None:
        check_mask(mask, call.k)
    rows = call.k.shape[0] if borders is None else check_borders(borders, call.k)
    if state is not None:
        _check_row_state(state, rows, call)
    if chunk is not None:
        call.chunk_size = held("chunk_size", whole(1), chunk)
    at = call.bound.sized
    if not call.sure:
        _check_numbers("gate", at.gates, call.gates, lead=list(call.k.shape[:2]), like=call.q)
        check_params(at, call.params, like=call.q)
    if not call.causal and any(part.horizon is not None for part in at.recipe.context.within):
        raise RecipeError(
            "causal=False reads after everything is memorised, and a window of the context would "
            "only see the end: use context.Similar(kernel=...) without within"
        )


def _check_row_state(state: State, rows: int, call: Call) -> None:
    if not isinstance(state, State):
        raise ValueError(f"state must be what an earlier call returned, not {type(state).__name__}")
    if state.rows != rows:
        what = "rows" if call.cu_seqlens is None else "documents"
        raise ValueError(f"the state has {state.rows} rows and this call {rows} {what}")
    at = call.bound.sized
    if state.sizes != (at.H, at.K, at.V):
        raise ValueError(
            f"the state is of (H, K, V) = {state.sizes} and this call of {(at.H, at.K, at.V)}"
        )
    if state.position.device != call.k.device:
        raise ValueError(
            f"the state is on {state.position.device} and k on {call.k.device}: use "
            "state.to(device=...)"
        )
    if state.seen is None and not holds(state.position):
        raise ValueError(
            "rows of this state have come differently far, which decides shapes, and on the meta "
            "device nobody knows how far: begin without a state"
        )
    check_state(at, state)
    check_precision(state, state_dtype(call.q, call.k, call.v), call.bound.engine)


def check_precision(state: State, dtype: torch.dtype, engine: Engine) -> None:
    """That no digit of a state is dropped in silence; float64 inputs widen one of float32.

    Args:
        state: of an earlier call.
        dtype: what the inputs ask for.
        engine: that goes on from it.

    Raises:
        ValueError: a state of float64 for inputs that are not, or one that was rounded to half
            precision for an engine that needs its digits.
    """
    if not engine.rounded:
        several = (state.weights, *state.slots.values())
        for tensors in several if state.dual is None else (*several, state.dual.rows):
            for x in tensors:
                if x.dtype in _HALF:
                    raise ValueError(
                        f"tensors of this state were rounded to {x.dtype}, and the {engine.name} "
                        f"engine goes on from {dtype}: keep the state as a call returned it, or "
                        f"widen it by state.to(dtype={dtype})"
                    )
    if dtype == torch.float32 and state.dtype == torch.float64:
        raise ValueError(
            "the state is float64 and the inputs are not: give float64 inputs, or drop its digits "
            "by state.to(dtype=torch.float32)"
        )


def tensors_of(init: Init) -> tuple[Tensor, ...]:
    """An initial memory as a tuple of tensors.

    Raises:
        ValueError: something else.
    """
    given = (init,) if isinstance(init, Tensor) or not isinstance(init, Iterable) else tuple(init)
    for x in given:
        if not isinstance(x, Tensor):
            raise ValueError(f"init must be a tensor, or several, not {type(x).__name__} {x!r}")
    return given


def check_state(sized: SizedRecipe, state: State) -> None:
    """That a state is this recipe's: who wrote it, parts and shapes, not values.

    Args:
        sized: the recipe at the state's sizes.
        state: of an earlier call.

    Raises:
        RecipeError: it belongs to another recipe.
    """
    recipe, buffer = sized.recipe, state.buffer
    if state.written_by != sized.written and state.written_by is not None:
        if not is_normal_form(state.written_by):
            raise RecipeError(
                f"written_by of this state names no recipe, and is {shown(state.written_by)}: it "
                "was altered after it was saved, so begin without a state"
            )
        choice, theirs, ours = differing(state.written_by, sized.written)
        raise RecipeError(
            f"this state belongs to another recipe: its {choice} is {theirs}, and this one's is "
            f"{ours}; continue it with the recipe that wrote it, or begin without a state"
        )
    if state.dual is None and _plainly(sized, state):
        return
    buffered = None if buffer is None else buffer.k.shape[1]
    slots = state.slots if state.dual is None else state.dual.slots
    shapes: list[list[int]] = []
    for w in state.weights:  # called for every token: no generators
        shapes.append(list(w.shape[2:]))
    declared = sized.gates.keys() | sized.constants.keys()
    numbers = declared if buffer is None else declared & buffer.rates.keys()
    pairs = (
        ("weights of shapes", _listed(shapes), _listed([list(shape) for shape in sized.weights])),
        ("slots", _listed(slots), _listed(sized.slots)),
        ("a memory of ones", state.ones is not None, sized.normalised),
        ("rows by key", state.dual is not None, recipe.dual),
        ("a scale", state.log_scale is not None, sized.stabilised),
        ("associations kept", buffered, buffered if buffer is None else recipe.span or buffered),
        ("numbers kept", _listed(numbers), _listed(declared)),
    )
    for what, has, needs in pairs:
        if has != needs:
            raise RecipeError(
                f"this state belongs to another recipe: it has {what} {has}, and this one needs "
                f"{needs}"
            )


def _listed(items: Iterable[object]) -> str:
    """Names in their order, or shapes, as a sentence has them."""
    several = items if isinstance(items, list) else sorted(items, key=str)
    return ", ".join(map(str, several)) or "none"


def _plainly(sized: SizedRecipe, state: State) -> bool:
    """Whether weights, slots and a buffer are all that is there and needed, at the right shapes."""
    buffer = state.buffer
    if len(state.weights) != len(sized.weights) or state.slots.keys() != sized.slots.keys():
        return False
    for w, shape in zip(state.weights, sized.weights, strict=True):
        if w.shape[2:] != shape:
            return False
    if buffer is not None:
        span, kept = sized.recipe.span, buffer.rates.keys()
        if sized.gates.keys() - kept or sized.constants.keys() - kept:
            return False
        if span not in (None, 0, buffer.k.shape[1]):
            return False
    return (
        state.ones is None
        and state.log_scale is None
        and not (sized.normalised or sized.stabilised or sized.recipe.dual)
    )


def check_params(sized: SizedRecipe, params: Mapping[str, Tensor], *, like: Tensor) -> None:
    """Names, shapes and devices of the params.

    Args:
        sized: the recipe, and how many memories of what size.
        params: by name.
        like: a tensor on their device.

    Raises:
        RecipeError: missing, unknown, or of the wrong shape or device.
    """
    _check_numbers("param", sized.params, params, lead=[], like=like)


def _check_numbers(
    kind: str,
    numbers: Mapping[str, SizedNumber],
    given: Mapping[str, Tensor],
    *,
    lead: list[int],
    like: Tensor,
) -> None:
    missing, unknown = numbers.keys() - given.keys(), given.keys() - numbers.keys()
    stray = ""
    if unknown:
        wrong = sorted(unknown)[0]
        near = nearest(wrong, sorted(missing or numbers))
        hint = f"; {near}" if near.startswith("did") else ""
        stray = f"{wrong!r} is unknown to this recipe"
        if not missing:
            needs = ", ".join(sorted(numbers)) or "none"
            raise RecipeError(f"{kind} {stray}, which needs: {needs}{hint}")
        stray = f"; {stray}{hint}"
    if missing:
        name = sorted(missing)[0]
        declared, shape = numbers[name].declared, [*lead, *numbers[name].shape]
        values = f", values {declared.range}" if isinstance(declared, Gate) else ""
        raise RecipeError(
            f"{kind} {name!r} is missing: {declared.owner} needs it with shape {shape}{values}"
            f"{stray}"
        )
    for name, number in numbers.items():
        x, shape = given[name], [*lead, *number.shape]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise RecipeError(f"{kind} {name!r} must be a floating-point tensor of shape {shape}")
        if x.layout is not torch.strided:
            raise RecipeError(f"{kind} {name!r} must be a dense tensor: give its to_dense()")
        if list(x.shape) != shape:
            raise RecipeError(
                f"{kind} {name!r} of {number.declared.owner} must have shape {shape}, not "
                f"{list(x.shape)}"
            )
        if x.device != like.device:
            raise RecipeError(f"{kind} {name!r} is on {x.device} and q on {like.device}: move it")


def check_values(sized: SizedRecipe, gates: Mapping[str, Tensor], params: Params) -> None:
    """Ranges of gates and params, on the CPU (a GPU would have to wait for the answer).

    Args:
        sized: the recipe, and how many memories of what size.
        gates: by name, checked in shape.
        params: by name, checked in shape.

    Raises:
        RecipeError: a value outside its range.
    """
    for kind, numbers, given in (("gate", sized.gates, gates), ("param", sized.params, params)):
        for name, number in numbers.items():
            x = given[name].detach()
            if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.numel():
                continue
            if type(x) is not Tensor and not looks(x):
                continue
            low, high, span = *_ends(x), number.declared.range
            bad = (
                low
                if span.low is not None and (low < span.low or (span.low_open and low == span.low))
                else high
                if span.high is not None
                and (high > span.high or (span.high_open and high == span.high))
                else None
            )
            if bad is not None:
                hint = " (decays are given as logarithms)" if name.startswith("log_") else ""
                raise RecipeError(
                    f"{kind} {name!r} of {number.declared.owner} must be {span}, and holds "
                    f"{bad:.4g}{hint}"
                )


def _ends(x: Tensor) -> tuple[float, float]:
    """Least and most of a tensor; of a decoded token's few numbers without an operation."""
    if x.numel() > FEW:
        least, most = x.aminmax()
        return least.item(), most.item()
    values = x.tolist()
    while isinstance(values[0], list):
        values = values[0] if len(values) == 1 else [one for row in values for one in row]
    return min(values), max(values)


def suspicious(tensors: Iterable[Tensor]) -> bool:
    """Whether a NaN may be among CPU tensors; a GPU would have to wait for the answer.

    A finite sum proves that there is none.

    Args:
        tensors: to look at; others than floating-point ones on a CPU are passed over.
    """
    if torch.compiler.is_compiling():
        return False
    for x in tensors:  # called for every token: no generators
        if x.device.type != "cpu" or not x.is_floating_point():
            continue
        total = (x.detach() if x.requires_grad else x).sum()
        # In a mode of shapes alone, what is made of real parameters is fake.
        seen = type(total) is Tensor or looks(total)
        if seen and not math.isfinite(total.item()):
            return True
    return False


def check_init(init: Init) -> None:
    """Refuse an initial memory with NaN or infinities, on the CPU.

    Raises:
        ValueError: something else than finite tensors.
    """
    tensors = tensors_of(init)
    if not suspicious(tensors):
        return
    for x in tensors:
        if not bool(x.isfinite().all()):
            raise ValueError(f"init has {_not_finite(x)}, and must be finite: mend its source")


def _not_finite(x: Tensor) -> str:
    return "a NaN" if bool(x.isnan().any()) else "an infinity"


def refuse_long(call: Call) -> None:
    """Refuse keys and queries whose features a normalised read would divide 0 by 0, on the CPU.

    Args:
        call: a dense one.

    Raises:
        ValueError: the longest of them, and how long it may be.
    """
    recipe, dtype = call.bound.sized.recipe, state_dtype(call.q, call.k, call.v)
    if recipe.memory.read.normalize != "sum":
        return
    features = recipe.features
    end = features.longest(call.k.shape[-1], dtype)
    if end is None:
        return
    for name, x in (("key", call.k), ("query", call.q)):
        if not looks(x) or not x.numel():
            continue
        lengths = x.detach().to(dtype).norm(dim=-1).amax(-1)  # [B, T]
        if call.lengths is not None:  # padding may hold anything
            steps = torch.arange(lengths.shape[1])
            lengths = torch.where(steps < call.lengths[:, None], lengths, 0.0)
        most = lengths.max().item()
        if most > end:
            raise ValueError(
                f"{features.title} cannot lift a {name} of length {most:.3g}: beyond {end:.3g} its "
                f"features leave the range of {dtype}, and what is read would be 0/0; give it "
                "shorter ones (LayerOptions(qk_norm='rms'), or normalise what the layer reads), "
                "a higher temperature, or float64"
            )


def refuse_nan(call: Call) -> None:
    """Refuse NaN and infinities in what was given, naming the first place.

    A log decay of −inf is a value like others: it forgets everything.

    Args:
        call: a dense one.

    Raises:
        ValueError: with the row and token as the caller counts them.
    """
    if not suspicious((call.q, call.k, call.v, *call.gates.values(), *call.params.values())):
        return
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    inputs |= {f"gate {name!r}": x for name, x in call.gates.items()}
    inputs |= {f"param {name!r}": x for name, x in call.params.items()}
    for name, x in inputs.items():
        if not suspicious((x,)):
            continue
        x = x.detach()
        bad = ~(x < torch.inf) if name.startswith("gate 'log_") else ~x.isfinite()
        if not bool(bad.any()):
            continue
        what = _not_finite(x)
        if name.startswith("param"):
            raise ValueError(f"{name} has {what}, and must be finite: mend its source")
        row, token = (bad.nonzero()[0, :2]).tolist()
        if call.places is not None:
            token = int(call.places[row, token])
        raise ValueError(
            f"{name} has {what} at row {0 if call.documents else row}, token {token}: the memory "
            "would carry it to every later token; mask that token or mend its source"
        )
