"""What a context declares of its weights, held to its own code."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.context.base import Context
from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import require
from recollect.testing.declared import normal, off
from recollect.testing.inputs import draw_gate, draw_param

__all__ = ["check_context"]


def _visible(context: Context, T: int = 6) -> VisibleAssociations:
    """T associations of one document and the queries of their tokens."""
    g = torch.Generator().manual_seed(4)
    rates = {n: torch.full((1, T, 1), x).double() for n, x in context.constants().items()}
    axes = {**Recipe().axes(4, 4), "c": context.horizon or 1}
    for gate in context.gates():
        rates[gate.name] = draw_gate(gate, (1, T, 1, *(axes[a] for a in gate.axes)), g)
    for param in context.params():
        value = draw_param(param, (1, *(axes[a] for a in param.axes)), g)
        value = value.expand(1, T, *value.shape)
        rates[f"log_{param.name}" if param.is_log else param.name] = (
            value.log() if param.is_log else value
        )
    position = torch.arange(T)[None]
    return VisibleAssociations(
        q=normal(1, T, 1, 1, 4, seed=1),
        k=normal(1, T, 1, 4, seed=2),
        rates=rates,
        query_rates=rates,
        valid=torch.ones(1, T, dtype=torch.bool),
        position=position,
        query_position=position,
        query_slots=torch.arange(T),
        first_slot=0,
    )


def _whole(weights: ContextWeights, queries: slice, keys: slice) -> Tensor:
    """Weights ``[C, m]`` of a piece, as numbers."""
    if weights.log is not None:
        found = weights.log(queries, keys).exp()
    else:
        assert weights.value is not None
        found = weights.value(queries, keys)
    size = (queries.stop - queries.start, keys.stop - keys.start)
    return found.expand(1, 1, 1, *size)[0, 0, 0]


def check_context(context: Context) -> str | None:
    """Pieces of `over` have equal weights, and ``signed`` and ``is_binary`` are true."""
    title = context.title
    gates = {gate.name for gate in context.gates()}
    unknown = sorted(set(context.query_gates) - gates)
    for name in unknown:
        raise AssertionError(f"{title} reads the gate {name!r}, which it does not ask for")
    if context.kernel is not None:
        return "its kernel gives the weights"
    visible = _visible(context)
    weights = context.over(visible)
    if weights is None:
        return "its associations all have weight 1"
    T = visible.q.shape[1]
    past = torch.ones(T, T, dtype=torch.bool).tril()
    whole = _whole(weights, slice(0, T), slice(0, T))
    seen = whole[past]
    require(not seen.isnan().any(), f"{title}: over() gives weights that are no numbers")
    if not context.signed:
        require((seen >= 0).all(), f"{title} declares signed=False, and a weight is negative")
    if weights.is_binary:
        sharp = ((seen == 0) | (seen == 1)).all()
        require(sharp, f"{title} declares binary weights, and some are neither 0 nor 1")
    for queries in (slice(0, 2), slice(2, T)):
        for keys in (slice(0, 3), slice(3, T)):
            piece, mask = _whole(weights, queries, keys), past[queries, keys]
            wrong = off(piece[mask], whole[queries, keys][mask], 1e-10)
            require(not wrong, f"{title}: a piece of over() is {wrong:.1e} off from the whole")
    if weights.log is not None and weights.key_part is not None:
        rest = weights.log(slice(0, T), slice(0, T))[0, 0, 0] - weights.key_part[0, :, 0]
        bare = torch.where(past, rest - rest[:, :1], 0.0)
        wrong = off(bare.nan_to_num(0.0), torch.zeros_like(bare), 1e-10)
        require(
            not wrong,
            f"{title} declares of_key, and what is left of its log weights depends on the key by "
            f"{wrong:.1e}",
        )
    return None
