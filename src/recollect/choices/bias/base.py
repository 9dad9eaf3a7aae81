"""Base class of attentional biases: the loss of one association, and its error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.equation_terms import Term, Terms, render_sum
from recollect.choices.features.base import Kernel
from recollect.choices.member import Member, member
from recollect.choices.overrides import check_override
from recollect.fields import Gate, Param, integer, option, quantity, slot
from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Bias", "Probe"]


Values = Mapping[str, Tensor]

_PARAMETERS = "prediction, value, gates"


@member
class Probe(Member):
    """Separate erasure and write: A ← αA − (A w) bᵀ + η v kᵀ, with an erase key w.

    Under `recollect.algorithm.Momentum`, both are parts of S, or the write alone.

    Its gates belong to the association. Each of several associations per token has its own gates.

    Args:
        at: ``"key"``: w = φ(k). ``"token"``: w comes from the gate ``"probe" [B, T, H, K]``.
        write: key of the erasure: b = rate · φ(k) (``"key"``), or rate ⊙ φ(w) (``"probe"``, as in
            RWKV-7).
        rate: the gate ``"erase"``, a constant or a param; ``per="key"`` gives it one value per
            feature channel.
        kernel: κ₁, the similarity at which a memory with kernel features is probed; by default
            the kernel of the features (AM 41).
        heads: J probe keys per token. Their similarities are mixed with learned weights a_j, the
            param ``"mix" [H, J]`` (AM 111); the gate ``"probe"`` is ``[B, T, H, J, K]``.
        normalize: scale of the erased value of a memory with kernel features. ``"none"``: Σ κ₁ u.
            ``"sum"``: a softmax over the past, Σ κ₁ u / Σ κ₁, for each of the J keys, 0 without a
            past (AM 94). ``"rms"``: divided by its root mean square (AM after 95).

    Examples:
        >>> recipe = rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe()))
        >>> [(gate.name, gate.axes) for gate in recipe.gates()]
        [('probe', ('K',)), ('erase', ()), ('lr', ())]
        >>> simple = recipe.replace(algorithm=rc.algorithm.GradientDescent(lr=1.0))
        >>> print(*rc.explain(simple).write_equations)
        W_t = W_(t−1) − a_t (W_(t−1) w_t) k_tᵀ + v_t k_tᵀ
    """

    choice = "probe"

    at: str = option("token", "key")
    write: str = option("key", "probe")
    rate: float | str = quantity(
        "input",
        name="erase",
        role="rate",
        letter="a",
        at_least=0,
        init=0.5,
        per_association=True,
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
        gate = Gate(name="probe", owner=self.title, axes=axes, per_association=True, role="key")
        return (*((gate,) if self.at == "token" else ()), *super().gates())

    def params(self) -> tuple[Param, ...]:
        mix = Param(name="mix", owner=self.title, axes=("J",), init=1 / self.heads)
        return (*((mix,) if self.heads > 1 else ()), *super().params())

    def notes(self) -> tuple[str, ...]:
        notes = ("w_t: the token's own erase key",) if self.at == "token" else ()
        if not self._weighs_keys:
            return notes
        mixed = "Σ_j a_j " if self.heads > 1 else ""
        w = "w_tj" if self.heads > 1 else ("w_t" if self.at == "token" else "k_t")
        scale = {
            "none": "",
            "sum": f", each divided by Σ_i κ₁(k_i, {w})",
            "rms": ", divided by its root mean square",
        }[self.normalize]
        kernel = "" if self.kernel is None else f", κ₁(k, w) = {self.kernel.similarity('k', 'w')}"
        return (*notes, f"erased is {mixed}Σ_i κ₁(k_i, {w}) u_i{scale}{kernel}")

    @property
    def _weighs_keys(self) -> bool:
        """Whether a field is set that only memories with kernel features support."""
        return self.kernel is not None or self.heads > 1 or self.normalize != "none"

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if not recipe.memory.linear:
            yield (
                f"bias.Probe erases the prediction of a linear memory at another key, and "
                f"{recipe.memory.title} is not linear in its weights: use memory.Matrix"
            )
        if not recipe.context.is_online:
            yield f"bias.Probe needs context.Online(), not {recipe.context.title}"
        yield from self._kernel_conflicts(recipe)
        algorithm = recipe.algorithm
        if (
            algorithm.recursion is None
            or algorithm.batch_size != 1
            or algorithm.rate_depends_on_key
        ):
            yield (
                "bias.Probe needs algorithm.GradientDescent() or Momentum() token by token "
                f"(batch_size=1), not {recipe.algorithm.title}"
            )
        if algorithm.slots and not recipe.features.finite:
            yield (
                f"bias.Probe with {recipe.features.title} needs algorithm.GradientDescent(), not "
                f"{algorithm.title}"
            )

    def _kernel_conflicts(self, recipe: Recipe) -> Iterator[str]:
        features = recipe.features
        if features.finite:
            if self._weighs_keys:
                yield (
                    "bias.Probe(kernel=, heads=, normalize=) needs a kernel, and "
                    f"{features.title} is a finite map: use features.Exponential()"
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
                "bias.Probe(normalize='sum') divides by similarities that must be positive, and "
                f"those of {kernel.title} are not: use normalize='none' or 'rms'"
            )


class Bias(Member):
    """ℓ(M(W; k), v), the loss of one association.

    Attributes:
        affine: ``(a, b)`` if the error is a·prediction − b·value, else ``None``. The linear engine
            requires it; `recollect.testing.check_member` compares it with the gradient.
        probe: keys at which the erasure is measured and written, if not the association's key.

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
        """Return ℓ ``[...]`` of ``prediction`` and ``value`` ``[..., V]``.

        Args:
            prediction: M(W; φ(k)), ``[..., V]``.
            value: v, ``[..., V]``.
            gates: this bias's quantities by name, each broadcastable to ``[..., V]``.

        Raises:
            RecipeError: the bias defines only its `error`.
        """
        raise RecipeError(f"{self.title} defines no loss")

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        """Return ∂ℓ/∂prediction ``[..., V]``; by autograd from `loss` unless overridden.

        Args:
            prediction: M(W; φ(k)), ``[..., V]``.
            value: v, ``[..., V]``.
            gates: this bias's quantities by name, each broadcastable to ``[..., V]``.
        """
        with torch.enable_grad():
            point = prediction if prediction.requires_grad else prediction.detach()
            point = point.requires_grad_() if not point.requires_grad else point
            total = self.loss(point, value, gates).sum()
            (gradient,) = torch.autograd.grad(total, point, create_graph=True)
        return gradient if torch.is_grad_enabled() else gradient.detach()

    @property
    def optimum(self) -> float:
        """Prediction of zero error in units of the value, b/a; b if the error is −b·value."""
        if self.affine is None:
            raise RecipeError(f"{self.title} has no error affine in the prediction")
        a, b = self.affine
        return b / a if a != 0 else b

    @property
    def target(self) -> float | None:
        """c with ⟨prediction − c·value, error⟩ ≥ 0 everywhere: the loss has its minimum at c·value.

        ``None`` if the bias declares no c. It is b/a of an affine error with a > 0; any other bias
        must declare it. Normalised steps require it.
        """
        return self.optimum if self.is_quadratic else None

    @property
    def is_affine(self) -> bool:
        """Whether the error is affine in the prediction."""
        return self.affine is not None

    @property
    def is_quadratic(self) -> bool:
        """Whether the loss is a squared distance, up to scale: its error is affine with a > 0."""
        return self.affine is not None and self.affine[0] > 0

    @property
    def sees_prediction(self) -> bool:
        """Whether the error depends on the prediction; otherwise it is −b·value."""
        return self.affine is None or self.affine[0] != 0

    @property
    def defines_loss(self) -> bool:
        """Whether the inner gradient is that of `loss`; otherwise `error` is the definition."""
        return type(self).loss is not Bias.loss

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        one = "one number per association [...], so sum over the last axis only, .sum(-1)"
        check_override(cls, "loss", _PARAMETERS, one, lambda p, value, gates: p.shape[:-1])
        each = "one slope per value channel [..., V], without a sum or mean"
        check_override(cls, "error", _PARAMETERS, each, lambda p, value, gates: p.shape)

    def validate(self) -> None:
        if type(self).loss is Bias.loss and type(self).error is Bias.error:
            raise RecipeError(f"{self.title} must override loss or error")

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        nested = {name for part in self.parts() for name in part.quantity_axes}
        for name, axes in self.quantity_axes.items():
            if name not in nested and axes not in ((), ("V",)):
                yield (
                    f"{self.title} declares the quantity {name!r} with axes {axes}: a loss takes "
                    "one per association, or per value channel with axes=('V',)"
                )
        params = {param.name for param in self.params()} - self.learned_quantities()
        for name in sorted(params - {p.name for part in self.parts() for p in part.params()}):
            yield (
                f"{self.title} requires the param {name!r}, and a loss takes quantities only: "
                "declare it with rc.quantity"
            )

    @property
    def name(self) -> str:
        """Name of the loss in an equation."""
        return type(self).__name__.lower()

    def term(self, prediction: str, value: str) -> Terms:
        """Return the loss of one association as signed terms.

        An affine error determines the loss up to a constant: (a/2)‖p − (b/a)v‖², or −b⟨p, v⟩ if
        a = 0.

        Args:
            prediction: text of M(W; φ(k)), e.g. ``"W k_t"``.
            value: text of v, e.g. ``"v_t"``.
        """
        if self.affine is None:
            return (Term((f"{self.name}({prediction}, {value})",)),)
        a, b = self.affine
        if a == 0:
            return (Term((f"⟨{prediction}, {value}⟩",), -b),)
        difference = render_sum((Term((prediction,)), Term((value,), -b / a)))
        return (Term((f"½‖{difference}‖²",), a),)

    def error_terms(self, prediction: str, value: str) -> Terms:
        """Return ∂ℓ/∂prediction as signed terms, that of the prediction first.

        Args:
            prediction: text of M(W; φ(k)), e.g. ``"W k_t"``.
            value: text of v, e.g. ``"v_t"``.
        """
        if self.affine is None:
            return (Term((f"{self.name}′({prediction}, {value})",)),)
        a, b = self.affine
        return (Term((prediction,), a), Term((value,), -b))
