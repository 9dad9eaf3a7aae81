"""Base class of retentions, and decay: how weights are kept, decayed and linked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.equation_terms import Term, Terms, render_sum
from recollect.choices.fields import Gate, Param, Range, option, quantity
from recollect.choices.gradients import leaves_of
from recollect.choices.member import Member, RecipeError, member
from recollect.choices.trial import check_link

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["Decay", "Keep", "Retention"]


Values = Mapping[str, Tensor]


class Retention(Member):
    """How A_t follows from A_{t−1}, and W_t from A_t.

    Attributes:
        decay: the decay α, or ``None``.
        every: ``"token"``: W_t = link(A_t) at every token; ``"batch"``: the link acts at the
            borders of the inner batch and reading inside it is linear. The same when b = 1.

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
    every: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        # A slot admits any retention, whatever its annotation says.
        held: Retention | None = self.decay
        if held is not None and type(held) is not Decay:
            raise RecipeError(
                f"{self.title}(decay=...) must be retention.Decay(...), not {held.title}"
            )
        if type(self).link is not Retention.link and (wrong := check_link(self)):
            raise RecipeError(wrong)

    def link(self, A: Tensor, gates: Values) -> Tensor:
        """W = link(A) of one map, ``[..., out, in]``; gates come as ``[..., 1, 1]``.

        Args:
            A: the dual state of one map, ``[..., out, in]``.
            gates: this retention's numbers by name, each ``[..., 1, 1]``.
        """
        return A

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        """A_t from A_{t−1} and the algorithm's step: α_t A_{t−1} + step.

        Args:
            A: the state before, ``[..., out, in]``.
            step: what the algorithm adds, ``[..., out, in]``.
            log_decay: log α_t ≤ 0, broadcastable to A; ``None`` where nothing decays.
            gates: this retention's numbers by name, each ``[..., 1, 1]``.
        """
        return step + (A if log_decay is None else log_decay.exp() * A)

    @property
    def steepest(self) -> float | None:
        """L with |link(A) − link(B)| ≤ L |A − B| for all A and B; ``None`` where none is known.

        1 without a link. It is what `gain` takes for the link's slope.
        """
        return None if self.linked else 1.0

    gain_products: int = 0
    """Products of h or δ with a matrix of A's shape that `rank_one_gain` takes, for the cost."""

    def gain(self, A: Tensor, G: Tensor, gates: Values) -> Tensor:
        """How far a step of A along G moves W along it: ⟨G, J G⟩ with J = ∂link/∂A, ``[...]``.

        L |G|² where `steepest` says L, else by autograd from `link`. A normalised step is divided
        by it: a member whose link is flat somewhere, while its weights have no bound, says L or
        overrides this with a bound above ⟨G, J G⟩ that is 0 for G = 0 alone.

        Args:
            A: the dual state of one map, broadcastable to G.
            G: gradients of single associations with respect to W, ``[..., out, in]``.
            gates: this retention's numbers by name, each ``[..., 1, 1]``.
        """
        if self.steepest is not None:
            return self.steepest * G.square().sum((-2, -1))
        outer = torch.is_grad_enabled()
        with torch.enable_grad():
            (point,) = leaves_of((A.expand_as(G),), outer=outer)
            (pulled,) = torch.autograd.grad(
                self.link(point, gates), point, G, create_graph=outer, materialize_grads=True
            )
        return (G * pulled).sum((-2, -1))

    def rank_one_gain(self, A: Tensor, h: Tensor, delta: Tensor, gates: Values) -> Tensor | None:
        """`gain` of δ hᵀ for many associations without making δ hᵀ, ``[..., n]``, or ``None``.

        Args:
            A: the dual state of one map, ``[..., out, in]``.
            h: inputs of the map, ``[..., n, in]``.
            delta: gradients of its outputs, ``[..., n, out]``.
            gates: this retention's numbers by name, each ``[..., 1, 1]``.
        """
        if self.steepest is None:
            return None
        if torch.is_grad_enabled():
            return self.steepest * (h.square().sum(-1) * delta.square().sum(-1))
        sizes = torch.linalg.vector_norm(h, dim=-1) * torch.linalg.vector_norm(delta, dim=-1)
        sizes.square_()
        return sizes if self.steepest == 1 else sizes.mul_(self.steepest)

    @property
    def linked(self) -> bool:
        """Whether W differs from A (``link`` is overridden)."""
        return type(self).link is not Retention.link

    @property
    def additive(self) -> bool:
        """Whether A_t = α A_{t−1} + step (``advance`` is not overridden)."""
        return type(self).advance is Retention.advance

    @property
    def settles_first(self) -> bool:
        """With ``every="batch"``: W_1 = link(A_1) replaces W° for tokens 2..b (MIRAS 30)."""
        return False

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        own = dict(self.numbers)
        for name in self.decay.numbers if self.decay is not None else ():
            own.pop(name, None)
        if self.linked and recipe.memory.read != type(recipe.memory.read)():
            yield (
                "memory.Read(...) with a normaliser, bonus or earlier read needs weights that are "
                f"the state itself, and {self.title} puts a link between them: use "
                "retention.Keep() or Decay()"
            )
        acts = self.linked or not self.additive
        for name, axes in own.items():
            if name == "log_decay":
                yield (
                    f"{self.title} declares the number 'decay', which acts as a retention.Decay() "
                    "that it holds in a field decay"
                )
            elif axes or not acts:
                yield (
                    f"{self.title} declares the number {name!r} with axes {axes}, and a link is "
                    "handed numbers per head, where link or advance is overridden: drop the axes, "
                    "or override one of them"
                )
        if not self.additive and recipe.algorithm.batch != 1:
            yield (
                f"{self.title} rebuilds A from W at every token, so it is sequential: set "
                f"batch=1 in {recipe.algorithm.title}"
            )

    def text(self) -> str:
        """The link as it is written in an equation; empty for the identity.

        The state is ``A_t``, and gates have the index ``_t``: `explain` replaces both, for the
        weights at which errors are taken.
        """
        if not self.linked:
            return ""
        fields = (self.field_of(name) for name, _, _ in self._quantities())
        symbols = (self.symbol(field) for field in fields if field is not None)
        letters = [symbol for symbol in symbols if isinstance(symbol, str)]
        return f"{type(self).__name__.lower()}({', '.join(('A_t', *letters))})"

    def moves(
        self, old: str, new: str, step: Terms, *, at: str = "t", vector: bool = False
    ) -> tuple[str, ...]:
        """The equations that lead from the old state to the new.

        Args:
            old: name of the state before, e.g. ``"A_(t−1)"``.
            new: name of the state after.
            step: what the algorithm adds, as signed terms.
            at: index of the decay's token.
            vector: as in `Decay.on`.
        """
        if self.additive:
            kept = Term((old,)) if self.decay is None else self.decay.on(old, at, vector=vector)
            return (f"{new} = {render_sum((kept, *step))}",)
        decay = "" if self.decay is None else f", {render_sum((self.decay.on('', at),)).strip()}"
        return (f"{new} = {type(self).__name__.lower()}({old}, {render_sum(step)}{decay})",)


