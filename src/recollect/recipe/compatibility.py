"""Conflicts between the choices of a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from recollect.choices.features.finite import Identity
from recollect.choices.member import Member
from recollect.choices.memory.base import Read, Stack
from recollect.fields import int_check, validate
from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

NAME_OWNERS = {
    "lr": ("algorithm", "rate"),
    "momentum": ("algorithm", "momentum"),
    "outer_lr": ("algorithm", "rate"),
    "offset": ("algorithm", "other"),
    "ridge": ("algorithm", "ridge"),
    "window": ("context", "rate"),
    "weight": ("context", "weight"),
    "decay": ("retention", "decay"),
    "decay_value": ("retention", "decay"),
    "decay_scale": ("retention", "decay"),
}
"""Choice and role of the quantities that engines read by a fixed name."""


def check_size(name: str, size: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return a valid number of heads, channels or pairs, between ``at_least`` and ``at_most``.

    The maximum is by default the largest size of a tensor.

    Raises:
        RecipeError: the size is not an integer between these.
    """
    if isinstance(size, torch.SymInt):  # in a compiled graph
        return size  # type: ignore[return-value]
    try:
        return validate(name, int_check(at_least, at_most), size)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def member_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield conflicts that involve several members."""
    memory, algorithm, retention = recipe.memory, recipe.algorithm, recipe.retention
    if recipe.nonparametric:
        yield from _nonparametric_conflicts(recipe)
        return
    if not recipe.features.finite:
        yield from _kernel_rows_conflicts(recipe)
    changes = retention.decay is not None or not retention.is_plain
    if recipe.context.horizon is None and changes:
        yield (
            f"{recipe.context.title} solves from the origin at every token, so {retention.title} "
            "would have no effect: use retention.Keep() and Prefix(decay=...)"
        )
    if recipe.bias.probe is not None and not retention.is_plain:
        yield (
            f"bias.Probe erases from the state itself, and {retention.title} puts a link between "
            "state and weights: use retention.Keep() or Decay()"
        )
    if recipe.bias.probe is not None and (memory.is_elementwise or algorithm.reduction == "mean"):
        yield (
            f"bias.Probe needs memory.Matrix with algorithm.GradientDescent(reduction='sum'), not "
            f"{memory.title} with {algorithm.title}"
        )
    if memory.read.transposed:
        yield from _transposition_conflicts(recipe)
    elif memory.read != Read() and recipe.features.finite:
        yield from _read_conflicts(recipe)


def _kernel_rows_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield conflicts of infinitely many features, with one row of weights per key."""
    memory, algorithm, retention = recipe.memory, recipe.algorithm, recipe.retention
    subject, read = f"{recipe.features.title} has infinitely many features", recipe.memory.read
    if not isinstance(memory, Stack) or memory.bias:
        yield (
            f"{subject}, stored as one row per key, which {memory.title} does not have: use "
            "memory.Matrix, memory.MLP or memory.GatedMLP without biases"
        )
    if recipe.context.horizon is None and not algorithm.solves:
        yield (
            f"{subject}: use context.Online() or context.Window() with {algorithm.title}, or "
            f"algorithm.Analytic(ridge=1.0) with {recipe.context.title}"
        )
    if algorithm.solves:
        yield from _gram_conflicts(recipe)
    decay = retention.decay
    if not retention.is_plain or (decay is not None and decay.per != "head"):
        yield (
            f"{subject}, and {retention.title} acts on single channels or entries: use "
            "retention.Keep() or Decay(per='head')"
        )
    is_supported = algorithm.recursion in ("none", "gradient") and algorithm.reduction == "sum"
    if not is_supported or algorithm.per_value or algorithm.has_outer_lr:
        yield (
            f"{subject}, so a step must be a multiple of the gradient, and that of "
            f"{algorithm.title} is not: use algorithm.GradientDescent() or "
            "Momentum(momentum_on='gradient') with one rate per head, outer_lr=1.0 and "
            "reduction='sum'"
        )
    if algorithm.update_every == "batch":
        yield (
            f"{subject}, whose rows are written token by token: use update_every='token' in "
            f"{algorithm.title}"
        )
    if read.when != "after" or read.bonus != 0.0 or read.normalize not in ("none", "sum"):
        yield f"{subject}: use memory.Read(normalize='none') or 'sum', not memory.{read.brief}"
    if read.normalize == "sum" and not recipe.features.positive:
        yield (
            f"memory.Read(normalize='sum') divides by similarities, which must be positive, and "
            f"those of {recipe.features.title} are not: use features.Exponential() or Gaussian()"
        )


