"""Base class of attentional biases: the loss of one association, and its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.bias.per_association import check_returns
from recollect.choices.equation_terms import Term, Terms, render_sum
from recollect.choices.features.base import Kernel
from recollect.choices.fields import Gate, Param, integer, option, quantity, slot
from recollect.choices.member import Member, RecipeError, member

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["Bias", "Probe"]


Values = Mapping[str, Tensor]


@member
class Probe(Member):
    """Erase and write apart: A ← αA − (A w) bᵀ + η v kᵀ, with w a key of its own.

    Its gates belong to the association: with several per token, each erases by its own.

    Args:
        at: ``"key"``: w = φ(k). ``"token"``: w comes from the gate ``"probe" [B, T, H, K]``.
        write: where the erasure is written: b = rate · φ(k) (``"key"``), or rate ⊙ φ(w)
            (``"probe"``, as in RWKV-7).
        rate: the gate ``"erase"``, a constant or a param; ``per="key"`` gives it one value per
            feature channel.
        kernel: κ₁, the likeness by which a memory of a kernel's features is probed; the features'
            own when omitted (AM 41).
        heads: J probe keys per token, whose likenesses are mixed with learned weights a_j, the
            param ``"mix" [H, J]`` (AM 111); the gate ``"probe"`` is ``[B, T, H, J, K]``.
        normalize: how what a kernel's memory is found to hold is scaled. ``"none"``: Σ κ₁ u.
            ``"sum"``: a softmax over the past, Σ κ₁ u / Σ κ₁, for each of the J keys, 0 where there
            is no past (AM 94). ``"rms"``: divided by its root mean square (AM after 95).

    Examples:
        >>> recipe = rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe()))
        >>> [(gate.name, gate.axes) for gate in recipe.gates()]
        [('probe', ('K',)), ('erase', ()), ('lr', ())]
        >>> print(*rc.explain(recipe.but(algorithm=rc.algorithm.GradientDescent(lr=1.0))).write)
        W_t = W_(t−1) − a_t (W_(t−1) w_t) k_tᵀ + v_t k_tᵀ
    """

    choice = "probe"

    at: str = option("token", "key")
    write: str = option("key", "probe")
    rate: float | str = quantity(
        "token",
        name="erase",
        letter="a",
        at_least=0,
        init=0.5,
        travels=True,
        axes=lambda p: ("F",) * (p.per == "key"),
    )
    per: str = option("head", "key")
    kernel: Kernel | None = slot(None, "features", optional=True)
    heads: int = integer(1, at_least=1)
    normalize: str = option("none", "sum", "rms")

    def validate(self) -> None:
        if self.heads > 1 and self.at == "key":
            raise RecipeError(
                f"bias.Probe(heads={self.heads}) mixes several keys of the token, and at='key' has "
                "only one: use at='token'"
            )

    def gates(self) -> tuple[Gate, ...]:
        axes = ("J", "K") if self.heads > 1 else ("K",)
        own = Gate(name="probe", owner=self.title, axes=axes, travels=True)
        return (*((own,) if self.at == "token" else ()), *super().gates())

    def params(self) -> tuple[Param, ...]:
        own = Param(name="mix", owner=self.title, axes=("J",), init=1 / self.heads)
        return (*((own,) if self.heads > 1 else ()), *super().params())

    def notes(self) -> tuple[str, ...]:
        found = ("w_t: the token's own key of what is erased",) if self.at == "token" else ()
        mixed = "Σ_j a_j " if self.heads > 1 else ""
        w = "w_tj" if self.heads > 1 else ("w_t" if self.at == "token" else "k_t")
        total = f"{mixed}Σ_i κ₁(k_i, {w}) u_i"
        scale = {
            "none": "",
            "sum": f", each divided by Σ_i κ₁(k_i, {w})",
            "rms": ", divided by its root mean square",
        }[self.normalize]
        kernel = "" if self.kernel is None else f", κ₁(k, w) = {self.kernel.similarity('k', 'w')}"
        own = self.kernel is not None or self.heads > 1 or self.normalize != "none"
        return (*found, *((f"erased is {total}{scale}{kernel}",) if own else ()))

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        if not recipe.memory.linear:
            yield (
                f"bias.Probe erases what a linear memory predicts at another key, and "
                f"{recipe.memory.title} is not linear in its weights: use memory.Matrix"
            )
        if recipe.context.horizon != 1 or recipe.context.gates():
            yield f"bias.Probe needs context.Online(), not {recipe.context.title}"
        yield from self._kernel_rules(recipe)
        algorithm = recipe.algorithm
        if algorithm.slots or not algorithm.linear or algorithm.batch != 1 or algorithm.keyed:
            yield (
                "bias.Probe needs algorithm.GradientDescent() token by token (batch=1), not "
                f"{recipe.algorithm.title}"
            )

    def _kernel_rules(self, recipe: RecipeLike) -> Iterator[str]:
        features = recipe.features
        if features.finite:
            if self.kernel is not None or self.heads > 1 or self.normalize != "none":
                yield (
                    "bias.Probe(kernel=, heads=, normalize=) weighs the keys of a kernel's memory, "
                    f"and {features.title} keeps none: use features.Exponential() or another kernel"
                )
            return
        if self.write != "key" or self.per != "head":
            yield (
                f"{features.title} has infinitely many features: use bias.Probe(write='key', "
                "per='head')"
            )
        kernel = features if self.kernel is None else self.kernel
        if kernel.finite:
            yield (
                f"bias.Probe(kernel={kernel.brief}) must be a kernel such as "
                "features.Exponential(), not a finite map"
            )
        elif self.normalize == "sum" and not kernel.positive:
            yield (
                "bias.Probe(normalize='sum') divides by likenesses that must be positive, and "
                f"those of {kernel.title} are not: use normalize='none' or 'rms'"
            )


class Bias(Member):
    """ℓ(M(W; k), v), the loss of one association.

    Attributes:
        affine: ``(a, b)`` when the error is a·prediction − b·value, else ``None``. Declaring it
            opens the linear engine; the contract suite checks it against the gradient.
        probe: where the erasure is measured and written, if not at the key.

    Examples:
        >>> @rc.member
        ... class Squared(rc.bias.Bias):  # ℓ = ‖M(k) − v‖², twice L2
        ...     affine = (2.0, 2.0)
        ...
        ...     def loss(self, prediction, value, gates):
        ...         return (prediction - value).square().sum(-1)
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, _ = rc.recall(
        ...     rc.Recipe(bias=Squared(), algorithm=rc.algorithm.GradientDescent(lr=0.1)), q, k, v
        ... )
        >>> same, _ = rc.recall(rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.2)), q, k, v)
        >>> torch.allclose(y, same, atol=1e-5)
        True
    """

    choice = "bias"

    affine: tuple[float, float] | None = None
    probe: Probe | None = None

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        """ℓ ``[...]`` of ``prediction`` and ``value`` ``[..., V]``.

        Args:
            prediction: M(W; φ(k)), ``[..., V]``.
            value: v, ``[..., V]``.
            gates: this bias's own numbers by name, each broadcastable to ``[..., V]``.

        Raises:
            RecipeError: a bias that states only its `error`.
        """
        raise RecipeError(f"{self.title} states no loss")

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        """∂ℓ/∂prediction ``[..., V]``; by autograd from `loss` unless overridden.

        Args:
            prediction: M(W; φ(k)), ``[..., V]``.
            value: v, ``[..., V]``.
            gates: this bias's own numbers by name, each broadcastable to ``[..., V]``.
        """
        with torch.enable_grad():
            point = prediction if prediction.requires_grad else prediction.detach()
            point = point.requires_grad_() if not point.requires_grad else point
            total = self.loss(point, value, gates).sum()
            (gradient,) = torch.autograd.grad(total, point, create_graph=True)
        return gradient if torch.is_grad_enabled() else gradient.detach()

    @property
    def optimum(self) -> float:
        """The least error's prediction in units of the value, b/a; b where errors see none."""
        if self.affine is None:
            raise RecipeError(f"{self.title} has no error affine in the prediction")
        a, b = self.affine
        return b / a if a != 0 else b

    @property
    def target(self) -> float | None:
        """c with ⟨prediction − c·value, error⟩ ≥ 0 everywhere: the loss is least at c·value.

        ``None`` where no such c is known: an affine error has b/a for a > 0, any other must say it.
        `Algorithm.normalizes` asks for it.
        """
        if self.affine is None or self.affine[0] <= 0:
            return None
        return self.affine[1] / self.affine[0]

    @property
    def states_loss(self) -> bool:
        """Whether the inner gradient is that of `loss`; otherwise `error` *is* the definition."""
        return type(self).loss is not Bias.loss

    @property
    def separable(self) -> bool:
        """Whether each value channel's error depends on that channel alone (affine ones do)."""
        return self.affine is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = (("loss", type(self).loss, Bias.loss), ("error", type(self).error, Bias.error))
        wrong = check_returns(self, tuple(name for name, stated, base in own if stated is not base))
        if wrong is not None:
            raise RecipeError(wrong)

    def validate(self) -> None:
        if type(self).loss is Bias.loss and type(self).error is Bias.error:
            raise RecipeError(f"{self.title} must override loss or error")

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        inside = {name for part in self.parts() for name in part.numbers}
        for name, axes in self.numbers.items():
            if name not in inside and axes not in ((), ("V",)):
                yield (
                    f"{self.title} declares the number {name!r} with axes {axes}: a loss is handed "
                    "one per association, or per value channel with axes=('V',)"
                )
        own = {param.name for param in self.params()} - self.static_quantities()
        for name in sorted(own - {p.name for part in self.parts() for p in part.params()}):
            yield (
                f"{self.title} asks for the param {name!r}, and a loss is handed quantities only: "
                "declare it with rc.quantity"
            )

    @property
    def name(self) -> str:
        """The loss in an equation; the class's name unless overridden."""
        return type(self).__name__.lower()

    def term(self, prediction: str, value: str) -> Terms:
        """The loss of one association as signed terms.

        A loss whose error is a·prediction − b·value is known up to a constant: (a/2)‖p − (b/a)v‖²,
        or −b⟨p, v⟩ when a = 0.

        Args:
            prediction: how M(W; φ(k)) is written, e.g. ``"W k_t"``.
            value: how v is written, e.g. ``"v_t"``.
        """
        if self.affine is None:
            return (Term((f"{self.name}({prediction}, {value})",)),)
        a, b = self.affine
        if a == 0:
            return (Term((f"⟨{prediction}, {value}⟩",), -b),)
        difference = render_sum((Term((prediction,)), Term((value,), -b / a)))
        return (Term((f"½‖{difference}‖²",), a),)

    def error_terms(self, prediction: str, value: str) -> Terms:
        """∂ℓ/∂prediction as signed terms; the one with the prediction comes first.

        Args:
            prediction: how M(W; φ(k)) is written, e.g. ``"W k_t"``.
            value: how v is written, e.g. ``"v_t"``.
        """
        if self.affine is None:
            return (Term((f"{self.name}′({prediction}, {value})",)),)
        a, b = self.affine
        return (Term((prediction,), a), Term((value,), -b))
