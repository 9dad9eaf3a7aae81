"""Losses of one association: dot product, L2, Lp, Huber and value-robust."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias, Probe, Values
from recollect.choices.equation_terms import Term, Terms, format_number, power, render_sum
from recollect.choices.member import member
from recollect.fields import number, option, quantity, slot
from recollect.messages import RecipeError
from recollect.numerics import safe_divide, safe_pow, safe_sqrt

__all__ = ["L2", "DotProduct", "Huber", "Lp", "ValueRobust"]


@member
class DotProduct(Bias):
    """ℓ = −⟨M(k), v⟩ (TTR 24; ATLAS's sign corrected).

    Examples:
        >>> p, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])  # M(k) and v
        >>> rc.bias.DotProduct().loss(p, v, {}), rc.bias.DotProduct().error(p, v, {})
        (tensor(-7.), tensor([-1., -3.]))
    """

    affine = (0.0, 1.0)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return -(prediction * value).sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return -value


@member
class L2(Bias):
    """ℓ = ½‖M(k) − v‖²; its error is e = M(k) − v, so the delta rule's β is exactly η.

    Examples:
        >>> p, v = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0])  # M(k) and v
        >>> rc.bias.L2().loss(p, v, {}), rc.bias.L2().error(p, v, {})
        (tensor(1.), tensor([ 1., -1.]))
    """

    affine = (1.0, 1.0)
    probe: Probe | None = slot(None, "probe", optional=True)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return 0.5 * (prediction - value).square().sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return prediction - value


class _MinimumAtValue(Bias):
    """Loss with its minimum at the value."""

    target = 1.0  # type: ignore[assignment]


@member
class Lp(_MinimumAtValue):
    """ℓ = ‖M(k) − v‖_p^p, smoothed: Σ (e² + ε)^{p/2} (MIRAS 11).

    Its error p·e·(e² + ε)^{(p−2)/2} is a true gradient, and exact at p = 2.

    Args:
        p: ≥ 1; p = 1 is the value-less memory.
        eps: ε ≥ 0; 0 is exact.
        smooth: ``"root"`` as above, or ``"tanh"``: p·tanh(e/√ε)·(e² + ε)^{(p−1)/2}, the papers'
            practice (MIRAS after 29), which is not the gradient of a loss.

    Examples:
        >>> p, v = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])  # M(k) and v
        >>> bias = rc.bias.Lp(p=3, eps=0)
        >>> bias.loss(p, v, {}), bias.error(p, v, {})
        (tensor(9.), tensor([  3., -12.]))
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
    def defines_loss(self) -> bool:
        return self.smooth == "root"

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        squared = (prediction - value).square() + self.eps
        if self.eps == 0:
            return safe_pow((prediction - value).abs(), self.p).sum(-1)
        return squared.pow(self.p / 2).sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e = prediction - value
        if self.smooth == "tanh":
            root = (e.square() + self.eps).sqrt()
            return self.p * torch.tanh(e / self.eps**0.5) * root.pow(self.p - 1)
        if self.eps == 0:
            return self.p * e.sign() * safe_pow(e.abs(), self.p - 1)
        return self.p * e * (e.square() + self.eps).pow((self.p - 2) / 2)

    @property
    def name(self) -> str:
        return f"ℓ_{format_number(self.p)}"

    def term(self, prediction: str, value: str) -> Terms:
        norm = f"‖{prediction} − {value}‖_{format_number(self.p)}"
        return (Term((norm + (f"^{format_number(self.p)}" if self.p != 1 else ""),)),)

    def notes(self) -> tuple[str, ...]:
        p, eps = self.p, self.eps
        if self.smooth == "tanh":
            root = f"(e² + {format_number(eps)})^{format_number((p - 1) / 2)}" if p != 1 else ""
            slope = Term((f"tanh(e/{format_number(eps**0.5)})", *((root,) if root else ())), p)
        elif eps == 0:
            slope = Term(("sign(e)" if p == 1 else f"sign(e)|e|{power(p - 1)}",), p)
        else:
            slope = Term(
                ("e" if p == 2 else f"e (e² + {format_number(eps)})^{format_number((p - 2) / 2)}",),
                p,
            )
        return (f"ℓ_{format_number(p)}′ = {slope} of e = prediction − value, entry by entry",)


def _norm(e: Tensor) -> Tensor:
    """Return ‖e‖₂ over the last axis, which is kept, with gradient 0 at e = 0."""
    return safe_sqrt(e.square().sum(-1, keepdim=True))


