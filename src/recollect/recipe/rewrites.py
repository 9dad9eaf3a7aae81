"""Named rewrites of a recipe into a simpler one with the same meaning.

Each is an identity with a test of its own (``tests/contracts/test_choices.py``);
`Recipe.canonical` applies them until nothing changes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self, TypeVar

from recollect.choices.algorithm.base import Algorithm
from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.algorithm.muon import Muon
from recollect.choices.bias.base import Bias
from recollect.choices.bias.losses import L2, ValueRobust
from recollect.choices.context.base import Context
from recollect.choices.context.windows import Online, Window
from recollect.choices.features.base import Features
from recollect.choices.memory.base import Memory
from recollect.choices.memory.maps import MLP, Matrix
from recollect.choices.retention.base import Decay, Keep, Retention
from recollect.choices.retention.links import Lq

__all__ = ["REWRITES"]


class Choices(Protocol):
    """Six choices, and how to replace some of them: what a rewrite needs of a recipe."""

    @property
    def memory(self) -> Memory: ...
    @property
    def features(self) -> Features: ...
    @property
    def bias(self) -> Bias: ...
    @property
    def context(self) -> Context: ...
    @property
    def retention(self) -> Retention: ...
    @property
    def algorithm(self) -> Algorithm: ...
    def but(self, **changes: Any) -> Self: ...


R = TypeVar("R", bound=Choices)


class Rewrite(Protocol):
    """A recipe with the same meaning, simpler or the same."""

    def __call__(self, recipe: R, /) -> R: ...


def _online(recipe: R) -> R:
    """A window of one ungated association is online."""
    context = recipe.context
    if isinstance(context, Window) and context.size == 1 and not context.gated:
        return recipe.but(context=Online())
    return recipe


def _matrix(recipe: R) -> R:
    """A perceptron of one map without residual, norm or bias is a matrix."""
    plain = MLP(depth=1, residual=False)
    memory = recipe.memory
    if isinstance(memory, MLP) and memory == dataclasses.replace(
        plain, expansion=memory.expansion, activation=memory.activation, read=memory.read
    ):
        return recipe.but(memory=Matrix(read=memory.read))
    return recipe


def _decay(decay: Decay | None, recipe: Choices) -> Decay | None:
    if decay is None or decay.rate == 1.0:
        return None
    changes: dict[str, Any] = {}
    if not isinstance(decay.rate, str) and decay.per != "head":
        changes["per"] = "head"
    # A linear memory's dot product has a gradient that does not see W, wherever it is taken.
    affine = recipe.bias.affine
    blind = affine is not None and affine[0] == 0 and recipe.memory.linear
    if decay.when == "before" and blind:
        changes["when"] = "after"
    return dataclasses.replace(decay, **changes) if changes else decay


def _plain_decay(recipe: R) -> R:
    """α = 1 keeps; a constant α is the same in every channel; order is moot for the dot product."""
    retention = recipe.retention
    decay = _decay(retention.decay, recipe)
    if decay == retention.decay:
        return recipe
    if isinstance(retention, Decay):
        changed: Retention = Keep() if decay is None else decay
    elif not retention.has_field("decay"):  # it says in another way what its decay is
        return recipe
    else:
        changed = dataclasses.replace(retention, decay=decay)  # type: ignore[call-arg]
    return recipe.but(retention=changed)


def _identity_link(recipe: R) -> R:
    """L_q with q = 2 is the identity link, in both forms."""
    retention = recipe.retention
    if isinstance(retention, Lq) and retention.q == 2:
        return recipe.but(retention=retention.decay or Keep())
    return recipe


def _every_token(recipe: R) -> R:
    """With inner batches of one token, every batch is every token, and shares nothing."""
    retention, a = recipe.retention, recipe.algorithm
    if isinstance(a, GradientDescent | Momentum) and a.batch == 1 and a.limit != "batch":
        recipe = recipe.but(algorithm=dataclasses.replace(a, limit="batch"))
    if retention.every == "batch" and recipe.algorithm.batch == 1 and retention.has_field("every"):
        return recipe.but(retention=dataclasses.replace(retention, every="token"))  # type: ignore[call-arg]
    return recipe


def _no_momentum(recipe: R) -> R:
    """θ = 0 is gradient descent."""
    a = recipe.algorithm
    if isinstance(a, Momentum) and a.momentum == 0.0:
        plain = GradientDescent(
            batch=a.batch, lr=a.lr, per=a.per, normalize=a.normalize, limit=a.limit
        )
        return recipe.but(algorithm=plain)
    return recipe


def _unorthogonalised(recipe: R) -> R:
    """Muon without Newton–Schulz and with η inside is momentum; outside too if η is constant."""
    a = recipe.algorithm
    if (
        isinstance(a, Muon)
        and a.newton_steps == 0
        and not a.normalize
        and a.every == "token"
        and (a.scale == "inner" or not isinstance(a.lr, str) or a.lr == "static")
    ):
        return recipe.but(algorithm=Momentum(batch=a.batch, lr=a.lr, momentum=a.momentum))
    return recipe


def _single_mean(recipe: R) -> R:
    """The mean over an inner batch of one token is its sum."""
    a = recipe.algorithm
    if isinstance(a, GradientDescent) and a.reduce == "mean" and a.batch == 1 and a.offset == 0.0:
        return recipe.but(algorithm=dataclasses.replace(a, reduce="sum"))
    return recipe


def _exact_values(recipe: R) -> R:
    """Robustness to values moved by nothing is L2."""
    if isinstance(recipe.bias, ValueRobust) and recipe.bias.radius == 0.0:
        return recipe.but(bias=L2())
    return recipe


REWRITES: dict[str, Rewrite] = {
    "a window of one is online": _online,
    "one linear map is a matrix": _matrix,
    "a decay that does nothing more": _plain_decay,
    "L_2 is the identity link": _identity_link,
    "a batch of one is a token": _every_token,
    "zero momentum is descent": _no_momentum,
    "no orthogonalisation is momentum": _unorthogonalised,
    "the mean of one is the sum": _single_mean,
    "a robustness radius of zero is L2": _exact_values,
}