def _gram_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield conflicts of a solver of a Gram matrix."""
    bias, features = recipe.bias, recipe.features
    if not bias.is_quadratic or bias.probe is not None:
        yield f"{recipe.algorithm.title} has no closed form under {bias.title}: use bias.L2()"
    if not features.is_positive_definite:
        yield (
            f"{recipe.algorithm.title} factors the Gram matrix, which is not positive definite for "
            f"{features.title}: use features.Exponential(), Gaussian() or LinearKernel()"
        )
    if recipe.memory.read != Read():
        brief = recipe.memory.read.brief
        yield f"{recipe.algorithm.title} reads W φ(q): use memory.Read(), not memory.{brief}"


def _nonparametric_conflicts(recipe: Recipe) -> Iterator[str]:
    memory = recipe.memory.title
    if recipe.context.kernel is None:
        yield (
            f"{memory} weighs associations by their similarity to the query, and "
            f"{recipe.context.title} declares none: use context.KernelWeighted()"
        )
    if not recipe.bias.is_affine or recipe.bias.probe is not None:
        yield (
            f"{memory} has no closed form under {recipe.bias.title}: use bias.L2() or "
            "bias.DotProduct()"
        )
    retention = recipe.retention
    if retention.decay is not None or not retention.is_plain:
        yield (
            f"{memory} has no state to decay, and {retention.title} changes one: use "
            "retention.Keep()"
        )
    if recipe.features != Identity():
        yield (
            f"{memory} compares keys by context.KernelWeighted(kernel=...), so "
            f"{recipe.features.title} has no effect: use features.Identity()"
        )


def _read_conflicts(recipe: Recipe) -> Iterator[str]:
    read, algorithm, decay = recipe.memory.read, recipe.algorithm, recipe.retention.decay
    if not recipe.memory.linear:
        yield (
            f"memory.{read.brief} divides a sum over keys, which {recipe.memory.title} over "
            f"{recipe.features.title} does not store: use memory.Read(), or features.Exponential()"
        )
        return
    per = decay.per if decay is not None else "head"
    if read.normalize != "none":
        subject = f"memory.Read(normalize={read.normalize!r})"
        if recipe.bias.sees_prediction:
            yield (
                f"{subject} divides by a dot-product memory of ones, which {recipe.bias.title} is "
                "not: use bias.DotProduct()"
            )
        if not algorithm.linear:
            yield f"{subject} needs an algorithm linear in the gradient, not {algorithm.title}"
        if per not in ("head", "key") or algorithm.per_value:
            yield (
                f"{subject} needs one rate for all value channels, and {recipe.retention.title} or "
                f"{algorithm.title} has one per channel: use per='head' or 'key'"
            )
        if read.bonus != 0.0 or recipe.memory.is_elementwise:
            yield f"{subject} needs memory.Matrix and no bonus"
    if read.bonus != 0.0 and recipe.memory.is_elementwise:
        yield "memory.Read(bonus=...) is ⟨q, u ⊙ k⟩ v, which needs memory.Matrix, not memory.Vector"
    if read.normalize == "floor" and (
        per != "head"
        or algorithm.slots
        or algorithm.updates_per_token > 1
        or algorithm.batch_size > 1
        or recipe.context.horizon != 1
    ):
        yield (
            "memory.Read(normalize='floor') stores a running maximum of scalar gates: use "
            "context.Online(), algorithm.GradientDescent() token by token, and one decay per head"
        )
    if (read.when == "before" or read.bonus != 0.0) and (
        algorithm.batch_size > 1
        or algorithm.updates_per_token > 1
        or recipe.context.horizon is None
    ):
        yield (
            f"memory.Read(when={read.when!r}, bonus=...) refers to the current token's write: use "
            f"batch_size=1 and updates_per_token=1 in {algorithm.title}"
        )


def _transposition_conflicts(recipe: Recipe) -> Iterator[str]:
    memory, algorithm, read = recipe.memory, recipe.algorithm, recipe.memory.read
    subject = "memory.Read(transposed=True) reads Wᵀ q"
    if not memory.linear or memory.is_elementwise or recipe.features != Identity():
        yield (
            f"{subject}, a sum of keys, which {memory.title} over {recipe.features.title} does not "
            "give: use memory.Matrix and features.Identity()"
        )
    if recipe.context.horizon is None or algorithm.inverse is not None:
        yield (
            f"{subject} of weights that change token by token: use context.Online() or Window() "
            f"with algorithm.GradientDescent(), not {recipe.context.title} with {algorithm.title}"
        )
    if read != Read(transposed=True, when=read.when):
        yield f"{subject} without a normaliser or bonus: leave them out of memory.{read.brief}"
    elif read.when == "before" and (algorithm.batch_size > 1 or algorithm.updates_per_token > 1):
        yield (
            "memory.Read(when='before') refers to the current token's write: use batch_size=1 and "
            f"updates_per_token=1 in {algorithm.title}"
        )


def name_conflicts(members: Sequence[Member], *, sees_past: bool) -> Iterator[str]:
    """Yield conflicts of names: engines read quantities by name, so every name has one owner.

    ``sees_past`` is whether the context has all past associations, weighed by its ``"weight"``.
    """
    owners_of: dict[str, list[Member]] = {}
    for part in members:
        for name in sorted(set(part.quantity_names())):
            owners_of.setdefault(name, []).append(part)
    for name, (choice, role) in NAME_OWNERS.items():
        if name == "weight" and not sees_past:
            continue  # no engine reads it
        owners = owners_of.get(name, [])
        choices = (choice, "context") if name == "decay" else (choice,)
        if len(owners) == 1 and owners[0].choice not in choices:
            yield (
                f"the quantity {name!r} is read from the {choice}, and {owners[0].title} declares "
                "one with another meaning: use another name for its quantity"
            )
        for part in owners:
            if part.choice in choices and part.role_of(name) not in (role, None):
                yield (
                    f"engines read the quantity {name!r} of {part.title} as its {role}: declare it "
                    f"with role={role!r}, or use another name"
                )
    for name, owners in owners_of.items():
        if len(owners) > 1:
            titles = [part.title for part in owners]
            yield (
                f"the quantity {name!r} belongs to {' and '.join(titles)}: remove one of them, or "
                "use another name for its quantity"
            )
    gates = [gate for part in members for gate in part.gates()]
    params = [param for part in members for param in part.params()]
    for kind, items in (("gate", gates), ("param", params)):
        for name, count in Counter(item.name for item in items).items():
            if count > 1:
                owners = " and ".join(item.owner for item in items if item.name == name)
                yield (
                    f"the {kind} {name!r} is declared by {owners}: use a constant for one of them, "
                    "or remove it"
                )
