"""Base class of algorithms: the rule that turns inner gradients into steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.erasure import erasure_conflicts
from recollect.choices.algorithm.normalized_steps import (
    line_search_conflicts,
    normalized_step_conflicts,
    overlap_conflicts,
)
from recollect.choices.equation_terms import Gradient, Term, Terms, render_sum
from recollect.choices.member import Member
from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Algorithm", "Inverse", "Step"]


Slots = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Inputs of an algorithm at one token, for one map; tensors broadcast to ``[B, H, out, in]``.

    Attributes:
        gradient: g_t.
        write: the part of g_t that does not depend on the prediction (−b·v kᵀ summed over the
            context), if the bias is affine.
        lr, momentum: η_t and θ_t; 1 and 0 if the algorithm does not declare them.
        count: index of this token in its document, from 1, ``[B, 1, 1, 1]``.
        outer_lr: rate at which accumulated steps enter the memory.

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
    outer_lr: Tensor | float = 1.0


@dataclass(frozen=True, kw_only=True)
class Inverse:
    """The matrix used as (G_t + ρ_t I)⁻¹ in W_t = W_0 + E_t (G_t + ρ_t I)⁻¹, with ridge λ.

    Attributes:
        kind: ``"exact"``; ``"identity"`` I; ``"diagonal"`` (diag(G) + λ)^(−p); ``"spectral"``
            (G + λI)^(−p); ``"conjugate_gradient"``: ``steps`` iterations from 0 on each query.
        ridge: schedule of ρ_t for an exact inverse: ``"constant"``, ``"relative"``, ``"decaying"``
            or ``"refreshed"``.
        refresh_every: number of tokens between two refreshes of the ridge.
        power: p.
        steps: number of conjugate-gradient iterations.

    Examples:
        >>> rc.algorithm.LeastSquares().inverse.slots
        ('gram', 'origin', 'inverse', 'kept')
        >>> diagonal = rc.algorithm.Inverse(kind="diagonal", power=0.5)
        >>> diagonal.slot_shape("gram", (4, 8))
        (8,)
    """

    kind: str = "exact"
    ridge: str = "constant"
    refresh_every: int = 1
    power: float = 1.0
    steps: int = 1

    @property
    def is_recursive(self) -> bool:
        """Whether the inverse itself has a recursion over tokens."""
        return self.kind == "exact" and self.ridge in ("decaying", "refreshed")

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the statistics: Gram matrix, initial memory, inverse and ρ/λ."""
        gram = () if self.kind == "identity" else ("gram",)
        return (*gram, "origin", *(("inverse", "kept") if self.is_recursive else ()))

    def slot_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a slot for weights ``[out, in]``.

        Args:
            name: one of `slots`.
            shape: shape of the weights, ``(out, in)``.
        """
        num_inputs = shape[1]
        if name in ("origin", "kept"):
            return shape if name == "origin" else ()
        return (num_inputs,) if self.kind == "diagonal" else (num_inputs, num_inputs)


class Algorithm(Member):
    """Rule that turns inner gradients into steps of the memory.

    Engines read quantities by name. The rate η is ``"lr"``, per head or with ``axes=("V",)`` per
    value channel, and 1 if it is not declared. θ of `Step.momentum` is ``"momentum"``,
    `Step.outer_lr` is ``"outer_lr"``, λ of a solver is ``"ridge"``. Other quantities raise an
    error.

    Attributes:
        batch_size: b, number of tokens whose gradients are taken at the same W°.
        updates_per_token: associations per token (or full-batch steps under `context.Prefix`).
        slots: names of the state stored with A, each shaped like the weights.
        linear: whether the step is linear in the gradients.
        solves: whether the minimum is reached in closed form.
        full_batch: whether all past associations can be used at once.
        inverse: description of the fixed-size statistics that replace all past associations, or
            ``None``.
        needs_split_error: whether `Step.write` is required.
        update_every: ``"batch"`` if the memory changes only at the end of an inner batch.
        momentum_every: ``"batch"`` if θ acts once per inner batch, S = θ̄ S° − Σ_s η_s g_s, with θ̄
            the mean over the batch and S° the sum at its start.
        reduction: ``"mean"`` if steps are averaged over the open inner batch.
        ridge: λ of ½λ‖W‖² if it is a constant of the problem, else 0.
        ns_steps: Newton–Schulz iterations of one step.
        uses_normalized_steps: whether the gradient of every association is scaled by
            `polyak_scale` of `recollect.choices.algorithm.normalized_steps`.
        uses_line_search: whether the step is scaled by `line_search_scale` of that module. The
            direction is the result of `update` or `batch_step` at rate 1.
        batch_overlap: ``"measured"`` if rates are η_t r_t, with `overlap_discount` of that module.
        erasure: c of a gradient (δ + c W h) hᵀ of every linear map W, with its input h and the
            gradient δ of its output: each map erases c times its output at its own input.

    Examples:
        >>> @rc.member
        ... class SignDescent(rc.algorithm.Algorithm):  # A_t = α_t A_(t−1) − η_t sign(g_t)
        ...     lr: float | str = rc.quantity("input", at_least=0, init=0.1, role="rate")
        ...
        ...     def update(self, slots, step):
        ...         return {}, -step.lr * step.gradient.sign()
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, state = rc.recall(rc.Recipe(algorithm=SignDescent(lr=0.5)), q, k, v)
        >>> state.weights[0].div(0.5).frac().abs().max()  # entries are multiples of η
        tensor(0.)
    """

    choice = "algorithm"

    batch_size: int = 1
    updates_per_token: int = 1
    slots: tuple[str, ...] = ()
    solves: bool = False
    full_batch: bool = False
    inverse: Inverse | None = None
    needs_split_error: bool = False
    update_every: str = "token"
    momentum_every: str = "token"
    reduction: str = "sum"
    curvature: bool = False
    """Whether the step uses second-order information of several associations."""
    ridge: float | str = 0.0
    ns_steps: int = 0
    uses_normalized_steps: bool = False
    uses_line_search: bool = False
    batch_overlap: str = "worst_case"
    erasure: float = 0.0

    @property
    def linear(self) -> bool:
        """Whether the step is linear in the gradients: by default, if it has a `recursion`."""
        return self.recursion is not None

    @property
    def per_value(self) -> bool:
        """Whether η differs between value channels."""
        return self._rate_axes == ("V",)

    @property
    def _rate_axes(self) -> tuple[str, ...]:
        axes = self.quantity_axes
        return axes.get("lr", axes.get("log_lr", ()))

    def rate(self, lr: Tensor, kappa: Tensor, slope: float) -> Tensor:
        """Return η_t from κ(k, k) and the error's slope a; overridden by key-dependent rates.

        Args:
            lr: declared η_t of each association.
            kappa: κ(k, k) of the lifted key, shaped like ``lr``.
            slope: a of the error a·prediction − b·value.
        """
        return lr

    @property
    def rate_depends_on_key(self) -> bool:
        """Whether the rate depends on the key."""
        return type(self).rate is not Algorithm.rate

    @property
    def recursion(self) -> str | None:
        """Linear recursion that `update` implements.

        ``"none"``: −η g; ``"gradient"``: S = θS − ηg; ``"value"``: θ on the write only. The last
        two add `Step.outer_lr` times S to the memory. ``None`` for other rules, and by default if
        `update` is overridden.
        """
        return "none" if type(self).update is Algorithm.update else None

    @property
    def has_outer_lr(self) -> bool:
        """Whether accumulated steps enter the memory at a rate other than 1."""
        return self.is_active("outer_lr", 1.0)

    @property
    def accumulator(self) -> str | None:
        """Content of the slot ``"momentum"`` from which `batch_step` computes the step.

        ``"steps"``: S = θS − ηg; ``"gradients"``: S = θS − g. ``None`` for other rules. An
        algorithm without slots declares ``"steps"``, and S is then −Σ η g over the inner batch.
        """
        return None

    @property
    def sums_batch(self) -> bool:
        """Whether S of an inner batch is a sum over its tokens, without a momentum between them."""
        return self.update_every == "batch" and (self.momentum_every == "batch" or not self.slots)

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        """Return the new slots and the step that is added to the decayed memory.

        Args:
            slots: the algorithm's state by name, each ``[B, H, out, in]``.
            step: gradient and quantities of this token.
        """
        return {}, -step.lr * step.gradient

    def batch_step(self, slots: Slots, lr: Tensor) -> Tensor:
        """Return the step of an inner batch, for ``update_every == "batch"``.

        Args:
            slots: the algorithm's state by name after the last token of the batch; S of
                `accumulator` is ``"momentum"``, also without slots.
            lr: mean of η over the batch, broadcast to ``[B, H, out, in]``.

        Raises:
            RecipeError: the algorithm updates the memory at every token.
        """
        raise RecipeError(f"{self.title} updates the memory at every token")

    def batch_direction(self, slots: Slots) -> Tensor:
        """Return the direction of `batch_step`, which is that step at a rate of 1.

        Line searches use it. Override it to save the product with the rate.

        Args:
            slots: the algorithm's state by name after the last token of the batch.

        Raises:
            RecipeError: the algorithm updates the memory at every token.
        """
        slot = next(iter(slots.values()))
        return self.batch_step(slots, torch.ones_like(slot[..., :1, :1]))

    def slot_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a slot for weights of a shape.

        Args:
            name: one of `slots`.
            shape: shape of the weights of one map, ``(out, in)``.
        """
        return shape if self.inverse is None else self.inverse.slot_shape(name, shape)

    def key_rate_text(self, x: str, slope: float) -> str:
        """Return the text of η_t as a function of the lifted key ``x`` and the error's slope.

        Args:
            x: text of the lifted key, e.g. ``"φ(k_t)"``.
            slope: a of the error a·prediction − b·value.
        """
        return f"{type(self).__name__.lower()}({x})"

    def float64_slots(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the slots that are float64 for inputs of any dtype."""
        return ()

    def penalty_text(self, recipe: Recipe) -> str:
        """Return the text of the penalty in the objective, empty for most algorithms."""
        return ""

    def solution_equations(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the equations of W_t for algorithms that do not take steps."""
        return ()

    @property
    def rate_field(self) -> str | None:
        """Name of the field of the rate η, or ``None``."""
        return self.quantity_field("lr")

    def rate_factor_text(self, at: str = "t") -> float | str:
        """Return η in an equation: a number, a letter, or a diagonal for rates per channel."""
        if self.rate_field is None:
            return 1.0
        eta = self.symbol(self.rate_field, at)
        if isinstance(eta, str) and self.per_value:
            return f"Diag({eta})"
        return eta

    def update_equations(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        """Return the equations of the slots, and the terms added to the decayed memory.

        By default an overridden `update` is written as a function of g_t.

        Args:
            gradient: g_t as signed terms.
            at: index of the token, e.g. ``"t"``.
        """
        if self.recursion == "none":
            return (), gradient.scaled(self.rate_factor_text(at), -1.0)
        step = f"{type(self).__name__.lower()}(g_{at})"
        return (f"g_{at} = {render_sum(gradient.compact)}",), (Term((step,)),)

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from self._declaration_errors(recipe)
        yield from self._unused_quantities()
        if self._rate_axes and not recipe.memory.has_channels:
            yield (
                f"{self.title} has a rate per value channel, which needs a linear map, and "
                f"{recipe.memory.title} has none: use one rate per head"
            )
        if self.reduction == "mean" and (recipe.retention.decay or not recipe.retention.is_plain):
            yield (
                f"{self.title}(reduction='mean') averages steps from W°, which "
                f"{recipe.retention.title} would forget: use retention.Keep() or reduction='sum'"
            )
        if self.updates_per_token > 1 and self.batch_size > 1:
            yield (
                f"{self.title}(batch_size={self.batch_size}, "
                f"updates_per_token={self.updates_per_token}): the sub-steps of a token are "
                "sequential, so they need batch_size=1"
            )
        if self.rate_depends_on_key:
            yield from self._keyed_rate_errors(recipe)
        yield from overlap_conflicts(self)
        if self.uses_normalized_steps:
            yield from normalized_step_conflicts(self, recipe)
        if self.uses_line_search:
            yield from line_search_conflicts(self, recipe)
        if self.erasure:
            yield from erasure_conflicts(self, recipe)

    def _declaration_errors(self, recipe: Recipe) -> Iterator[str]:
        """Yield missing or contradictory declarations."""
        name, slots, recursion = self.title, self.slots, self.recursion
        overrides_update = type(self).update is not Algorithm.update
        if self.solves and not (
            self.inverse is not None or recipe.nonparametric or recipe.solves_from_gram
        ):
            yield (
                f"{name} sets solves=True without statistics to solve from: declare its inverse, "
                "as algorithm.LeastSquares does, or use solves=False"
            )
        if self.inverse is not None and (
            slots != self.inverse.slots or self.quantity_axes.get("ridge") not in ((), ("in",))
        ):
            yield (
                f"{name} declares an inverse, which needs slots={self.inverse.slots} and the "
                "quantity 'ridge', per head or with axes=('in',)"
            )
        if self.inverse is not None and self.inverse.is_recursive and self.query_gates:
            yield (
                f"{name}(ridge='input') has a ridge per token, and its recursion has one for all "
                "tokens: use ridge_schedule='constant' or 'relative', or ridge='learned'"
            )
        if recursion in ("gradient", "value") and (
            slots != ("momentum",) or "momentum" not in self.quantity_axes
        ):
            yield (
                f"{name} declares recursion={recursion!r}, which needs slots=('momentum',) and the "
                "quantity 'momentum': declare both, or leave recursion out"
            )
        is_plain_sum = self.sums_batch and self.accumulator == "steps" and not slots
        if self.accumulator is not None and slots != ("momentum",) and not is_plain_sum:
            yield f"{name} declares accumulator={self.accumulator!r}: set slots=('momentum',)"
        if self.momentum_every == "batch" and (self.update_every != "batch" or not slots):
            yield (
                f"{name}(momentum_every='batch') carries the sum of an inner batch to the next: "
                "set update_every='batch' and slots=('momentum',), or momentum_every='token'"
            )
        if slots and not overrides_update and self.inverse is None:
            yield f"{name} has slots {', '.join(slots)} and never updates them: override update"
        if self.update_every == "batch" and self.accumulator is None:
            yield (
                f"{name} updates the memory once per inner batch and declares no accumulator: "
                "declare accumulator and override batch_step"
            )
        if self.reduction == "mean" and (overrides_update or "offset" not in self.quantity_axes):
            yield (
                f"{name}(reduction='mean') averages plain steps −η g, with the quantity 'offset': "
                "do not override update and declare offset, or use reduction='sum'"
            )
        plain = recursion == "none" or self.inverse is not None or self.solves
        if recipe.context.horizon is None and self.full_batch and not plain:
            yield (
                f"{name} sets full_batch=True and overrides update, but a full pass takes plain "
                "steps −η g: do not override update, or use context.Online()"
            )

    @property
    def query_gates(self) -> tuple[str, ...]:
        """Gates that every query needs, also when a state is only read: a ridge per token."""
        return tuple(gate.name for gate in self.gates() if gate.role == "ridge")

    def _unused_quantities(self) -> Iterator[str]:
        """Yield declared quantities that no engine uses, or with unsupported axes."""
        title, axes = self.title, self.quantity_axes
        used = {"lr", "log_lr", "offset", "ridge"}
        if type(self).update is not Algorithm.update:
            used |= {"momentum"}
        if self.recursion in ("gradient", "value"):
            used |= {"outer_lr"}
        for name in sorted(axes.keys() - used):
            yield (
                f"{title} declares the quantity {name!r}, which steps do not use: declare a "
                "constant as a plain field, or name the quantity 'lr' or 'momentum'"
            )
        per_value = () if self.rate_depends_on_key else ("V",)
        if self._rate_axes not in ((), per_value):
            yield (
                f"{title} has a rate with axes {self._rate_axes}: use one rate per head, or one "
                "per value channel with axes=('V',) if it does not depend on the key"
            )
        for name in ("momentum", "outer_lr"):
            if axes.get(name):
                yield f"{title} has a {name} with axes {axes[name]}: use one per head"
        if self.has_outer_lr and self.uses_normalized_steps:
            yield (
                f"{title}(normalized_steps=True) takes steps of a known size, and outer_lr changes "
                "it: use outer_lr=1.0, or normalized_steps=False"
            )

    def _keyed_rate_errors(self, recipe: Recipe) -> Iterator[str]:
        """Yield conflicts of a rate that depends on κ(k, k), which solves for one association."""
        if not recipe.bias.is_quadratic:
            yield (
                f"{self.title} needs an error that grows with the prediction, and "
                f"{recipe.bias.title} has no such slope: use bias.L2()"
            )
        if not recipe.memory.linear or recipe.memory.is_elementwise:
            yield f"{self.title} needs memory.Matrix, not {recipe.memory.title}"
        if not recipe.context.is_online:
            yield f"{self.title} solves for one association: use context.Online()"
