"""Base class of contexts: the associations that a token learns from, and their weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.equation_terms import format_number
from recollect.choices.features.base import Kernel
from recollect.choices.member import Member
from recollect.numerics import safe_log

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Context"]


MIN_LOG_DECAY = -1e3  # its exponential is 0 also in float64; avoids ∞ − ∞ for a decay of 0


class Context(Member):
    """The associations in the objective at time t.

    A context of all the past has the weights γ^(t−i) w_i: the quantities ``"decay"`` (declared with
    ``log=True``) and ``"weight"``, by default 1. A context with a horizon has the gate
    ``"window"``, axes ``("c",)``. Other weights are defined in `over`, for memories that solve for
    each query.

    Attributes:
        horizon: number of latest associations that count; ``None`` for all.
        kernel: similarity of a key to the query, for memories that solve per query.
        restrictions: contexts with weights that multiply.
        is_restriction: whether another context may hold it in ``restrictions``.
        signed: whether its weights may be negative.
        query_gates: gates that every query needs, also when a state is only read.
        block: number of consecutive associations that are visible or hidden together.
        num_sinks: number of a document's first associations that stay visible.
        num_kept: number of associations that later tokens need, sinks included; ``None`` for all.
        key_transition: kind of the maps by which later tokens move the keys
            (`ContextWeights.transition`): ``"decay"``, ``"reflection"``, or ``None``.
        reweighs: whether its weights follow from the products of all other weights and the
            similarity (`ContextWeights.reweigh`).
        hides_current: whether a query does not see the association of its own token. Reads of a
            state see all associations.

    Examples:
        >>> @rc.member
        ... class Everything(rc.context.Context):  # Σ_(i≤t) ℓ_i
        ...     @property
        ...     def horizon(self):
        ...         return None
        >>> context = Everything()
        >>> context.time_invariant, context.total("ℓ_i")
        (True, 'Σ_(i≤t) ℓ_i')
        >>> recipe = rc.Recipe(context=context, algorithm=rc.algorithm.LeastSquares())
        >>> q, k, v = torch.randn(3, 1, 4, 2, 3)
        >>> same = recipe.replace(context=rc.context.Prefix())
        >>> torch.equal(rc.recall(recipe, q, k, v)[0], rc.recall(same, q, k, v)[0])
        True
    """

    choice = "context"

    kernel: Kernel | None = None
    restrictions: tuple[Context, ...] = ()
    is_restriction: bool = False
    signed: bool = False
    query_gates: tuple[str, ...] = ()
    block: int = 1
    num_sinks: int = 0
    key_transition: str | None = None
    reweighs: bool = False
    hides_current: bool = False

    @property
    def keeps_similarity(self) -> bool:
        """Whether no map of keys and no function of all weights changes the similarities."""
        return not (self.key_transition is not None or self.reweighs or self.hides_current)

    def over(self, visible: VisibleAssociations) -> ContextWeights | None:
        """Return the weights of the associations in ``visible``; ``None`` if all are 1.

        Unless overridden, log γ_i^(t) = Σ_(i<j≤t) log γ_j + log w_i, summed in float64.
        """
        if not (self.has_decay or self.has_weights):
            return None
        n = visible.valid.shape[1]
        size = (*visible.valid.shape, visible.k.shape[2])
        log_decay = torch.zeros(size, dtype=torch.float64, device=visible.k.device)  # cumulative
        if self.has_decay:
            steps = visible.rates["log_decay"].double().clamp_min(MIN_LOG_DECAY)
            log_decay = torch.where(visible.valid.unsqueeze(-1), steps, 0.0).cumsum(1)
        slots = visible.query_slots.clamp_max(max(n - 1, 0))
        key_log_weight = -log_decay
        if self.has_weights:
            key_log_weight = key_log_weight + safe_log(visible.rates["weight"].double())
        dtype = visible.q.dtype

        def log_weight(queries: slice, keys: slice) -> Tensor:
            # Distant sums cancel: take them relative to the first query of the piece.
            q = log_decay[:, slots[queries]]  # [B, C, H]
            start, reference = int(visible.first_slot + (queries.start or 0)), q[:, :1]
            k = (key_log_weight[:, keys] + reference).transpose(1, 2)
            q = (q - reference).transpose(1, 2)
            total = q.to(dtype).unsqueeze(-1) + k.to(dtype).unsqueeze(-2)  # [B, H, C, m]
            num_earlier = max(min(start, keys.stop) - keys.start, 0)
            # Keys among the queries may be distant from the reference and close to the queries.
            near = q.unsqueeze(-1) + k[..., num_earlier:].unsqueeze(-2)
            total[..., num_earlier:] = near.to(dtype)
            return total.unsqueeze(2)

        return ContextWeights(
            log=log_weight, key_part=key_log_weight, may_hide_all=self.has_weights
        )

    @functools.cached_property
    def has_decay(self) -> bool:
        """Whether its quantity ``"decay"`` is not 1."""
        return self.is_active("log_decay", 0.0)

    @functools.cached_property
    def has_weights(self) -> bool:
        """Whether its quantity ``"weight"`` is not 1."""
        return self.is_active("weight", 1.0)

    @property
    def geometric(self) -> bool:
        """Whether its quantities give its weights (``over`` is not overridden)."""
        return type(self).over is Context.over

    @property
    def uniform(self) -> bool:
        """Whether all visible associations have weight 1."""
        weighted = self.has_decay or self.has_weights or "window" in self.quantity_axes
        return self.geometric and not weighted

    @property
    def time_invariant(self) -> bool:
        """Whether all of the past counts, with weights that do not change with time."""
        if self.horizon is not None or self.kernel is not None:
            return False
        return self.geometric and not self.has_decay

    @property
    def horizon(self) -> int | None:
        """Number of latest associations that count, or ``None`` for all."""
        return 1

    @property
    def is_online(self) -> bool:
        """Whether only the current association counts, with weight 1."""
        return self.horizon == 1 and not self.gates()

    @property
    def num_kept(self) -> int | None:
        """Associations that later tokens still need, or ``None`` for all."""
        return self.horizon

    @property
    def index(self) -> str:
        """Index of an association inside `total`."""
        return "t" if self.horizon == 1 else "i"

    def total(self, term: str) -> str:
        """Return the text of the sum of a term of one association, which has the index `index`."""
        if self.horizon == 1:
            return f"γ_t {term}" if "window" in self.quantity_axes else term
        if self.horizon is None:
            return " ".join((f"Σ_(i≤t) {self.factor}".rstrip(), term))
        weight = "γ_i^(t) " if "window" in self.quantity_axes else ""
        return f"Σ_(i>t−{self.horizon}) {weight}{term}"

    @property
    def factor(self) -> str:
        """Text of the weight of one association inside a sum."""
        if not self.geometric:
            return "γ_i^(t)"
        words: list[str] = []
        if self.has_decay:
            decay = self.quantity_field("decay")
            gamma = "γ_i" if decay is None else self.symbol(decay, "i")
            is_gate = isinstance(gamma, str) and gamma.endswith("_i")
            words.append("γ_i^(t)" if is_gate else f"{format_number(gamma)}^(t−i)")
        if self.has_weights:
            weight = self.quantity_field("weight")
            words.append("w_i" if weight is None else format_number(self.symbol(weight, "i")))
        return " ".join(words)

    def notes(self) -> tuple[str, ...]:
        notes = super().notes()
        if "window" in self.quantity_axes and self.horizon != 1:
            return ("γ_i^(t): the current token's weight of association i", *notes)
        if self.has_decay and any(gate.name == "log_decay" for gate in self.gates()):
            return ("γ_i^(t): the product of the decays of the tokens after i", *notes)
        return notes

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        is_restriction = recipe.context is not self
        if is_restriction:
            pass
        elif self.kernel is not None:
            if not self.geometric:
                yield (
                    f"{self.title} has a kernel, so its over() is not used: put a context with "
                    "these weights into restrictions"
                )
        elif not self.geometric:
            if self.is_restriction:
                yield (
                    f"{self.title} only restricts a context with a kernel: use "
                    f"context.KernelWeighted(restrictions=({self.brief},))"
                )
            elif self.signed or not recipe.solves_from_gram:
                yield (
                    f"{self.title} defines weights in over(), which only memories that solve for "
                    "each query use: declare the quantities 'decay' and 'weight', or set "
                    "is_restriction and use context.KernelWeighted(restrictions=...)"
                )
        elif self.horizon is None and not recipe.algorithm.full_batch:
            yield (
                f"{self.title} is for algorithms that see all of the past at once, and "
                f"{recipe.algorithm.title} takes one association at a time: use "
                "retention.Decay() to forget, or algorithm.GradientDescent(updates_per_token=I)"
            )
        if self.geometric:
            yield from self._unused_quantities(is_restriction)

    def _unused_quantities(self, is_restriction: bool) -> Iterator[str]:
        used: dict[str, tuple[str, ...]] = {"log_decay": (), "weight": ()}
        kind = "inside another" if is_restriction else "of all the past"
        if not is_restriction and self.kernel is not None:
            used, kind = {}, "with a kernel"
        elif not is_restriction and self.horizon is not None:
            used, kind = {"window": ("c",)}, "with a horizon"
        nested = {name for part in self.parts() for name in part.quantity_axes}
        expected = " and ".join(f"{name!r} with axes {axes}" for name, axes in used.items())
        for name, axes in self.quantity_axes.items():
            if name not in nested and used.get(name) != axes:
                yield (
                    f"{self.title} declares the quantity {name!r} with axes {axes}, but a context "
                    f"{kind} uses {expected or 'none'} (a decay as its logarithm): give its "
                    "quantity that form, or remove it"
                )