@member
class Huber(_MinimumAtValue):
    """Squared error up to a threshold δ, absolute error beyond it (MIRAS 13–16).

    Args:
        form: ``"coordinate"``: Σ_j H(e_j), H = ½e² for |e| ≤ δ, else δ(|e| − δ/2) (13).
            ``"norm"``: H(‖e‖₂) (15). ``"switch"``: ½‖e‖² if ‖e‖₂ ≤ δ, else δ‖e‖₁ (16, YAAD); its
            error is e inside and δ·sign(e) outside.
        threshold: δ > 0: the gate ``"threshold"``, a constant, or a param.
        per: ``"head"``, or ``"value"`` for one δ per channel (coordinate form only).

    Examples:
        >>> p, v = torch.tensor([1.0, 5.0]), torch.tensor([0.5, 0.0])  # errors of 0.5 and 5
        >>> rc.bias.Huber(form="coordinate").error(p, v, {"threshold": torch.tensor(1.0)})
        tensor([0.5000, 1.0000])
        >>> [gate.name for gate in rc.bias.Huber().gates()]
        ['threshold']
    """

    form: str = option("switch", "coordinate", "norm")
    threshold: float | str = quantity(
        "input", above=0, init=1.0, axes=lambda b: ("V",) * (b.per == "value"), letter="δ"
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
            linear = delta * (e.abs() - 0.5 * delta)
            return torch.where(e.abs() <= delta, 0.5 * e.square(), linear).sum(-1)
        size = _norm(e)
        quadratic = 0.5 * e.square().sum(-1, keepdim=True)
        if self.form == "norm":
            linear = delta * (size - 0.5 * delta)
        else:
            linear = delta * e.abs().sum(-1, keepdim=True)
        return torch.where(size <= delta, quadratic, linear).squeeze(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e, delta = prediction - value, gates["threshold"]
        if self.form == "coordinate":
            return e.clamp(-delta, delta)
        size = _norm(e)
        if self.form == "norm":
            return torch.where(size <= delta, e, safe_divide(delta * e, size))
        return torch.where(size <= delta, e, delta * e.sign())

    def term(self, prediction: str, value: str) -> Terms:
        delta = "δ" if isinstance(self.threshold, str) else format_number(self.threshold)
        return (Term((f"huber_{delta}({prediction} − {value})",)),)

    def notes(self) -> tuple[str, ...]:
        d = format_number(self.symbol("threshold", "i"))
        forms = {
            "coordinate": f"Σ_j ½e_j² while |e_j| ≤ {d}, else {d}(|e_j| − {d}/2)",
            "norm": f"½‖e‖² while ‖e‖ ≤ {d}, else {d}(‖e‖ − {d}/2)",
            "switch": f"½‖e‖² while ‖e‖ ≤ {d}, else {d}‖e‖₁",
        }
        return (f"huber(e) = {forms[self.form]}",)


@member
class ValueRobust(_MinimumAtValue):
    """ℓ = ½‖e‖² + Δ‖e‖₂: the worst case over values moved by at most Δ (MIRAS 17).

    The constant ½Δ² is dropped. Its error is e + Δ e/‖e‖ (0 at e = 0).

    Args:
        radius: Δ ≥ 0: a constant, the gate ``"value_radius"``, or a param.

    Examples:
        >>> p, v = torch.tensor([3.0, 4.0]), torch.zeros(2)  # ‖e‖ = 5
        >>> rc.bias.ValueRobust().loss(p, v, {"value_radius": torch.tensor([0.1])})
        tensor(13.)
    """

    radius: float | str = quantity("input", name="value_radius", letter="Δ", at_least=0, init=0.1)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e = prediction - value
        size = _norm(e)
        return (0.5 * e.square().sum(-1, keepdim=True) + gates["value_radius"] * size).squeeze(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        e = prediction - value
        size = _norm(e)
        # At e = 0 the gradient of the norm is 0, and so is its derivative.
        return e + gates["value_radius"] * e / size.masked_fill(size == 0, torch.inf)

    name = "robust"  # type: ignore[assignment]

    def term(self, prediction: str, value: str) -> Terms:
        e = f"‖{prediction} − {value}‖"
        radius = "Δ" if isinstance(self.radius, str) else self.radius
        return (Term((f"½{e}²",)), Term((e,)).times(radius))

    def notes(self) -> tuple[str, ...]:
        size = Term(("e/‖e‖",)).times(self.symbol("radius", "i"))
        return (f"robust′ = {render_sum((Term(('e',)), size))} of e = prediction − value",)
