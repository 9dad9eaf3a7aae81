"""Base class of algorithms: the rule that turns inner gradients into steps."""

# More than 400 lines: all that an algorithm may say of itself, each with its meaning.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.share import limit_rules, search_rules, share_rules
from recollect.choices.equation_terms import Gradient, Term, Terms, render_sum
from recollect.choices.member import (
    Member,
    RecipeError,
)

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["Algorithm", "Inverse", "Step"]


Slots = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an algorithm sees at one token, for one map; numbers broadcast to ``[B, H, out, in]``.

    Attributes:
        gradient: g_t.
        write: the part of g_t that does not depend on the prediction (−b·v kᵀ summed over the
            context), when the bias is affine.
        lr, momentum: η_t and θ_t; 1 and 0 where the algorithm has none.
        count: number of this token in its document, from 1, ``[B, 1, 1, 1]``.

    Examples:
        >>> one = torch.ones(1, 1, 1, 1)
        >>> step = rc.algorithm.Step(
        ...     gradient=4 * one, write=None, lr=0.5 * one, momentum=0 * one, count=one
        ... )
        >>> rc.algorithm.GradientDescent().update({}, step)  # no slots of its own, and −η g
        ({}, tensor([[[[-2.]]]]))
    """

    gradient: Tensor
    write: Tensor | None
    lr: Tensor
    momentum: Tensor
    count: Tensor


@dataclass(frozen=True, kw_only=True)
class Inverse:
    """What stands for (G_t + ρ_t I)⁻¹ in W_t = W_0 + E_t (G_t + ρ_t I)⁻¹, with λ the ridge.

    Attributes:
        kind: ``"exact"``; ``"identity"`` I; ``"diagonal"`` (diag(G) + λ)^(−p); ``"spectral"``
            (G + λI)^(−p); ``"conjugate_gradient"``: so many steps from 0 on each query.
        ridge: what ρ_t of an exact inverse does: ``"constant"``, ``"decaying"``, ``"refreshed"``.
        every: tokens of a span of a refreshed ridge. power: p. steps: of conjugate gradients.

    Examples:
        >>> rc.algorithm.LeastSquares().inverse.slots
        ('gram', 'origin', 'inverse', 'kept')
        >>> diagonal = rc.algorithm.Inverse(kind="diagonal", power=0.5)
        >>> diagonal.slot_shape("gram", (4, 8))
        (8,)
    """

    kind: str = "exact"
    ridge: str = "constant"
    every: int = 1
    power: float = 1.0
    steps: int = 1

    @property
    def recurs(self) -> bool:
        """Whether the inverse itself has a recursion over tokens."""
        return self.kind == "exact" and self.ridge != "constant"

    @property
    def slots(self) -> tuple[str, ...]:
        """The statistics: the initial memory, what is needed of G, the inverse and ρ/λ."""
        gram = () if self.kind == "identity" else ("gram",)
        return (*gram, "origin", *(("inverse", "kept") if self.recurs else ()))

    def slot_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one of `slots` beside weights ``[out, in]``.

        Args:
            name: one of `slots`.
            shape: of the weights, ``(out, in)``.
        """
        out, inp = shape
        if name in ("origin", "kept"):
            return (out, inp) if name == "origin" else ()
        return (inp,) if self.kind == "diagonal" else (inp, inp)


