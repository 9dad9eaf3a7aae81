"""Checks of the declarations of a context against its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.context.base import Context
from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import require
from recollect.testing.declared import normal, require_equal
from recollect.testing.inputs import draw_gate, draw_param

__all__ = ["check_context"]


def _sample_associations(context: Context, T: int = 6) -> VisibleAssociations:
    """Return T random associations of one document, and the queries of their tokens."""
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


def _dense_weights(weights: ContextWeights, queries: slice, keys: slice) -> Tensor:
    """Return the weights ``[C, m]`` of some queries and keys."""
    if weights.log is not None:
        dense = weights.log(queries, keys).exp()
    else:
        assert weights.value is not None
        dense = weights.value(queries, keys)
    size = (queries.stop - queries.start, keys.stop - keys.start)
    return dense.expand(1, 1, 1, *size)[0, 0, 0]


def _check_declared_maps(context: Context, weights: ContextWeights) -> None:
    """Check that ``key_transition`` and ``reweighs`` declare the results of `over`."""
    title, transition = context.title, weights.transition
    kind = None
    if transition is not None:
        has_both = transition.log_decay is not None and transition.direction is not None
        kind = "both" if has_both else "reflection" if transition.log_decay is None else "decay"
    require(
        kind == context.key_transition,
        f"{title} declares key_transition={context.key_transition!r}, and over() returns {kind!r}",
    )
    require(
        (weights.reweigh is not None) == context.reweighs,
        f"{title} declares reweighs={context.reweighs}, unlike the result of over()",
    )


def check_context(context: Context) -> str | None:
    """Pieces of `over` have equal weights, and ``signed`` and ``is_binary`` are true."""
    title = context.title
    unknown = {*context.query_gates} - {gate.name for gate in context.gates()}
    for name in sorted(unknown):
        raise AssertionError(f"{title} reads the gate {name!r}, which it does not ask for")
    if context.kernel is not None:
        return "its kernel gives the weights"
    associations = _sample_associations(context)
    weights = context.over(associations)
    if weights is None:
        return "its associations all have weight 1"
    _check_declared_maps(context, weights)
    if weights.log is None and weights.value is None:
        return "it weighs no association on its own"
    T = associations.q.shape[1]
    past = torch.ones(T, T, dtype=torch.bool).tril()
    dense = _dense_weights(weights, slice(0, T), slice(0, T))
    visible = dense[past]
    require(not visible.isnan().any(), f"{title}: over() gives weights that are no numbers")
    if not context.signed:
        require((visible >= 0).all(), f"{title} declares signed=False, and a weight is negative")
    if weights.is_binary:
        is_binary = ((visible == 0) | (visible == 1)).all()
        require(is_binary, f"{title} declares binary weights, and some are neither 0 nor 1")
    for queries in (slice(0, 2), slice(2, T)):
        for keys in (slice(0, 3), slice(3, T)):
            piece, mask = _dense_weights(weights, queries, keys), past[queries, keys]
            sentence = f"{title}: a piece of over() is {{error}} off from the whole"
            require_equal(piece[mask], dense[queries, keys][mask], sentence, 1e-10)
    if weights.log is not None and weights.key_part is not None:
        rest = weights.log(slice(0, T), slice(0, T))[0, 0, 0] - weights.key_part[0, :, 0]
        change = torch.where(past, rest - rest[:, :1], 0.0).nan_to_num(0.0)
        require_equal(
            change,
            torch.zeros_like(change),
            f"{title} declares key_part, and the rest of its log weights depends on the key by "
            "{error}",
            1e-10,
        )
    return None
