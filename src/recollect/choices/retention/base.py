"""Base class of retentions, and decay: how weights decay and are linked to their dual state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.autograd import inner_leaves
from recollect.choices.equation_terms import Term, Terms, render_sum
from recollect.choices.member import Member, member
from recollect.choices.overrides import check_override
from recollect.fields import Gate, Param, Range, option, quantity
from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Decay", "Keep", "Retention"]


Values = Mapping[str, Tensor]


class Retention(Member):
    """How A_t follows from A_{t−1}, and W_t from A_t.

    Attributes:
        decay: the decay α, or ``None``.
        link_every: ``"token"``: W_t = link(A_t) at every token; ``"batch"``: the link acts at the
            boundaries of inner batches, and reads within a batch are linear. Both are equal if
            b = 1.

    Examples:
        >>> @rc.member
        ... class Bounded(rc.retention.Retention):  # W = tanh(A), whose entries stay in (−1, 1)
        ...     def link(self, A, gates):
        ...         return A.tanh()
        >>> recipe = rc.Recipe(retention=Bounded(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
        >>> k, v = torch.ones(1, 4, 1, 2), torch.full((1, 4, 1, 2), 9.0)
        >>> y, _ = rc.recall(recipe, k, k, v)
        >>> bool((y <= 2).all())  # no more than ‖k‖₁, however large the values
        True
    """

    choice = "retention"

    decay: Decay | None = None
    link_every: str = "token"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        same = "W, a tensor of the shape of A"
        check_override(cls, "link", "A, gates", same, lambda A, gates: A.shape)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A slot accepts any retention, regardless of its annotation.
        decay: Retention | None = self.decay
        if decay is not None and type(decay) is not Decay:
            raise RecipeError(
                f"{self.title}(decay=...) must be retention.Decay(...), not {decay.title}"
            )

    def link(self, A: Tensor, gates: Values) -> Tensor:
        """Return W = link(A) of one map, ``[..., out, in]``.

        Args:
            A: the dual state of one map, ``[..., out, in]``.
            gates: quantities of this retention by name, each ``[..., 1, 1]``.
        """
        return A

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        """Return A_t = α_t A_{t−1} + step.

        Args:
            A: the state A_{t−1}, ``[..., out, in]``.
            step: step of the algorithm, ``[..., out, in]``.
            log_decay: log α_t ≤ 0, broadcastable to A; ``None`` without a decay.
            gates: quantities of this retention by name, each ``[..., 1, 1]``.
        """
        return step + (A if log_decay is None else log_decay.exp() * A)

    @property
    def link_lipschitz(self) -> float | None:
        """Constant L with |link(A) − link(B)| ≤ L |A − B| for all A and B; ``None`` if unknown.

        It is 1 without a link. `step_gain` uses it as the slope of the link.
        """
        return None if self.has_link else 1.0

    step_gain_matmuls: int = 0
    """Number of matmuls with a matrix of A's shape in `rank_one_step_gain`, for the cost."""

    def step_gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """Return ⟨G, J G⟩ with J = ∂link/∂A, the change of W along G per step of A along G.

        The default is L |G|² with L = `link_lipschitz`, or autograd of `link` if L is ``None``.
        Normalised steps are divided by the result. A link with unbounded weights and zero slopes
        must declare L or override this method with an upper bound that is 0 only for G = 0.

        Args:
            A: the dual state of one map, broadcastable to G.
            G: gradients of single associations with respect to W, ``[..., out, in]``.
            gates: quantities of this retention by name, each ``[..., 1, 1]``.
        """
        if self.link_lipschitz is not None:
            return self.link_lipschitz * G.square().sum((-2, -1))
        outer = torch.is_grad_enabled()
        with torch.enable_grad():
            (point,) = inner_leaves((A.expand_as(G),), outer=outer)
            (JG,) = torch.autograd.grad(
                self.link(point, gates), point, G, create_graph=outer, materialize_grads=True
            )
        return (G * JG).sum((-2, -1))

    def rank_one_step_gain(
        self, A: Tensor, h: Tensor, delta: Tensor, gates: Values
    ) -> Tensor | None:
        """Return `step_gain` of δ hᵀ for n associations without forming δ hᵀ, ``[..., n]``.

        ``None`` if there is no such formula.

        Args:
            A: the dual state of one map, ``[..., out, in]``.
            h: inputs of the map, ``[..., n, in]``.
            delta: gradients of its outputs, ``[..., n, out]``.
            gates: quantities of this retention by name, each ``[..., 1, 1]``.
        """
        if self.link_lipschitz is None:
            return None
        if torch.is_grad_enabled():
            return self.link_lipschitz * (h.square().sum(-1) * delta.square().sum(-1))
        sizes = torch.linalg.vector_norm(h, dim=-1) * torch.linalg.vector_norm(delta, dim=-1)
        sizes.square_()
        return sizes if self.link_lipschitz == 1 else sizes.mul_(self.link_lipschitz)

    @property
    def has_link(self) -> bool:
        """Whether W differs from A (``link`` is overridden)."""
        return type(self).link is not Retention.link

    @property
    def is_additive(self) -> bool:
        """Whether A_t = α A_{t−1} + step (``advance`` is not overridden)."""
        return type(self).advance is Retention.advance

    @property
    def is_plain(self) -> bool:
        """Whether W_t = A_t = α A_{t−1} + step, without a link."""
        return not self.has_link and self.is_additive

    links_after_first_token: bool = False
    """Whether W_1 = link(A_1) replaces W° for tokens 2..b of a batch (MIRAS 30).

    It applies to ``link_every="batch"``.
    """

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        quantities = dict(self.quantity_axes)
        for name in self.decay.quantity_axes if self.decay is not None else ():
            quantities.pop(name, None)
        if self.has_link and recipe.memory.read != type(recipe.memory.read)():
            yield (
                "memory.Read(...) with a normaliser, bonus, earlier or transposed read needs "
                f"weights that are the state itself, and {self.title} puts a link between them: "
                "use retention.Keep() or Decay()"
            )
        for name, axes in quantities.items():
            if name == "log_decay":
                yield (
                    f"{self.title} declares the quantity 'decay': use a field decay with a "
                    "retention.Decay() instead"
                )
            elif axes:
                yield (
                    f"{self.title} declares the quantity {name!r} with axes {axes}, and link and "
                    "advance receive one value per head: drop the axes"
                )
            elif self.is_plain:
                yield (
                    f"{self.title} declares the quantity {name!r} and overrides neither link nor "
                    "advance, which receive it: override one of them"
                )
        moves_in_batch = recipe.algorithm.update_every == "token"
        if not self.is_additive and recipe.algorithm.batch_size != 1 and moves_in_batch:
            yield (
                f"{self.title} rebuilds A from W at every update, so it is sequential: set "
                f"batch_size=1 in {recipe.algorithm.title}, or update_every='batch' if it has it"
            )

    def link_text(self) -> str:
        """Return the link as text for an equation; empty for the identity.

        The state is ``A_t``, and gates have the index ``_t``. `explain` replaces both for the
        weights at which errors are taken.
        """
        if not self.has_link:
            return ""
        fields = (self.quantity_field(name) for name, _, _ in self._quantities())
        symbols = (self.symbol(field) for field in fields if field is not None)
        letters = [symbol for symbol in symbols if isinstance(symbol, str)]
        return f"{type(self).__name__.lower()}({', '.join(('A_t', *letters))})"

    def state_equations(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        """Return the equations from the old state to the new one.

        Args:
            old: text of the old state, e.g. ``"A_(t−1)"``.
            new: text of the new state.
            step: step of the algorithm, as signed terms.
            at: index of the token of the decay.
            vector: as in `Decay.decayed_text`.
        """
        if self.is_additive:
            decayed = (
                Term((old,))
                if self.decay is None
                else self.decay.decayed_text(old, at, vector=vector)
            )
            return (f"{new} = {render_sum((decayed, *step))}",)
        decay = (
            ""
            if self.decay is None
            else f", {render_sum((self.decay.decayed_text('', at),)).strip()}"
        )
        return (f"{new} = {type(self).__name__.lower()}({old}, {render_sum(step)}{decay})",)


@member
class Keep(Retention):
    """Retention without decay: α = 1.

    Examples:
        >>> recipe = rc.Recipe(retention=rc.retention.Keep())
        >>> print(*rc.explain(recipe).write_equations)
        W_t = W_(t−1) − η_t (W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
    """


_AXES = {
    "head": (),
    "key": ("F",),
    "value": ("V",),
    "key_value": ("F",),
    "entry": ("V", "F"),
}


DEFAULT_LOG_DECAY = math.log(0.98)


@member
class Decay(Retention):
    """A_t = α_t A_{t−1} + …: exponential forgetting, the L2 retention gate.

    Args:
        per: one α per ``"head"``, per ``"key"`` channel (columns, feature channels), per
            ``"value"`` channel (rows), both (``"key_value"``: β αᵀ), or per ``"entry"``. In a deep
            memory, keys act on the first map's inputs, values on the last map's outputs, and the
            other maps use the mean log-decay.
        when: ``"after"``: gradients at W_{t−1} (Titans, leaky LMS); ``"before"``: at α_t W_{t−1}
            (Gated DeltaNet).
        alpha: α in (0, 1]: a constant, the gate ``"log_decay"`` (with ``per="key_value"`` also
            ``"log_decay_value"``), or the param ``"decay"``. ``"input_scaled"``, for all but
            ``per="key_value"``: α_t = exp(−δ_t ⊙ a). The gate ``"log_decay"`` holds −δ_t, per
            channel of values if α is per entry, and the param ``"decay_scale"`` holds a ≥ 0
            (Mamba's Δ and A, RG-LRU's r and Λ). So no tensor has tokens and entries.

    Examples:
        >>> recipe = rc.Recipe(
        ...     bias=rc.bias.DotProduct(),
        ...     retention=rc.retention.Decay(alpha=0.5),
        ...     algorithm=rc.algorithm.GradientDescent(lr=1.0),
        ... )
        >>> one = torch.ones(1, 4, 1, 1)
        >>> rc.recall(recipe, one, one, one)[0].flatten()  # 1, 1 + ½, 1 + ½ + ¼, …
        tensor([1.0000, 1.5000, 1.7500, 1.8750])
        >>> [(gate.name, gate.axes) for gate in rc.retention.Decay(per="key").gates()]
        [('log_decay', ('F',))]
    """

    per: str = option("head", "key", "value", "key_value", "entry")
    when: str = option("after", "before")
    alpha: float | str = quantity(
        "input",
        name="decay",
        above=0,
        at_most=1,
        init=0.98,
        log=True,
        axes=lambda d: _AXES[d.per],
        sources=("input", "learned", "input_scaled"),
        letter="α",
        role="decay",
    )

    @property
    def decay(self) -> Decay:  # type: ignore[override]
        """This decay."""
        return self

    def validate(self) -> None:
        if self.per == "key_value" and not isinstance(self.alpha, str):
            raise RecipeError(
                "retention.Decay(per='key_value') with a constant alpha is equal for all entries: "
                "use per='head', or alpha='input' or 'learned'"
            )
        if self.alpha == "input_scaled" and self.per == "key_value":
            raise RecipeError(
                "retention.Decay(per='key_value', alpha='input_scaled') has two decays to scale: "
                "use another per, or alpha='input'"
            )

    @property
    def is_input_scaled(self) -> bool:
        """Whether log α_t is the gate times a param."""
        return self.alpha == "input_scaled"

    def decayed_text(self, state: str, at: str = "t", *, vector: bool = False) -> Term:
        """Return the decayed state as a term: α_t A, A Diag(α_t), Diag(α_t) A.

        Args:
            state: text of the state.
            at: index of the token.
            vector: whether the state has one weight per channel.
        """
        alpha = self.symbol("alpha", at)
        if not isinstance(alpha, str) or self.per == "head":
            return Term((state,)).times(alpha)
        if self.per == "entry" or vector:
            return Term((f"{alpha} ⊙ {state}",))
        key, value = f"Diag({alpha})", f"Diag({alpha.replace('α', 'β')})"
        if self.per == "key":
            return Term((state, key))
        return Term((key, state)) if self.per == "value" else Term((value, state, key))

    def notes(self) -> tuple[str, ...]:
        if not self.is_input_scaled:
            return ()
        per = {"entry": "δ_t per value channel, a per entry", "head": "a per head"}.get(self.per)
        per = per or "a per channel"
        return (f"α_t = exp(−δ_t ⊙ a): {per}",)

    def gates(self) -> tuple[Gate, ...]:
        gates = super().gates()
        if self.is_input_scaled:
            gate = Gate(
                name="log_decay",
                owner=self.title,
                axes=("V",) if self.per == "entry" else _AXES[self.per],
                range=Range(high=0.0),
                init=DEFAULT_LOG_DECAY,
                role="decay",
                is_log=True,
            )
            return (gate,)
        if self.per != "key_value" or not gates:
            return gates
        (gate,) = gates
        return (gate, dataclasses.replace(gate, name="log_decay_value", axes=("V",)))

    def params(self) -> tuple[Param, ...]:
        params = super().params()
        if self.is_input_scaled:
            scale = Param(
                name="decay_scale",
                owner=self.title,
                axes=_AXES[self.per],
                range=Range(low=0.0),
                init=1.0,
                role="decay",
            )
            return (scale,)
        if self.per != "key_value" or not params:
            return params
        (param,) = params
        return (param, dataclasses.replace(param, name="decay_value", axes=("V",)))

    def learned_quantities(self) -> frozenset[str]:
        return frozenset(param.name for param in self.params())

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from decay_conflicts(self, recipe)


def decay_conflicts(decay: Decay, recipe: Recipe) -> Iterator[str]:
    """Yield the reasons why a decay does not fit the recipe."""
    if decay.when == "before":
        if recipe.algorithm.batch_size != 1:
            yield (
                "retention.Decay(when='before') measures the error at α_t W_{t−1}, which changes "
                f"inside an inner batch: set batch_size=1 in {recipe.algorithm.title}, or "
                "when='after'"
            )
        if recipe.context.horizon not in (1, None) and not recipe.memory.linear:
            yield (
                "retention.Decay(when='before') with a window needs a linear memory, and "
                f"{recipe.memory.title} is deep: use when='after' or context.Online()"
            )
    if decay.per != "head" and not recipe.memory.has_channels:
        yield (
            f"retention.Decay(per={decay.per!r}) acts on channels of linear maps, which "
            f"{recipe.memory.title} does not have: use per='head'"
        )
    if decay.per in ("key_value", "entry") and recipe.memory.is_elementwise:
        yield (
            f"retention.Decay(per={decay.per!r}) needs a matrix, and {recipe.memory.title} has one "
            "weight per channel: use per='key'"
        )
    if decay.per == "entry" and not recipe.memory.linear:
        yield (
            f"retention.Decay(per='entry') needs memory.Matrix, and {recipe.memory.title} has "
            "several maps: use per='head', 'key', 'value' or 'key_value'"
        )
    if decay.per == "entry" and decay.is_input_scaled:
        algorithm, retention = recipe.algorithm, recipe.retention
        linear = algorithm.recursion is not None and algorithm.batch_size == 1
        if not linear or not recipe.bias.is_affine or retention is not decay:
            yield (
                "retention.Decay(per='entry', alpha='input_scaled') keeps its factors separate, "
                "which needs a linear recursion per token: use alpha='input', or bias.DotProduct() "
                "or L2() with algorithm.GradientDescent(batch_size=1) and no link"
            )