class Algorithm(Member):
    """How the memory moves.

    Its numbers have fixed names, whatever their fields are called: the rate η is ``"lr"`` (per
    head, or ``axes=("V",)`` per value channel; 1 where none is declared), θ of `Step.momentum` is
    ``"momentum"``, λ of a solver ``"ridge"``. What no engine would read is refused.

    Attributes:
        batch: b, tokens whose gradients are taken at the same W°.
        steps: associations per token (or full-batch steps under `context.Prefix`).
        slots: names of the state it keeps beside A, each shaped like the weights.
        linear: whether the step is linear in the gradients.
        solves: whether it reaches the minimum in closed form.
        full_batch: whether it can use all of the past at once.
        inverse: how statistics of fixed size (its slots) stand for all of the past, if they do.
        splits: whether it needs the error's affine parts apart.
        every: ``"batch"`` when the memory moves only at the inner batch's border.
        reduce: ``"mean"``: steps are averaged over the open inner batch.
        ridge: λ of ½λ‖W‖² where it is a constant of the problem, else 0.
        newton_steps: Newton–Schulz iterations of one step.
        normalizes: whether the gradient of every association is scaled by its
            `recollect.choices.algorithm.share.share`.
        searches: whether its step is scaled by `recollect.choices.algorithm.share.search` along the
            direction that `update` and `settle` give at rate 1; η scales the step alone.
        limit: ``"keys"``: rates are η_t r_t, `recollect.choices.algorithm.share.left`.

    Examples:
        >>> @rc.member
        ... class SignDescent(rc.algorithm.Algorithm):  # A_t = α_t A_(t−1) − η_t sign(g_t)
        ...     lr: float | str = rc.quantity("token", at_least=0, init=0.1)
        ...
        ...     def update(self, slots, step):
        ...         return {}, -step.lr * step.gradient.sign()
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, state = rc.recall(rc.Recipe(algorithm=SignDescent(lr=0.5)), q, k, v)
        >>> state.weights[0].div(0.5).frac().abs().max()  # entries are multiples of η
        tensor(0.)
    """

    choice = "algorithm"

    batch: int = 1
    steps: int = 1
    slots: tuple[str, ...] = ()
    solves: bool = False
    full_batch: bool = False
    inverse: Inverse | None = None
    splits: bool = False
    every: str = "token"
    reduce: str = "sum"
    curvature: bool = False
    """Whether it uses, or approximates, more than the first order of several associations."""
    ridge: float | str = 0.0
    newton_steps: int = 0
    normalizes: bool = False
    searches: bool = False
    limit: str = "batch"

    @property
    def linear(self) -> bool:
        """Whether the step is linear in the gradients; unless said, where `momentum_of` is."""
        return self.momentum_of is not None

    @property
    def condenses(self) -> bool:
        """Whether statistics of fixed size (its slots) stand for all of the past."""
        return self.inverse is not None

    @property
    def per_value(self) -> bool:
        """Whether η differs between value channels."""
        return self._rate_axes == ("V",)

    @property
    def _rate_axes(self) -> tuple[str, ...]:
        numbers = self.numbers
        return numbers.get("lr", numbers.get("log_lr", ()))

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        """η_t given κ(k, k) and the error's slope a; only key-dependent rates override this.

        Args:
            lr: the declared η_t, one number per association.
            kappa: κ(k, k) of the lifted key, shaped like ``lr``.
            slope: a of the error a·prediction − b·value.
        """
        return lr

    @property
    def keyed(self) -> bool:
        """Whether the rate depends on the key."""
        return type(self).rate is not Algorithm.rate

    @property
    def momentum_of(self) -> str | None:
        """Which linear recursion `update` is.

        ``"none"``: −η g; ``"gradient"``: S = θS − ηg; ``"value"``: θ on the write only. ``None`` is
        any other, so a new rule fails safe.
        """
        return "none" if type(self).update is Algorithm.update else None

    @property
    def accumulates(self) -> str | None:
        """What its slot ``"momentum"`` gathers, when `settle` turns that into the step.

        ``"steps"``: S = θS − ηg; ``"gradients"``: S = θS − g. ``None`` is any other rule.
        """
        return None

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        """New slots and what is added to the decayed memory.

        Args:
            slots: the algorithm's own tensors by name, each ``[B, H, out, in]``.
            step: what it sees at this token.
        """
        return {}, -step.lr * step.gradient

    def settle(self, slots: Slots, lr: Tensor) -> Tensor:
        """The one step of a whole inner batch when ``every == "batch"``, from its last slots.

        Args:
            slots: its tensors by name after the last token of the batch.
            lr: η of that token, broadcast to ``[B, H, out, in]``.

        Raises:
            RecipeError: an algorithm that moves at every token.
        """
        raise RecipeError(f"{self.title} moves at every token")

    def direction(self, slots: Slots) -> Tensor:
        """Where the step of `settle` points, which is that step at a rate of 1.

        An algorithm that searches for its step's length is asked for this. One that multiplies by
        the rate last saves that product here.

        Args:
            slots: its tensors by name after the last token of the batch.

        Raises:
            RecipeError: an algorithm that moves at every token.
        """
        some = next(iter(slots.values()))
        return self.settle(slots, torch.ones_like(some[..., :1, :1]))

    def slot_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one slot beside weights of that shape.

        Args:
            name: one of `slots`.
            shape: of the weights of one map, ``(out, in)``.
        """
        return shape if self.inverse is None else self.inverse.slot_shape(name, shape)

    def rate_text(self, x: str, slope: float) -> str:
        """η_t as text, a function of the lifted key ``x`` and the error's slope, where `keyed`.

        Args:
            x: the lifted key as it is written, e.g. ``"φ(k_t)"``.
            slope: a of the error a·prediction − b·value.
        """
        return f"{type(self).__name__.lower()}({x})"

    def wide(self, recipe: RecipeLike) -> tuple[str, ...]:
        """Slots that are float64 whatever the inputs are, because what follows needs the digits."""
        return ()

    def penalty(self, recipe: RecipeLike) -> str:
        """What it adds to the objective, as text; nothing for most."""
        return ""

    def solution(self, recipe: RecipeLike) -> tuple[str, ...]:
        """How W_t follows from the past, one equation a line, where it is not reached by steps."""
        return ()

    @property
    def eta(self) -> str | None:
        """Field of the rate η, when it has one."""
        return self.field_of("lr")

    def pace(self, at: str = "t") -> float | str:
        """η as a factor of an equation: a number, a letter, or a diagonal for rates per channel."""
        if self.eta is None:
            return 1.0
        eta = self.symbol(self.eta, at)
        if isinstance(eta, str) and self.per_value:
            return f"Diag({eta})"
        return eta

    def moves(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        """The equations of its own state, and the terms it adds to the decayed memory.

        An algorithm whose `update` is its own is written as a function of g_t unless it says more.

        Args:
            gradient: g_t as signed terms.
            at: index of the token, e.g. ``"t"``.
        """
        if self.momentum_of == "none":
            return (), gradient.scaled(self.pace(at), -1.0)
        own = f"{type(self).__name__.lower()}(g_{at})"
        return (f"g_{at} = {render_sum(gradient.compact)}",), (Term((own,)),)

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from self._undeclared(recipe)
        yield from self._unread()
        if self._rate_axes and not recipe.memory.channelled:
            yield (
                f"{self.title} has a rate per value channel, which are those of a linear map, and "
                f"{recipe.memory.title} does not have them: use one rate per head"
            )
        if self.reduce == "mean" and (recipe.retention.decay or recipe.retention.linked):
            yield (
                f"{self.title}(reduce='mean') averages steps from W°, which "
                f"{recipe.retention.title} would forget: use retention.Keep() or reduce='sum'"
            )
        if self.steps > 1 and recipe.context.horizon not in (1, None):
            yield (
                f"{self.title}(steps={self.steps}) takes several associations per token, which "
                f"{recipe.context.title} cannot count: use context.Online()"
            )
        if self.steps > 1 and self.batch > 1:
            yield (
                f"{self.title}(batch={self.batch}, steps={self.steps}): the sub-steps of a token "
                "are sequential, so they need batch=1"
            )
        if self.keyed:
            yield from self._key_rules(recipe)
        yield from limit_rules(self)
        if self.normalizes:
            yield from share_rules(self, recipe)
        if self.searches:
            yield from search_rules(self, recipe)

    def _undeclared(self, recipe: RecipeLike) -> Iterator[str]:
        """What engines would have to assume of an algorithm that does not say it."""
        me, of, slots = self.title, self.momentum_of, self.slots
        own = type(self).update is not Algorithm.update
        if self.solves and not (self.condenses or recipe.nonparametric or recipe.solves_from_gram):
            yield (
                f"{me} says that it solves, and not from which statistics: state its inverse, as "
                "algorithm.LeastSquares does, or descend"
            )
        if self.inverse is not None and (
            slots != self.inverse.slots or self.numbers.get("ridge") not in ((), ("in",))
        ):
            yield (
                f"{me} states an inverse, which needs slots={self.inverse.slots} and the number "
                "'ridge', per head or with axes=('in',)"
            )
        if of in ("gradient", "value") and (
            slots != ("momentum",) or "momentum" not in self.numbers
        ):
            yield (
                f"{me} says momentum_of={of!r}, whose state is slots=('momentum',) and whose rate "
                "is the number 'momentum': declare both, or leave momentum_of out"
            )
        if self.accumulates is not None and slots != ("momentum",):
            yield f"{me} says accumulates={self.accumulates!r}, which needs slots=('momentum',)"
        if slots and not own and not self.condenses:
            yield f"{me} keeps {', '.join(slots)} and never moves it: override update"
        if self.every == "batch" and self.accumulates is None:
            yield (
                f"{me} moves once per inner batch, and not by what it accumulates: state "
                "accumulates and settle"
            )
        if self.reduce == "mean" and (own or "offset" not in self.numbers):
            yield (
                f"{me}(reduce='mean') averages plain steps −η g, with the number 'offset': leave "
                "update as it is and declare offset, or use reduce='sum'"
            )
        plain = of == "none" or self.condenses or self.solves
        if recipe.context.horizon is None and self.full_batch and not plain:
            yield (
                f"{me} says full_batch, and a full pass takes plain steps −η g, not those of its "
                "own update: leave update as it is, or use context.Online()"
            )

    def _unread(self) -> Iterator[str]:
        """Numbers that nobody would read, or not in that shape."""
        me, numbers = self.title, self.numbers
        read = {"lr", "log_lr", "offset", "ridge"}
        if type(self).update is not Algorithm.update:
            read |= {"momentum"}
        for name in sorted(numbers.keys() - read):
            yield (
                f"{me} declares the number {name!r}, which no step is handed: declare a constant "
                "as a plain field, or name the quantity 'lr' or 'momentum'"
            )
        per_value = () if self.keyed else ("V",)
        if self._rate_axes not in ((), per_value):
            yield (
                f"{me} has a rate with axes {self._rate_axes}: a rate is one per head, or, where "
                "it does not depend on the key, per value channel with axes=('V',)"
            )
        if numbers.get("momentum"):
            yield f"{me} has a momentum with axes {numbers['momentum']}: it is one per head"

    def _key_rules(self, recipe: RecipeLike) -> Iterator[str]:
        """A rate that depends on κ(k, k) solves for one association."""
        affine = recipe.bias.affine
        if affine is None or affine[0] <= 0:
            yield (
                f"{self.title} takes the size of its step from an error that grows with the "
                f"prediction, and {recipe.bias.title} has no such slope: use bias.L2()"
            )
        if not recipe.memory.linear or recipe.memory.diagonal:
            yield f"{self.title} needs memory.Matrix, not {recipe.memory.title}"
        if recipe.context.horizon != 1 or recipe.context.gates():
            yield f"{self.title} solves for one association: use context.Online()"
