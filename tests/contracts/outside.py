"""Members of a user's package, with other field names, other shapes, and fewer numbers.

Every suite that draws from the registry draws these members, so an assumption that a member did not
declare fails. Each member differs from the library's in its field names, in the axes of a number,
or in the numbers that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import recollect as rc
from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.memory import LinearMap
from recollect.choices.memory.base import Apply, Forward
from recollect.choices.memory.norms import layer_norm
from recollect.fields import Param, flag, integer, number, slot

Values = Mapping[str, Tensor]


# -- algorithms --------------------------------------------------------------------------------


@rc.member
class ChannelRates(rc.algorithm.Algorithm):
    """Plain descent with a rate per value channel in a field ``speeds``."""

    batch_size: int = integer(1, at_least=1)
    speeds: float | str = rc.quantity(
        "input", name="lr", at_least=0, init=0.5, axes=("V",), role="rate"
    )


@rc.member
class FullPass(rc.algorithm.Algorithm):
    """Plain descent at rate 1 on all associations, without numbers."""

    full_batch = True


@rc.member
class LookAhead(rc.algorithm.Algorithm):
    """Nesterov's momentum: S = θS − ηg, A += θS − ηg, with its state in ``velocity``."""

    batch_size: int = integer(1, at_least=1)
    pace: float | str = rc.quantity("input", name="lr", at_least=0, init=0.3, role="rate")
    inertia: float | str = rc.quantity(
        0.5, name="momentum", at_least=0, below=1, init=0.5, role="momentum"
    )

    slots = ("velocity",)

    def update(self, slots: Values, step: rc.algorithm.Step) -> tuple[dict[str, Tensor], Tensor]:
        push = -step.lr * step.gradient
        S = step.momentum * slots["velocity"] + push
        return {"velocity": S}, step.momentum * S + push


# -- contexts ----------------------------------------------------------------------------------


@rc.member
class Fading(rc.context.Context):
    """All associations, weighed by γ^(t−i) w_i."""

    forgetting: float | str = rc.quantity(
        0.9, name="decay", above=0, at_most=1, init=0.95, log=True, role="decay"
    )
    trust: float | str = rc.quantity(
        1.0, name="weight", at_least=0, init=1.0, per_association=True, role="weight"
    )

    is_restriction = True

    @property
    def horizon(self) -> None:
        return None


@rc.member
class Everything(rc.context.Context):
    """All associations with equal weights, without numbers."""

    @property
    def horizon(self) -> None:
        return None


@rc.member
class Latest(rc.context.Context):
    """The last few associations with equal weights, in a field ``reach``."""

    reach: int = integer(2, at_least=1)

    @property
    def horizon(self) -> int:
        return self.reach


@rc.member
class Aging(rc.context.Context):
    """A restriction of another context: an association of age a has weight 1/(1 + a/τ)."""

    patience: float = number(2.0, above=0)

    is_restriction = True

    @property
    def horizon(self) -> None:
        return None

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        def log(queries: slice, keys: slice) -> Tensor:
            age = visible.query_position[:, queries, None] - visible.position[:, None, keys]
            age = age.clamp_min(0).to(visible.q.dtype)
            return -(age / self.patience).log1p()[:, None, None]  # [B, 1, 1, C, m]

        return ContextWeights(log=log)


# -- retention ---------------------------------------------------------------------------------


@rc.member
class Damped(rc.retention.Retention):
    """W = A/(1 + ‖A‖_F/c), with a decay in a field ``forget``."""

    ceiling: float | str = rc.quantity(2.0, above=0, init=2.0)
    forget: rc.retention.Decay | None = slot(None, "retention", optional=True)

    @property
    def decay(self) -> rc.retention.Decay | None:  # type: ignore[override]
        return self.forget

    def link(self, A: Tensor, gates: Values) -> Tensor:
        size = (A.square().sum((-2, -1), keepdim=True) + 1e-12).sqrt()
        return A / (1 + size / gates["ceiling"])


@rc.member
class Squeezed(rc.retention.Retention):
    """A_t = c tanh((A_(t−1) + step)/c) at every token."""

    limit: float | str = rc.quantity(1.5, above=0, init=1.5)

    def advance(self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values) -> Tensor:
        return gates["limit"] * torch.tanh((A + step) / gates["limit"])


# -- memories ----------------------------------------------------------------------------------


@rc.member
class Plane(rc.memory.Stack):
    """M(x) = W x as a `Stack` that is declared linear."""

    linear = True
    read: rc.memory.Read = slot(rc.memory.Read(), "read")

    @property
    def chain_activation(self) -> str:
        return "identity"

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return (
            LinearMap(name="P", out_features=V, in_features=F, reads_features=True, is_output=True),
        )

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
        return apply(0, x)


@rc.member
class Skipping(rc.memory.Stack):
    """M(x) = W1 tanh(W2 x), plus the raw key if ``skip``."""

    skip: bool = flag(False)

    @property
    def residual(self) -> bool:  # type: ignore[override]
        return self.skip

    @property
    def chain_activation(self) -> str:
        return "tanh"

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return (
            LinearMap(
                name="W2", out_features=3, in_features=F, reads_features=True, is_output=False
            ),
            LinearMap(
                name="W1", out_features=V, in_features=3, reads_features=False, is_output=True
            ),
        )

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
        h = apply(1, torch.tanh(apply(0, x)))
        return raw + h if self.skip else h