@member
class Keep(Retention):
    """Nothing is forgotten: α = 1.

    Examples:
        >>> recipe = rc.Recipe(retention=rc.retention.Keep())
        >>> print(*rc.explain(recipe).write)
        W_t = W_(t−1) − η_t (W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
    """


_AXES = {
    "head": (),
    "key": ("F",),
    "value": ("V",),
    "key_value": ("F",),
    "entry": ("V", "F"),
}


_SCALE = "decay_scale"


_SLOW = math.log(0.98)


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
        rate: α in (0, 1]: a constant, the gate ``"log_decay"`` (with ``per="key_value"`` also
            ``"log_decay_value"``), or the param ``"decay"``. ``"factored"``, per channel or entry:
            α_t = exp(−δ_t ⊙ a). The gate ``"log_decay"`` holds −δ_t per channel (of values, when
            per entry), the param ``"decay_scale"`` a ≥ 0 (Mamba's Δ and A, RG-LRU's r and Λ), so
            that no tensor has tokens and entries.

    Examples:
        >>> recipe = rc.Recipe(
        ...     bias=rc.bias.DotProduct(),
        ...     retention=rc.retention.Decay(rate=0.5),
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
    rate: float | str = quantity(
        "token",
        name="decay",
        above=0,
        at_most=1,
        init=0.98,
        log=True,
        axes=lambda d: _AXES[d.per],
        kinds=("token", "static", "factored"),
        letter="α",
    )

    @property
    def decay(self) -> Decay:  # type: ignore[override]
        """A decay is its own decay."""
        return self

    def validate(self) -> None:
        if self.per == "key_value" and not isinstance(self.rate, str):
            raise RecipeError(
                "retention.Decay(per='key_value') with a constant rate is one number for every "
                "entry: use per='head', or rate='token' or 'static'"
            )
        if self.rate == "factored" and self.per not in ("key", "value", "entry"):
            raise RecipeError(
                f"retention.Decay(rate='factored') factors a decay per channel or entry, and "
                f"per={self.per!r} is neither: use per='entry', or rate='token'"
            )

    @property
    def factored(self) -> bool:
        """Whether log α_t is the gate times a param."""
        return self.rate == "factored"

    def on(self, state: str, at: str = "t", *, vector: bool = False) -> Term:
        """The decayed state: α_t A, A Diag(α_t), Diag(α_t) A.

        Args:
            state: how the state is written.
            at: index of the token.
            vector: whether the state has one row, so that every channel is an entry.
        """
        alpha = self.symbol("rate", at)
        if not isinstance(alpha, str) or self.per == "head":
            return Term((state,)).times(alpha)
        if self.per == "entry" or vector:
            return Term((f"{alpha} ⊙ {state}",))
        key, value = f"Diag({alpha})", f"Diag({alpha.replace('α', 'β')})"
        if self.per == "key":
            return Term((state, key))
        return Term((key, state)) if self.per == "value" else Term((value, state, key))

    def notes(self) -> tuple[str, ...]:
        if not self.factored:
            return ()
        per = "δ_t per value channel, a per entry" if self.per == "entry" else "a per channel"
        return (f"α_t = exp(−δ_t ⊙ a): {per}",)

    def gates(self) -> tuple[Gate, ...]:
        own = super().gates()
        if self.factored:
            span = Range(high=0.0)
            axes = ("V",) if self.per == "entry" else _AXES[self.per]
            return (Gate(name="log_decay", owner=self.title, axes=axes, range=span, init=_SLOW),)
        if self.per != "key_value" or not own:
            return own
        (g,) = own
        value = Gate(name="log_decay_value", owner=g.owner, axes=("V",), range=g.range, init=g.init)
        return (g, value)

    def params(self) -> tuple[Param, ...]:
        own = super().params()
        if self.factored:
            span = Range(low=0.0)
            axes = _AXES[self.per]
            return (Param(name=_SCALE, owner=self.title, axes=axes, range=span, init=1.0),)
        if self.per != "key_value" or not own:
            return own
        (p,) = own
        value = Param(name="decay_value", owner=p.owner, axes=("V",), range=p.range, init=p.init)
        return (p, value)

    def logs(self) -> frozenset[str]:
        own = super().logs()
        return own | {"decay_value"} if own and self.per == "key_value" else own

    def static_quantities(self) -> frozenset[str]:
        scale = frozenset({_SCALE}) if self.factored else frozenset[str]()
        return super().static_quantities() | self.logs() | scale

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        yield from decay_conflicts(self, recipe)


def decay_conflicts(decay: Decay, recipe: RecipeLike) -> Iterator[str]:
    """Reasons why a decay of this shape cannot stand in the recipe."""
    if decay.when == "before":
        if recipe.algorithm.batch != 1:
            yield (
                "retention.Decay(when='before') measures the error at α_t W_{t−1}, which changes "
                f"inside an inner batch: set batch=1 in {recipe.algorithm.title}, or when='after'"
            )
        if recipe.context.horizon not in (1, None) and not recipe.memory.linear:
            yield (
                "retention.Decay(when='before') with a window needs a linear memory, and "
                f"{recipe.memory.title} is deep: use when='after' or context.Online()"
            )
    if decay.per != "head" and not recipe.memory.channelled:
        yield (
            f"retention.Decay(per={decay.per!r}) acts on channels of linear maps, which "
            f"{recipe.memory.title} does not have: use per='head'"
        )
    if decay.per in ("key_value", "entry") and recipe.memory.diagonal:
        yield (
            f"retention.Decay(per={decay.per!r}) needs a matrix, and {recipe.memory.title} has one "
            "weight per channel: use per='key'"
        )
    if decay.per == "entry" and not recipe.memory.linear:
        yield (
            f"retention.Decay(per='entry') needs memory.Matrix, and {recipe.memory.title} has "
            "several maps: use per='head', 'key', 'value' or 'key_value'"
        )
    if decay.per == "entry" and decay.factored:
        algorithm, retention = recipe.algorithm, recipe.retention
        linear = algorithm.momentum_of is not None and algorithm.batch == 1
        if not linear or recipe.bias.affine is None or retention is not decay:
            yield (
                "retention.Decay(per='entry', rate='factored') keeps its factors apart, which a "
                "linear recursion token by token can: use rate='token', or bias.DotProduct() or "
                "L2() with algorithm.GradientDescent(batch=1) and no link"
            )
