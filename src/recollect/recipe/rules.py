"""Rules on choices that must fit together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recollect.choices.features.finite import Identity
from recollect.choices.member import Member, RecipeError
from recollect.choices.memory.base import Read, Stack
from recollect.fields import LARGEST, as_whole
from recollect.typing import is_size
from recollect.wording import shown

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

_READ_FROM = {
    "lr": "algorithm",
    "momentum": "algorithm",
    "offset": "algorithm",
    "ridge": "algorithm",
    "window": "context",
    "weight": "context",
    "decay": "retention",
    "decay_value": "retention",
    "decay_scale": "retention",
}
"""The choice whose member engines mean by a name."""


def check_size(name: str, size: object) -> int:
    """A number of heads or channels, if it can be that.

    Args:
        name: of the size.
        size: given for it.

    Raises:
        RecipeError: it is no whole number, below 1, or beyond all tensors.
    """
    number = as_whole(size)
    if number is None:
        if not is_size(size):
            raise RecipeError(f"{name} must be a whole number >= 1, not {shown(size)}")
        return size  # type: ignore[return-value]  # a size of a graph that is being compiled
    if number < 1:
        raise RecipeError(f"{name} must be a whole number >= 1, not {shown(size)}")
    if number > LARGEST:
        raise RecipeError(f"{name} must be a whole number of at most 64 bits, not {shown(size)}")
    return number


def joint_rules(recipe: RecipeLike) -> Iterator[str]:
    """Rules that no single member can know."""
    memory, algorithm, retention = recipe.memory, recipe.algorithm, recipe.retention
    if recipe.nonparametric:
        yield from _nonparametric_rules(recipe)
        return
    if not recipe.features.finite:
        yield from _kernel_rows_rules(recipe)
    changes = retention.decay is not None or retention.linked or not retention.additive
    if recipe.context.horizon is None and changes:
        yield (
            f"{recipe.context.title} solves from the origin at every token, so {retention.title} "
            "would forget nothing: use retention.Keep() and Prefix(decay=...)"
        )
    if recipe.bias.probe is not None and (retention.linked or not retention.additive):
        yield (
            f"bias.Probe erases from the state itself, and {retention.title} puts a link between "
            "state and weights: use retention.Keep() or Decay()"
        )
    if recipe.bias.probe is not None and (memory.diagonal or algorithm.reduce == "mean"):
        yield (
            f"bias.Probe needs memory.Matrix with algorithm.GradientDescent(reduce='sum'), not "
            f"{memory.title} with {algorithm.title}"
        )
    if memory.read != Read() and recipe.features.finite:
        yield from _read_rules(recipe)


def _kernel_rows_rules(recipe: RecipeLike) -> Iterator[str]:
    """What infinitely many features can do, whose weights are one row per key."""
    memory, algorithm, retention = recipe.memory, recipe.algorithm, recipe.retention
    what, read = f"{recipe.features.title} has infinitely many features", recipe.memory.read
    if not isinstance(memory, Stack) or memory.biases:
        yield (
            f"{what}, kept as one row per key, which {memory.title} does not have: use "
            "memory.Matrix, memory.MLP or memory.GatedMLP without biases"
        )
    if recipe.context.horizon is None and not algorithm.solves:
        yield (
            f"{what}: use context.Online() or context.Window() with {algorithm.title}, or "
            f"algorithm.Analytic(ridge=1.0) with {recipe.context.title}"
        )
    if algorithm.solves:
        yield from _gram_rules(recipe)
    decay = retention.decay
    if retention.linked or not retention.additive or (decay is not None and decay.per != "head"):
        yield (
            f"{what}, so nothing acts on their channels or entries, as {retention.title} does: use "
            "retention.Keep() or Decay(per='head')"
        )
    moves = algorithm.momentum_of in ("none", "gradient") and algorithm.reduce == "sum"
    if not moves or algorithm.per_value:
        yield (
            f"{what}, so a step must be a multiple of the gradient, which {algorithm.title} does "
            "not take: use algorithm.GradientDescent() or Momentum(of='gradient') with one rate "
            "per head and reduce='sum'"
        )
    if read.when != "after" or read.bonus != 0.0 or read.normalize not in ("none", "sum"):
        yield f"{what}: use memory.Read(normalize='none') or 'sum', not memory.{read.brief}"
    if read.normalize == "sum" and not recipe.features.positive:
        yield (
            f"memory.Read(normalize='sum') divides by likenesses that must be positive, and those "
            f"of {recipe.features.title} are not: use features.Exponential() or Gaussian()"
        )


def _gram_rules(recipe: RecipeLike) -> Iterator[str]:
    """What a solve from a Gram matrix needs."""
    bias, features = recipe.bias, recipe.features
    if bias.affine is None or bias.affine[0] <= 0 or bias.probe is not None:
        yield f"{recipe.algorithm.title} has no closed form under {bias.title}: use bias.L2()"
    if not features.definite:
        yield (
            f"{recipe.algorithm.title} factors the matrix of likenesses, which is not positive for "
            f"{features.title}: use features.Exponential(), Gaussian() or LinearKernel()"
        )
    if recipe.memory.read != Read():
        brief = recipe.memory.read.brief
        yield f"{recipe.algorithm.title} reads W φ(q): use memory.Read(), not memory.{brief}"


def _nonparametric_rules(recipe: RecipeLike) -> Iterator[str]:
    memory = recipe.memory.title
    if recipe.context.kernel is None:
        yield (
            f"{memory} weighs associations by their likeness to the query, and "
            f"{recipe.context.title} states no similarity: use context.Similar()"
        )
    if recipe.bias.affine is None or recipe.bias.probe is not None:
        yield (
            f"{memory} has no closed form under {recipe.bias.title}: use bias.L2() or "
            "bias.DotProduct()"
        )
    retention = recipe.retention
    if retention.decay is not None or retention.linked or not retention.additive:
        yield (
            f"{memory} has no state to decay, and {retention.title} changes one: use "
            "retention.Keep()"
        )
    if recipe.features != Identity():
        yield (
            f"{memory} compares keys through context.Similar(kernel=...), so "
            f"{recipe.features.title} "
            "has no place: use features.Identity()"
        )


def _read_rules(recipe: RecipeLike) -> Iterator[str]:
    read, algorithm, decay = recipe.memory.read, recipe.algorithm, recipe.retention.decay
    if not recipe.memory.linear:
        yield (
            f"{recipe.memory.title} reads what its maps say, and memory.{read.brief} divides a sum "
            f"over keys, which {recipe.features.title} does not keep: use memory.Read(), or "
            "features.Exponential()"
        )
        return
    per = decay.per if decay is not None else "head"
    if read.normalize != "none":
        what = f"memory.Read(normalize={read.normalize!r})"
        if recipe.bias.affine is None or recipe.bias.affine[0] != 0:
            yield (
                f"{what} divides by a dot-product memory of ones, which {recipe.bias.title} is "
                "not: "
                "use bias.DotProduct()"
            )
        if not algorithm.linear:
            yield f"{what} needs an algorithm linear in the gradient, not {algorithm.title}"
        if per not in ("head", "key") or algorithm.per_value:
            yield (
                f"{what} needs one rate for all value channels, and {recipe.retention.title} or "
                f"{algorithm.title} has one per channel: use per='head' or 'key'"
            )
        if read.bonus != 0.0 or recipe.memory.diagonal:
            yield f"{what} needs memory.Matrix and no bonus"
    if read.bonus != 0.0 and recipe.memory.diagonal:
        yield "memory.Read(bonus=...) is ⟨q, u ⊙ k⟩ v, which needs memory.Matrix, not memory.Vector"
    if read.normalize == "floor" and (
        per != "head"
        or algorithm.slots
        or algorithm.steps > 1
        or algorithm.batch > 1
        or recipe.context.horizon != 1
    ):
        yield (
            "memory.Read(normalize='floor') keeps a running maximum of scalar gates: use "
            "context.Online(), algorithm.GradientDescent() token by token, and one decay per head"
        )
    if (read.when == "before" or read.bonus != 0.0) and (
        algorithm.batch > 1 or algorithm.steps > 1 or recipe.context.horizon is None
    ):
        yield (
            f"memory.Read(when={read.when!r}, bonus=...) speaks of the current token's write: use "
            f"batch=1 and steps=1 in {algorithm.title}"
        )


def name_rules(members: Sequence[Member], *, past: bool) -> Iterator[str]:
    """Engines know numbers by name alone, however they are given: a name has one owner.

    Args:
        members: of the recipe.
        past: whether all of the past counts, weighed by the context's number ``"weight"``.
    """
    owners_of: dict[str, list[Member]] = {}
    for part in members:
        declared = {item.name for item in (*part.gates(), *part.params())} | part.constants().keys()
        for name in sorted({name.removeprefix("log_") for name in declared}):
            owners_of.setdefault(name, []).append(part)
    for name, choice in _READ_FROM.items():
        if name == "weight" and not past:
            continue  # nobody reads it
        owners = owners_of.get(name, [])
        own = (choice, "context") if name == "decay" else (choice,)
        if len(owners) == 1 and owners[0].choice not in own:
            yield (
                f"the number {name!r} is read from the {choice}, and {owners[0].title} declares "
                "one that means something else: give its quantity another name"
            )
    for name, owners in owners_of.items():
        if len(owners) > 1:
            titles = [part.title for part in owners]
            yield (
                f"the number {name!r} belongs to {' and '.join(titles)}: drop one of them, or give "
                "its quantity another name"
            )
    gates = [gate for part in members for gate in part.gates()]
    params = [param for part in members for param in part.params()]
    for what, items in (("gate", gates), ("param", params)):
        for name, count in Counter(item.name for item in items).items():
            if count > 1:
                owners = " and ".join(item.owner for item in items if item.name == name)
                yield (
                    f"the {what} {name!r} is asked for by {owners}: give one of them a constant or "
                    "drop it"
                )