@rc.member
class Folded(rc.memory.Stack):
    """M(x) = s ⊙ tanh(W1 silu(W2 x)) with a param s: a chain with a bounded output."""

    bounded = True

    @property
    def chain_activation(self) -> str:
        return "silu"

    def params(self) -> tuple[Param, ...]:
        return (Param(name="most", owner=self.title, axes=("V",), init=1.0),)

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return (
            LinearMap(
                name="W2", out_features=5, in_features=F, reads_features=True, is_output=False
            ),
            LinearMap(
                name="W1", out_features=V, in_features=5, reads_features=False, is_output=True
            ),
        )

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
        return self.output_map(apply(1, torch.nn.functional.silu(apply(0, x))), raw, params)

    def output_map(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
        return params["most"].to(z.dtype)[:, None, :] * torch.tanh(z)

    def nearest_output(self, value: Tensor, raw: Tensor, params: Values) -> Tensor:
        maximum = params["most"].to(value.dtype)[:, None, :].abs()
        return torch.maximum(torch.minimum(value, maximum), -maximum)


@rc.member
class Spread(rc.memory.Stack):
    """M(x) = C(w ⊙ LN(W x) + b) with a param C: a norm, then a product over value channels."""

    mixes: bool = flag(True)

    @property
    def chain_activation(self) -> str:
        return "identity"

    @property
    def output_norm(self) -> str | None:
        return None if self.mixes else "layer"

    def params(self) -> tuple[Param, ...]:
        norm = [
            Param(name=name, owner=self.title, axes=("V",), init=1.0)
            for name in ("norm_weight", "norm_bias")
        ]
        mix = Param(name="mix", owner=self.title, axes=("V", "V"), init=0.5)
        return (*norm, mix) if self.mixes else (*norm,)

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return (
            LinearMap(name="W", out_features=V, in_features=F, reads_features=True, is_output=True),
        )

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
        return self.output_map(apply(0, x), raw, params)

    def output_map(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
        weight, shift = (params[name].to(z.dtype)[:, None] for name in ("norm_weight", "norm_bias"))
        normed = weight * layer_norm(z) + shift
        if not self.mixes:
            return normed
        return torch.einsum("hvw,bhnw->bhnv", params["mix"].to(z.dtype), normed)


@rc.member
class Waves(rc.memory.Memory):
    """M(x) = W1 (s ⊙ sin(W2 x)) with a param s, bound to its sizes and not a stack of maps."""

    gain: float | str = rc.quantity("learned", sources=("learned",), init=1.0)

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        return ((3, F), (V, 3))

    def bind(self, F: int, V: int) -> Forward:
        def forward(weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Values) -> Tensor:
            inner, outer = weights
            gain = params["gain"].to(x.dtype)[:, None, None]  # [H, 1, 1]
            return (gain * torch.sin(x @ inner.mT)) @ outer.mT

        return forward


# -- biases ------------------------------------------------------------------------------------


@rc.member
class Emphasis(rc.bias.Bias):
    """½ Σ s_j e_j² with a gate s per value channel."""

    strength: float | str = rc.quantity("input", at_least=0, init=1.0, axes=("V",))

    target = 1.0

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return 0.5 * (gates["strength"] * (prediction - value).square()).sum(-1)


@rc.member
class Tempered(rc.bias.Bias):
    """s² Σ log cosh(e/s) with a scale that is declared as a logarithm."""

    scale: float | str = rc.quantity(1.0, above=0, init=1.0, log=True)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        s, e = gates["log_scale"].exp(), (prediction - value).abs()
        x = e / s
        return (s.square() * (x + torch.log1p((-2 * x).exp()) - 0.6931471805599453)).sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        s = gates["log_scale"].exp()
        return s * torch.tanh((prediction - value) / s)


@rc.member
class Eager(rc.bias.Bias):
    """‖p‖² − 1.5⟨p, v⟩: affine with factors other than 1."""

    affine = (2.0, 1.5)

    def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return (prediction.square() - 1.5 * prediction * value).sum(-1)

    def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return 2 * prediction - 1.5 * value


# -- features ----------------------------------------------------------------------------------


@rc.member
class TwoSided(rc.features.Features):
    """φ(x) = s [relu(x), relu(−x)] with a param s per head."""

    stretch: float | str = rc.quantity("learned", sources=("learned",), above=0, init=1.0)

    def dim(self, K: int) -> int:
        return 2 * K

    def phi(self, x: Tensor, params: Values, side: str, position: Tensor) -> Tensor:
        scale = params["stretch"].to(x.dtype)[:, None, None]  # [H, 1, 1]
        return scale * torch.cat([x.relu(), (-x).relu()], dim=-1)


@rc.member
class Cauchy(rc.features.Kernel):
    """κ(q, k) = 1/(1 + ‖q − k‖²): positive definite, without a logarithm."""

    is_positive_definite = True

    @property
    def nonnegative(self) -> bool:
        return True

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        lengths = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
        return 1 / (1 + lengths - 2 * q @ k.transpose(-1, -2))
