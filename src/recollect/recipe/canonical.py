"""The canonical form of a recipe, by rewrites that keep its meaning, and its text.

Each rewrite is an identity with a test of its own (``tests/contracts/test_choices.py``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.algorithm.muon import Muon
from recollect.choices.bias.losses import L2, DotProduct, ValueRobust
from recollect.choices.context.windows import Online, Window
from recollect.choices.member import Member, registered_name
from recollect.choices.memory.maps import MLP, Matrix
from recollect.choices.retention.base import Decay, Keep, Retention
from recollect.choices.retention.links import Lq
from recollect.messages import short_repr

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["REWRITES", "canonical", "first_difference", "is_valid", "normal_form"]


def canonical(recipe: Recipe) -> Recipe:
    """Apply `REWRITES` until the recipe does not change."""
    while True:
        previous = recipe
        for rewrite in REWRITES.values():
            recipe = rewrite(recipe)
        if recipe == previous:
            return recipe


def _online(recipe: Recipe) -> Recipe:
    """A window of one ungated association is online."""
    context = recipe.context
    if isinstance(context, Window) and context.size == 1 and not context.gated:
        return recipe.replace(context=Online())
    return recipe


def _matrix(recipe: Recipe) -> Recipe:
    """A perceptron of one map without residual, norm or bias is a matrix."""
    plain = MLP(depth=1, residual=False)
    memory = recipe.memory
    if isinstance(memory, MLP) and memory == dataclasses.replace(
        plain, expansion=memory.expansion, activation=memory.activation, read=memory.read
    ):
        return recipe.replace(memory=Matrix(read=memory.read))
    return recipe


def _simplify_decay(decay: Decay | None, recipe: Recipe) -> Decay | None:
    if decay is None or decay.alpha == 1.0:
        return None
    changes: dict[str, Any] = {}
    if not isinstance(decay.alpha, str) and decay.per != "head":
        changes["per"] = "head"
    # The gradient of a linear memory's dot product does not depend on W.
    ignores_prediction = recipe.memory.linear and not recipe.step_sees_prediction
    if decay.when == "before" and ignores_prediction:
        changes["when"] = "after"
    return dataclasses.replace(decay, **changes) if changes else decay


def _plain_decay(recipe: Recipe) -> Recipe:
    """α = 1 keeps everything; a constant α needs no channels; the dot product ignores the order."""
    retention = recipe.retention
    decay = _simplify_decay(retention.decay, recipe)
    if decay == retention.decay:
        return recipe
    if isinstance(retention, Decay):
        changed: Retention = Keep() if decay is None else decay
    elif not retention.has_field("decay"):  # declared without a field of this name
        return recipe
    else:
        changed = dataclasses.replace(retention, decay=decay)  # type: ignore[call-arg]
    return recipe.replace(retention=changed)


def _identity_link(recipe: Recipe) -> Recipe:
    """L_q with q = 2 is the identity link, in both forms."""
    retention = recipe.retention
    if isinstance(retention, Lq) and retention.q == 2:
        return recipe.replace(retention=retention.decay or Keep())
    return recipe


def _single_token_batch(recipe: Recipe) -> Recipe:
    """An inner batch of one token is one token, and no keys overlap."""
    retention, a = recipe.retention, recipe.algorithm
    if (
        isinstance(a, GradientDescent | Momentum)
        and a.batch_size == 1
        and a.batch_overlap != "worst_case"
    ):
        recipe = recipe.replace(algorithm=dataclasses.replace(a, batch_overlap="worst_case"))
    if (
        retention.link_every == "batch"
        and recipe.algorithm.batch_size == 1
        and retention.has_field("link_every")
    ):
        return recipe.replace(retention=dataclasses.replace(retention, link_every="token"))  # type: ignore[call-arg]
    return recipe


def _no_momentum(recipe: Recipe) -> Recipe:
    """θ = 0 is gradient descent."""
    a = recipe.algorithm
    if isinstance(a, Momentum) and a.momentum == 0.0 and not a.has_outer_lr:
        plain = GradientDescent(
            batch_size=a.batch_size,
            lr=a.lr,
            per=a.per,
            normalized_steps=a.normalized_steps,
            batch_overlap=a.batch_overlap,
            erasure=a.erasure,
        )
        return recipe.replace(algorithm=plain)
    return recipe


def _unorthogonalised(recipe: Recipe) -> Recipe:
    """Muon without Newton–Schulz and with η inside is momentum; outside too if η is constant."""
    a = recipe.algorithm
    if (
        isinstance(a, Muon)
        and a.ns_steps == 0
        and not a.normalized_steps
        and a.update_every == "token"
        and (a.lr_position == "inside" or not isinstance(a.lr, str) or a.lr == "learned")
    ):
        return recipe.replace(
            algorithm=Momentum(batch_size=a.batch_size, lr=a.lr, momentum=a.momentum)
        )
    return recipe


def _single_mean(recipe: Recipe) -> Recipe:
    """The mean over an inner batch of one token is its sum."""
    a = recipe.algorithm
    if (
        isinstance(a, GradientDescent)
        and a.reduction == "mean"
        and a.batch_size == 1
        and a.offset == 0.0
    ):
        return recipe.replace(algorithm=dataclasses.replace(a, reduction="sum"))
    return recipe


def _erased_dot_product(recipe: Recipe) -> Recipe:
    """The dot product of a matrix that erases its prediction is L2."""
    a = recipe.algorithm
    if (
        isinstance(a, GradientDescent | Momentum)
        and a.erasure == 1.0
        and recipe.memory.linear
        and isinstance(recipe.bias, DotProduct)
    ):
        return recipe.replace(bias=L2(), algorithm=dataclasses.replace(a, erasure=0.0))
    return recipe


def _exact_values(recipe: Recipe) -> Recipe:
    """Robustness to a value shift of 0 is L2."""
    if isinstance(recipe.bias, ValueRobust) and recipe.bias.radius == 0.0:
        return recipe.replace(bias=L2())
    return recipe


REWRITES: dict[str, Callable[[Recipe], Recipe]] = {
    "a window of one is online": _online,
    "one linear map is a matrix": _matrix,
    "a decay that does nothing more": _plain_decay,
    "L_2 is the identity link": _identity_link,
    "a batch of one is a token": _single_token_batch,
    "zero momentum is descent": _no_momentum,
    "no orthogonalisation is momentum": _unorthogonalised,
    "the mean of one is the sum": _single_mean,
    "a dot product that erases is L2": _erased_dot_product,
    "a robustness radius of zero is L2": _exact_values,
}


def normal_form(members: Mapping[str, Member]) -> str:
    """Return members by choice as JSON text, without fields that have their defaults.

    Equal members have equal texts: 1 and 1.0 are written alike. A field that a later version adds
    does not change the text if its default has no effect.
    """
    plain = {choice: _plain(member) for choice, member in members.items()}
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def is_valid(text: object) -> bool:
    """Whether a value from a file is a normal form."""
    return isinstance(text, str) and bool(_choices(text))


def first_difference(old: str, new: str) -> tuple[str, str, str]:
    """Return the first choice in which two normal forms differ, and its members in both."""
    choices = _choices(old)
    for choice, member in _choices(new).items():
        if choices.get(choice) != member:
            return choice, f"{_as_code(choices.get(choice)):.100}", f"{_as_code(member):.100}"
    return "meaning", short_repr(old), "another"


def _plain(value: Any) -> Any:
    if isinstance(value, Member):
        defaults = {field.name: field.default for field in dataclasses.fields(value)}  # type: ignore[arg-type]
        fields = {name: getattr(value, name) for name in defaults}
        changed = {name: _plain(x) for name, x in fields.items() if x != defaults[name]}
        # Without the module of a user's class: a script and its import have one name for it.
        _, mark, name = registered_name(type(value)).rpartition(":")
        return {"member": mark + name, **changed}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _choices(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _as_code(value: Any, depth: int = 0) -> str:
    if not isinstance(value, dict) or depth > 3:
        return short_repr(value)
    # The text of a modified file may contain any characters, such as line breaks.
    name = str(value.get("member")).removeprefix(":")
    if not all(isinstance(x, str) and x.isidentifier() for x in (*value, name)):
        return short_repr(value)
    fields = [f"{k}={_as_code(v, depth + 1)}" for k, v in value.items() if k != "member"]
    return f"{name}({', '.join(fields)})"
