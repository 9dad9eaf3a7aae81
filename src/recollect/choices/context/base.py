"""Base class of contexts: which associations a token learns from, and their weights."""

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

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["Context"]


FORGOTTEN = -1e3  # exp of it is 0 also in float64; keeps a decay of 0 free of ∞ − ∞


class Context(Member):
    """The associations in the objective at time t.

    One that sees all of the past weighs it by γ^(t−i) w_i, with the numbers ``"decay"`` (declared
    with ``log=True``) and ``"weight"``, 1 where it declares none; one with a horizon by the gate
    ``"window"``, axes ``("c",)``. Any other weights are stated in `over`, which only memories that
    solve for each query ask for.

    Attributes:
        horizon: how many of the latest associations count; ``None`` is all of them.
        kernel: similarity of a key to the query, for memories that solve per query.
        within: further restrictions whose weights multiply.
        restricts: whether it may stand in another context's ``within``.
        signed: whether its weights may be negative.
        reads: gates that a query needs, also when it only reads.
        block: consecutive associations that are shown or hidden together.
        first: associations of a document's beginning that stay visible beside the latest.
        keeps: how many associations later tokens still need, ``first`` included; ``None`` for all.

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
        >>> recipe.normal_form() == recipe.but(context=rc.context.Prefix()).normal_form()
        Traceback (most recent call last):
            ...
        TypeError: 'str' object is not callable
    """

    choice = "context"

    kernel: Kernel | None = None
    within: tuple[Context, ...] = ()
    restricts: bool = False
    signed: bool = False
    reads: tuple[str, ...] = ()
    block: int = 1
    first: int = 0

    def over(self, visible: VisibleAssociations) -> ContextWeights | None:
        """This context's weights of the associations in ``visible``, beyond its horizon.

        ``None`` where they are all 1. Unless overridden, those of its numbers:
        log γ_i^(t) = Σ_(i<j≤t) log γ_j + log w_i, from sums in float64.
        """
        if not (self.forgets or self.weighs):
            return None
        n = visible.valid.shape[1]
        passed = torch.zeros(
            *visible.valid.shape, visible.k.shape[2], device=visible.k.device
        ).double()
        if self.forgets:
            steps = visible.rates["log_decay"].double().clamp_min(FORGOTTEN)
            passed = torch.where(visible.valid.unsqueeze(-1), steps, 0.0).cumsum(1)
        slots = visible.slots.clamp_max(max(n - 1, 0))
        own = -passed
        if self.weighs:
            own = own + _log(visible.rates["weight"].double())
        dtype = visible.q.dtype

        def log_weight(queries: slice, keys: slice) -> Tensor:
            # Sums far from each other cancel: take them from the first query of the piece.
            q = passed[:, slots[queries]]  # [B, C, H]
            start, reference = int(visible.first + (queries.start or 0)), q[:, :1]
            q, k = (q - reference).transpose(1, 2), (own[:, keys] + reference).transpose(1, 2)
            total = q.to(dtype).unsqueeze(-1) + k.to(dtype).unsqueeze(-2)  # [B, H, C, m]
            before = max(min(start, keys.stop) - keys.start, 0)
            # Keys among the queries may stand far from the reference and close to each other.
            total[..., before:] = (q.unsqueeze(-1) + k[..., before:].unsqueeze(-2)).to(dtype)
            return total.unsqueeze(2)

        return ContextWeights(log=log_weight, of_key=own, hides=self.weighs)

    @functools.cached_property
    def forgets(self) -> bool:
        """Whether a decay changes the weights of the past: its number ``"decay"`` is not 1."""
        return self.varies("log_decay", 0.0)

    @functools.cached_property
    def weighs(self) -> bool:
        """Whether associations come with weights of their own: its number ``"weight"`` is not 1."""
        return self.varies("weight", 1.0)

    @property
    def geometric(self) -> bool:
        """Whether its weights are those of its numbers (``over`` is not overridden)."""
        return type(self).over is Context.over

    @property
    def uniform(self) -> bool:
        """Whether all that it shows weighs 1."""
        changes = self.forgets or self.weighs or "window" in self.numbers
        return self.geometric and not changes

    @property
    def time_invariant(self) -> bool:
        """Whether it sees all of the past, and no weight changes with time."""
        everything = self.horizon is None and self.kernel is None
        return everything and self.geometric and not self.forgets

    @property
    def horizon(self) -> int | None:
        """Number of latest associations that count, or ``None`` for all."""
        return 1

    @property
    def keeps(self) -> int | None:
        """Associations that later tokens still need, or ``None`` for all."""
        return self.horizon

    @property
    def index(self) -> str:
        """The index of an association inside `total`."""
        return "t" if self.horizon == 1 else "i"

    def total(self, term: str) -> str:
        """The sum over the context of a term of one association with index `index`."""
        if self.horizon == 1:
            return f"γ_t {term}" if "window" in self.numbers else term
        if self.horizon is None:
            return " ".join((f"Σ_(i≤t) {self.factor}".rstrip(), term))
        weight = "γ_i^(t) " if "window" in self.numbers else ""
        return f"Σ_(i>t−{self.horizon}) {weight}{term}"

    @property
    def factor(self) -> str:
        """How its weight of one association is written, inside of another context's sum."""
        if not self.geometric:
            return "γ_i^(t)"
        words: list[str] = []
        if self.forgets:
            decay = self.field_of("decay")
            rate = "γ_i" if decay is None else self.symbol(decay, "i")
            per_token = isinstance(rate, str) and rate.endswith("_i")
            words.append("γ_i^(t)" if per_token else f"{format_number(rate)}^(t−i)")
        if self.weighs:
            weight = self.field_of("weight")
            words.append("w_i" if weight is None else format_number(self.symbol(weight, "i")))
        return " ".join(words)

    def notes(self) -> tuple[str, ...]:
        notes = super().notes()
        if "window" in self.numbers and self.horizon != 1:
            return ("γ_i^(t): the current token's weight of association i", *notes)
        if self.forgets and any(gate.name == "log_decay" for gate in self.gates()):
            return ("γ_i^(t): the product of the decays of the tokens after i", *notes)
        return notes

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        alone = recipe.context is self and self.kernel is None
        if alone and not self.geometric:
            if self.restricts:
                yield (
                    f"{self.title} weighs associations for a query that compares them: use "
                    f"context.Similar(within=({self.brief},))"
                )
            elif self.signed or not recipe.solves_from_gram:
                yield (
                    f"{self.title} states weights in over(), which only memories that solve for "
                    "each query ask for: declare the numbers 'decay' and 'weight', or set "
                    "restricts and use context.Similar(within=...)"
                )
        elif alone and self.horizon is None and not recipe.algorithm.full_batch:
            yield (
                f"{self.title} is for algorithms that see all of the past at once, and "
                f"{recipe.algorithm.title} takes one association at a time: use "
                "retention.Decay() to forget, or algorithm.GradientDescent(steps=I)"
            )
        elif recipe.context is self and self.kernel is not None and not self.geometric:
            yield (
                f"{self.title} compares keys with its kernel, and nobody asks for its own over(): "
                "put a context with those weights into within"
            )
        if self.geometric:
            yield from self._unread(recipe)

    def _unread(self, recipe: RecipeLike) -> Iterator[str]:
        """Numbers that nobody would read."""
        past: dict[str, tuple[str, ...]] = {"log_decay": (), "weight": ()}
        if recipe.context is not self:
            read, what = past, "inside of another"
        elif self.kernel is not None:
            read, what = {}, "with a kernel"
        elif self.horizon is None:
            read, what = past, "that sees all of the past"
        else:
            read, what = {"window": ("c",)}, "with a horizon"
        inside = {name for part in self.parts() for name in part.numbers}
        known = " and ".join(f"{name!r} with axes {axes}" for name, axes in read.items())
        for name, axes in self.numbers.items():
            if name not in inside and read.get(name) != axes:
                yield (
                    f"{self.title} declares the number {name!r} with axes {axes}, and of a context "
                    f"{what} {known or 'none'} is read (a decay as its logarithm): give its "
                    "quantity that form, or drop it"
                )


def _log(x: Tensor) -> Tensor:
    """log x, −∞ at 0, without the infinite slope there."""
    zero = x == 0
    return torch.where(zero, -torch.inf, torch.where(zero, 1.0, x).log())
