"""Attentional bias: what counts as an error on one association.

A bias states a ``loss`` of the prediction, or its gradient ``error``, or both; autograd supplies
what is not stated. Its gates travel with the association, and arrive with a trailing axis (1, or V
per channel) so that they broadcast against ``[..., V]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.equation_terms import Term, Terms, figure, power, written
from recollect.choices.features.finite import Kernel
from recollect.choices.member import (
    Gate,
    Member,
    Param,
    RecipeError,
    integer,
    member,
    number,
    option,
    quantity,
    slot,
)

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["L2", "Bias", "DotProduct", "Huber", "Lp", "Probe", "ValueRobust"]

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

    def requires(self, recipe: Recipe) -> Iterator[str]:
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

    def _kernel_rules(self, recipe: Recipe) -> Iterator[str]:
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
    """

    choice = "bias"

    affine: tuple[float, float] | None = None
    probe: Probe | None = None

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        """ℓ ``[...]`` of ``prediction`` and ``value`` ``[..., V]``."""
        raise RecipeError(f"{self.title} states no loss")

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        """∂ℓ/∂prediction ``[..., V]``; by autograd from `loss` unless overridden."""
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
    def states_loss(self) -> bool:
        """Whether the inner gradient is that of `loss`; otherwise `error` *is* the definition."""
        return type(self).loss is not Bias.loss

    @property
    def separable(self) -> bool:
        """Whether each value channel's error depends on that channel alone (affine ones do)."""
        return self.affine is not None

    def validate(self) -> None:
        if type(self).loss is Bias.loss and type(self).error is Bias.error:
            raise RecipeError(f"{self.title} must override loss or error")

    def requires(self, recipe: Recipe) -> Iterator[str]:
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
        """
        if self.affine is None:
            return (Term((f"{self.name}({prediction}, {value})",)),)
        a, b = self.affine
        if a == 0:
            return (Term((f"⟨{prediction}, {value}⟩",), -b),)
        difference = written((Term((prediction,)), Term((value,), -b / a)))
        return (Term((f"½‖{difference}‖²",), a),)

    def error_terms(self, prediction: str, value: str) -> Terms:
        """∂ℓ/∂prediction as signed terms; the one with the prediction comes first."""
        if self.affine is None:
            return (Term((f"{self.name}′({prediction}, {value})",)),)
        a, b = self.affine
        return (Term((prediction,), a), Term((value,), -b))


@member
class DotProduct(Bias):
    """ℓ = −⟨M(k), v⟩ (TTR 24; ATLAS's sign corrected)."""

    affine = (0.0, 1.0)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return -(prediction * value).sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return -value


@member
class L2(Bias):
    """ℓ = ½‖M(k) − v‖²; its error is e = M(k) − v, so the delta rule's β is exactly η."""

    affine = (1.0, 1.0)
    probe: Probe | None = slot(None, "probe", optional=True)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return 0.5 * (prediction - value).square().sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return prediction - value


def _safe_power(x: Tensor, exponent: float) -> Tensor:
    """x^exponent for x ≥ 0, with value and gradient 0 at 0 when exponent > 0."""
    zero = x == 0
    return torch.where(zero, torch.zeros_like(x), torch.where(zero, 1.0, x).pow(exponent))


@member
class Lp(Bias):
    """ℓ = ‖M(k) − v‖_p^p, smoothed: Σ (e² + ε)^{p/2} (MIRAS 11).

    Its error p·e·(e² + ε)^{(p−2)/2} is a true gradient, and exact at p = 2.

    Args:
        p: ≥ 1; p = 1 is the value-less memory.
        eps: ε ≥ 0; 0 is exact.
        smooth: ``"root"`` as above, or ``"tanh"``: p·tanh(e/√ε)·(e² + ε)^{(p−1)/2}, the papers'
            practice (MIRAS after 29), which is the gradient of no loss.
    """

    shown = ("p",)

    p: float = number(3.0, at_least=1)
    eps: float = number(1e-6, at_least=0)
    smooth: str = option("root", "tanh")

    def validate(self) -> None:
        super().validate()
        if self.smooth == "tanh" and self.eps == 0:
            raise RecipeError("bias.Lp(smooth='tanh') needs eps > 0: its slope is 1/sqrt(eps)")

    @property
    def states_loss(self) -> bool:
        return self.smooth == "root"

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        squared = (prediction - value).square() + self.eps
        if self.eps == 0:
            return _safe_power((prediction - value).abs(), self.p).sum(-1)
        return squared.pow(self.p / 2).sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e = prediction - value
        if self.smooth == "tanh":
            root = (e.square() + self.eps).sqrt()
            return self.p * torch.tanh(e / self.eps**0.5) * root.pow(self.p - 1)
        if self.eps == 0:
            return self.p * e.sign() * _safe_power(e.abs(), self.p - 1)
        return self.p * e * (e.square() + self.eps).pow((self.p - 2) / 2)

    @property
    def separable(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return f"ℓ_{figure(self.p)}"

    def term(self, prediction: str, value: str) -> Terms:
        norm = f"‖{prediction} − {value}‖_{figure(self.p)}"
        return (Term((norm + (f"^{figure(self.p)}" if self.p != 1 else ""),)),)

    def notes(self) -> tuple[str, ...]:
        p, eps = self.p, self.eps
        if self.smooth == "tanh":
            root = f"(e² + {figure(eps)})^{figure((p - 1) / 2)}" if p != 1 else ""
            slope = Term((f"tanh(e/{figure(eps**0.5)})", *((root,) if root else ())), p)
        elif eps == 0:
            slope = Term(("sign(e)" if p == 1 else f"sign(e)|e|{power(p - 1)}",), p)
        else:
            slope = Term(("e" if p == 2 else f"e (e² + {figure(eps)})^{figure((p - 2) / 2)}",), p)
        return (f"ℓ_{figure(p)}′ = {slope} of e = prediction − value, entry by entry",)


def _norm(e: Tensor) -> Tensor:
    """‖e‖₂ over the last axis, kept, with gradient 0 at e = 0."""
    squared = e.square().sum(-1, keepdim=True)
    zero = squared == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squared).sqrt())


