"""The state before the first token."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.recipe.sized import SizedRecipe
from recollect.state.buffer import roll
from recollect.state.kernel_rows import initial_rows
from recollect.state.state import State
from recollect.typing import Init

__all__ = ["initial_associations", "initial_state"]


def initial_state(
    sized: SizedRecipe,
    *,
    B: int,
    dtype: torch.dtype,
    device: torch.device,
    init: Init | None = None,
) -> State:
    """The state before the first token: A₀ = ``init``, or zeros where that can learn.

    Args:
        sized: the recipe, and how many memories of what size.
        B: rows.
        dtype: of everything but what the algorithm keeps in float64.
        device: where.
        init: A₀, as for `recollect.recall`.

    Raises:
        RecipeError: a deep memory without ``init``, or one of the wrong shapes.
    """
    recipe, H, K, V = sized.recipe, sized.H, sized.K, sized.V
    if init is not None and recipe.nonparametric:
        k, v, rates = initial_associations(sized, init, B=B, dtype=dtype)
        position = torch.full((B,), k.shape[1], device=device)
        buffer = roll(recipe, None, k=k, v=v, rates=rates, lengths=None, position=position)
        state = State(
            sizes=(H, K, V), weights=(), position=position, buffer=buffer, written_by=sized.written
        )
        return state.stating(k.shape[1])
    shapes = sized.weights
    pairs: tuple[Tensor, ...] = ()
    if init is None:
        if recipe.needs_init():
            starts = recipe.init_shapes(K, V, pairs=1) if recipe.dual else shapes
            wanted = ", ".join(str([H, *shape]) for shape in starts)
            raise RecipeError(
                f"{recipe.memory.title} needs init: a deep memory of zeros has zero gradients and "
                f"never learns; give one tensor per map, of shapes {wanted}"
            )
        weights = tuple(torch.zeros(B, H, *s, dtype=dtype, device=device) for s in shapes)
    else:
        given = (init,) if isinstance(init, Tensor) else tuple(init)
        before = 1 + len(recipe.row_widths(V)) if recipe.dual else 0
        if len(given) != before + len(shapes) and not (before and not given and not shapes):
            what = f"{before} of its pairs and " if before else ""
            raise RecipeError(
                f"{recipe.memory.title} takes {what}{len(shapes)} map(s) and init has "
                f"{len(given)} tensor(s)"
            )
        pairs, given = given[:before], given[before:]
        for a, shape in zip(given, shapes, strict=True):
            if tuple(a.shape) not in ((H, *shape), (B, H, *shape)):
                raise RecipeError(
                    f"init of {recipe.memory.title} must have shape {[H, *shape]} (or one per row, "
                    f"{[B, H, *shape]}), not {list(a.shape)}"
                )
        weights = tuple(
            a.to(dtype=dtype, device=device).expand(B, H, *s)
            for a, s in zip(given, shapes, strict=True)
        )
    slots: dict[str, tuple[Tensor, ...]] = {}
    if weights or not recipe.dual:
        for name, (blank, wide) in sized.slots.items():
            slot_dtype = torch.float64 if wide else dtype
            slots[name] = tuple(
                torch.zeros(B, H, *s, dtype=slot_dtype, device=device) for s in blank
            )
    ones = (B, H, 1, sized.features)
    dual = None
    if recipe.dual:
        dual = initial_rows(recipe, pairs, B=B, H=H, K=K, V=V, dtype=dtype, device=device)
    position = torch.zeros(B, dtype=torch.long, device=device)
    return State(
        sizes=(H, K, V),
        written_by=sized.written,
        weights=weights,
        slots=slots,
        dual=dual,
        position=position,
        known=(position, 0),
        ones=torch.zeros(ones, dtype=dtype, device=device) if sized.normalised else None,
        log_scale=torch.zeros(B, H, dtype=dtype, device=device) if sized.stabilised else None,
    )


def initial_associations(
    sized: SizedRecipe, init: Init, *, B: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Keys, values and numbers of the associations that a memory starts with, ``[B, m, H, ...]``.

    Args:
        sized: the recipe, and how many memories of what size.
        init: keys ``[H, m, K]``, values ``[H, m, V]``, then the recipe's travelling gates in order,
            ``[H, m, ...]``. Numbers of the step take their initial values, decays 1.
        B: rows.
        dtype: of the numbers.

    Raises:
        RecipeError: another number of tensors, or shapes that do not fit.
    """
    recipe, H, K, V = sized.recipe, sized.H, sized.K, sized.V
    given = (init,) if isinstance(init, Tensor) else tuple(init)
    travelling = [gate for gate in recipe.gates() if gate.travels]
    names = ["keys", "values", *(gate.name for gate in travelling)]
    if len(given) != len(names):
        raise RecipeError(
            f"init of {recipe.memory.title} is a bundle of {', '.join(names)}, and has "
            f"{len(given)} tensor(s)"
        )
    sizes = recipe.axes(K, V)
    axes = [(K,), (V,), *(tuple(sizes[a] for a in gate.axes) for gate in travelling)]
    m = given[0].shape[1] if given[0].dim() > 1 else 0
    for name, x, shape in zip(names, given, axes, strict=True):
        if tuple(x.shape) != (H, m, *shape):
            raise RecipeError(
                f"init of {recipe.memory.title}: {name} must have shape {[H, m, *shape]}, not "
                f"{list(x.shape)}"
            )
    tokens = [x.transpose(0, 1).expand(B, *x.transpose(0, 1).shape) for x in given]
    rates = dict(zip(names[2:], tokens[2:], strict=True))
    numbers = dict(recipe.constants())  # of the steps in which they were never written
    numbers |= {gate.name: gate.init for gate in recipe.gates()}
    statics = recipe.statics()
    for param in recipe.params():
        if param.name in statics:
            log = param.name in recipe.logs()
            start = param.init if isinstance(param.init, int | float) else 1.0
            numbers[f"log_{param.name}" if log else param.name] = 0.0 if log else float(start)
    shapes = {gate.name: tuple(sizes[a] for a in gate.axes) for gate in recipe.gates()}
    for name, value in numbers.items():
        if name not in rates:
            value = 0.0 if name.startswith("log_decay") else value
            shape = (B, m, H, *shapes.get(name, ()))
            rates[name] = torch.full(shape, value, dtype=dtype, device=given[0].device)
    return tokens[0], tokens[1], {name: x.to(dtype) for name, x in rates.items()}