@member
class Huber(Bias):
    """ℓ₂ near, ℓ₁ far: robust to extreme tokens (MIRAS 13–16).

    Args:
        form: ``"coordinate"``: Σ_j H(e_j), H = ½e² for |e| ≤ δ, else δ(|e| − δ/2) (13).
            ``"norm"``: H(‖e‖₂) (15). ``"switch"``: ½‖e‖² while ‖e‖₂ ≤ δ, else δ‖e‖₁ (16, YAAD); its
            error is e inside and δ·sign(e) outside.
        threshold: δ > 0: the gate ``"threshold"``, a constant, or a param.
        per: ``"head"``, or ``"value"`` for one δ per channel (coordinate form only).
    """

    form: str = option("switch", "coordinate", "norm")
    threshold: float | str = quantity(
        "token", above=0, init=1.0, axes=lambda b: ("V",) * (b.per == "value"), letter="δ"
    )
    per: str = option("head", "value")

    def validate(self) -> None:
        super().validate()
        if self.per == "value" and self.form != "coordinate":
            raise RecipeError(
                f"bias.Huber(form={self.form!r}) compares one δ with the whole error: use "
                "per='head', or form='coordinate' for one δ per channel"
            )

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e, delta = prediction - value, gates["threshold"]
        if self.form == "coordinate":
            far = delta * (e.abs() - 0.5 * delta)
            return torch.where(e.abs() <= delta, 0.5 * e.square(), far).sum(-1)
        size = _norm(e)
        near = 0.5 * e.square().sum(-1, keepdim=True)
        if self.form == "norm":
            far = delta * (size - 0.5 * delta)
        else:
            far = delta * e.abs().sum(-1, keepdim=True)
        return torch.where(size <= delta, near, far).squeeze(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e, delta = prediction - value, gates["threshold"]
        if self.form == "coordinate":
            return e.clamp(-delta, delta)
        size = _norm(e)
        if self.form == "norm":
            return torch.where(size <= delta, e, delta * e / torch.where(size == 0, 1.0, size))
        return torch.where(size <= delta, e, delta * e.sign())

    @property
    def name(self) -> str:
        return "huber"

    def term(self, prediction: str, value: str) -> Terms:
        delta = "δ" if isinstance(self.threshold, str) else figure(self.threshold)
        return (Term((f"huber_{delta}({prediction} − {value})",)),)

    def notes(self) -> tuple[str, ...]:
        d = figure(self.symbol("threshold", "i"))
        forms = {
            "coordinate": f"Σ_j ½e_j² where |e_j| ≤ {d}, else {d}(|e_j| − {d}/2)",
            "norm": f"½‖e‖² while ‖e‖ ≤ {d}, else {d}(‖e‖ − {d}/2)",
            "switch": f"½‖e‖² while ‖e‖ ≤ {d}, else {d}‖e‖₁",
        }
        return (f"huber(e) = {forms[self.form]}",)


@member
class ValueRobust(Bias):
    """ℓ = ½‖e‖² + Δ‖e‖₂: the worst case over values moved by at most Δ (MIRAS 17).

    The constant ½Δ² is dropped. Its error is e + Δ e/‖e‖ (0 at e = 0).

    Args:
        radius: Δ ≥ 0: a constant, the gate ``"value_radius"``, or a param.
    """

    radius: float | str = quantity("token", name="value_radius", letter="Δ", at_least=0, init=0.1)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e = prediction - value
        size = _norm(e)
        return (0.5 * e.square().sum(-1, keepdim=True) + gates["value_radius"] * size).squeeze(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e = prediction - value
        size = _norm(e)
        return e + gates["value_radius"] * e / torch.where(size == 0, 1.0, size)

    def term(self, prediction: str, value: str) -> Terms:
        e = f"‖{prediction} − {value}‖"
        radius = "Δ" if isinstance(self.radius, str) else self.radius
        return (Term((f"½{e}²",)), Term((e,)).times(radius))

    @property
    def name(self) -> str:
        return "robust"

    def notes(self) -> tuple[str, ...]:
        size = Term(("e/‖e‖",)).times(self.symbol("radius", "i"))
        return (f"robust′ = {written((Term(('e',)), size))} of e = prediction − value",)
