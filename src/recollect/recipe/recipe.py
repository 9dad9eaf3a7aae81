"""The recipe: six choices that state the regression problem a sequence layer solves.

A recipe is immutable, hashable data without tensors. It is validated during initialisation, and can
be converted to JSON and back without running code in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from recollect.choices.algorithm.base import Algorithm
from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.base import Bias
from recollect.choices.bias.losses import L2
from recollect.choices.context.base import Context
from recollect.choices.context.windows import Online
from recollect.choices.features.base import Features
from recollect.choices.features.finite import Identity
from recollect.choices.member import Member, decode
from recollect.choices.memory.base import Memory, Stack
from recollect.choices.memory.maps import Matrix
from recollect.choices.overrides import check_weight_shapes
from recollect.choices.retention.base import Keep, Retention
from recollect.fields import Gate, Param
from recollect.messages import RecipeError, short_repr, suggest_arguments
from recollect.recipe.canonical import canonical, normal_form
from recollect.recipe.compatibility import check_size, member_conflicts, name_conflicts
from recollect.report.notebook import definition_table, get_equations
from recollect.serialization import fields_to_data, limited_nesting, read_fields, read_json

__all__ = ["SCHEMA", "Recipe"]

SCHEMA = 2
CHOICES = ("memory", "features", "bias", "context", "retention", "algorithm")


@suggest_arguments
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A sequence layer, stated as a regression problem.

    The default is DeltaNet: Matrix, Identity, L2, Online, Keep and GradientDescent.

    Args:
        memory: function that stores the associations, and its read.
        features: feature map of keys and queries.
        bias: loss of one association.
        context: associations in the objective at time t, and their weights.
        retention: decay, regularisation and bounds of the memory.
        algorithm: minimisation of the objective.

    Raises:
        RecipeError: choices contradict each other; the message names both and a remedy.

    Examples:
        >>> recipe = rc.Recipe(bias=rc.bias.L2(), retention=rc.retention.Decay(when="before"))
        >>> [gate.name for gate in recipe.gates()]
        ['log_decay', 'lr']
        >>> recipe == rc.Recipe.from_json(recipe.to_json())
        True
    """

    memory: Memory = field(default_factory=Matrix)
    features: Features = field(default_factory=Identity)
    bias: Bias = field(default_factory=L2)
    context: Context = field(default_factory=Online)
    retention: Retention = field(default_factory=Keep)
    algorithm: Algorithm = field(default_factory=GradientDescent)

    def __post_init__(self) -> None:
        for name, kind in zip(
            CHOICES, (Memory, Features, Bias, Context, Retention, Algorithm), strict=True
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                usual = type(getattr(Recipe(), name)).__name__
                hint = f"rc.{name}.{value.__name__ if isinstance(value, type) else usual}()"
                raise RecipeError(
                    f"Recipe({name}=...) must be a member such as {hint}, not {short_repr(value)}"
                )
        conflicts = list(dict.fromkeys(self._conflicts()))
        if conflicts:
            raise RecipeError(_join_conflicts(conflicts))
        self._fill_cached_properties()

    def _fill_cached_properties(self) -> None:
        """Fill cached properties: their first access takes a lock, which breaks compiled graphs."""
        owners: list[Recipe | Member] = [self, *self.members()]
        for owner in owners:
            if isinstance(owner, Member):
                owners.extend(owner.parts())
            for name in _cached_properties(type(owner)):
                getattr(owner, name)

    def _conflicts(self) -> Iterator[str]:
        for part in self.members():
            yield from part.requires(self)
        yield from member_conflicts(self)
        yield from name_conflicts(self.members(), sees_past=self.context.horizon is None)

    def members(self) -> tuple[Member, ...]:
        """Return the six members in order."""
        return tuple(getattr(self, name) for name in CHOICES)

    @property
    def brief(self) -> str:
        """The recipe as code, without defaults."""
        plain = Recipe()
        arguments = [
            f"{name}={getattr(self, name).brief}"
            for name in CHOICES
            if getattr(self, name) != getattr(plain, name)
        ]
        return f"Recipe({', '.join(arguments)})"

    def _repr_html_(self) -> str:
        choices = [(name, [getattr(self, name).brief]) for name in CHOICES]
        equations = [*get_equations(self)]
        code = (*CHOICES, *(name for name, _ in equations))
        return definition_table("`Recipe`", [*choices, *equations], equations=code)

    def gates(self) -> tuple[Gate, ...]:
        """Return the gates that `recall` needs."""
        return self._gates

    @cached_property
    def read_gates(self) -> tuple[str, ...]:
        """Gates that a read needs: those of retention except decays, and of queries."""
        of_retention = [gate.name for gate in self.retention.gates() if gate.role != "decay"]
        query_gates = {name for part in self.context.restrictions for name in part.query_gates}
        of_context = [gate.name for gate in self.context.gates() if gate.name in query_gates]
        slope = self.memory.slope_gate
        of_memory = [] if slope is None else [slope]
        of_algorithm = self.algorithm.query_gates
        return tuple(dict.fromkeys((*of_retention, *of_context, *of_memory, *of_algorithm)))

    def params(self) -> tuple[Param, ...]:
        """Return the learned tensors that `recall` needs."""
        return self._params

    @cached_property
    def _gates(self) -> tuple[Gate, ...]:
        return tuple(gate for part in self.members() for gate in part.gates())

    @cached_property
    def _params(self) -> tuple[Param, ...]:
        return tuple(param for part in self.members() for param in part.params())

    def constants(self) -> dict[str, float]:
        """Return the constants by engine-side name (decays as logs)."""
        return dict(self._constants)

    @cached_property
    def _constants(self) -> dict[str, float]:
        constants = self._default_constants()
        for part in self.members():
            constants.update(part.constants())
        if not self.algorithm.has_outer_lr:  # states would store its 1 with each association
            constants.pop("outer_lr", None)
        return constants

    def _default_constants(self) -> dict[str, float]:
        """Return constants of quantities that engines read and no member declares."""
        constants: dict[str, float] = {}
        algorithm = self.algorithm
        descends = not (algorithm.solves or algorithm.inverse)
        if descends and not {"lr", "log_lr"} & algorithm.quantity_axes.keys():
            constants["lr"] = 1.0
        if self.context.horizon is None and self.memory.degree is None and self.features.finite:
            for name, neutral in (("log_decay", 0.0), ("weight", 1.0)):
                if name not in self.context.quantity_axes:
                    constants[name] = neutral
        return constants

    def per_association(self, gate: Gate) -> bool:
        """Whether a gate has an axis n after the head: one number per association of a token."""
        return gate.name in self._per_association

    @cached_property
    def _per_association(self) -> frozenset[str]:
        if self.associations_per_token == 1:
            return frozenset()
        rates = frozenset(x.name for x in self.algorithm.gates() if x.role == "rate")
        return rates | {gate.name for gate in self.gates() if gate.per_association}

    @cached_property
    def log_gates(self) -> frozenset[str]:
        """Gates that are logarithms."""
        return frozenset(gate.name for gate in self.gates() if gate.is_log)

    @cached_property
    def log_decays(self) -> frozenset[str]:
        """Logarithms of decays, by engine-side name."""
        return frozenset().union(*(part.log_decays for part in self.members()))

    @cached_property
    def learned_quantities(self) -> frozenset[str]:
        """Params that are quantities, in contrast to those of feature maps and norms."""
        return frozenset().union(*(part.learned_quantities() for part in self.members()))

    @cached_property
    def associations_per_token(self) -> int:
        """n, number of associations per token."""
        return 1 if self.context.horizon is None else self.algorithm.updates_per_token

    @cached_property
    def spaced_window(self) -> bool:
        """Whether a window takes one association of each earlier token."""
        horizon = self.context.horizon
        return self.associations_per_token > 1 and horizon is not None and horizon > 1

    @cached_property
    def nonparametric(self) -> bool:
        """Whether the memory stores associations instead of weights."""
        return self.memory.degree is not None

    @cached_property
    def uses_kernel_rows(self) -> bool:
        """Whether maps read infinitely many features, so that their weights are one row per key."""
        infinite = not self.nonparametric and not self.features.finite
        return infinite and self.context.horizon is not None

    @cached_property
    def solves_from_gram(self) -> bool:
        """Whether a matrix over a kernel's features is solved for all of the past at every token.

        The state stores associations instead of weights.
        """
        infinite = not self.nonparametric and not self.features.finite
        return infinite and self.context.horizon is None

    @cached_property
    def step_affine(self) -> tuple[float, float] | None:
        """(a, b) if a linear memory moves along (a·prediction − b·value) φ(k)ᵀ, else ``None``.

        These are `Bias.affine`, with the algorithm's erasure added to a.
        """
        affine = self.bias.affine
        return None if affine is None else (affine[0] + self.algorithm.erasure, affine[1])

    @cached_property
    def step_sees_prediction(self) -> bool:
        """Whether the step of an association depends on the prediction, or on an erasure."""
        return self.bias.sees_prediction or self.algorithm.erasure != 0

    @cached_property
    def ridge(self) -> float:
        """λ of a solver in units of the error's slope; 0 without a constant ridge."""
        affine = self.bias.affine
        slope = affine[0] if affine is not None and self.bias.is_quadratic else 1.0
        ridge = self.algorithm.ridge
        return 0.0 if isinstance(ridge, str) else ridge / slope

    @cached_property
    def num_past_associations(self) -> int | None:
        """Number of past associations that later tokens or reads need; ``None`` for all."""
        horizon = self.context.num_kept
        if horizon is None:
            return 0 if self.algorithm.inverse is not None else None
        # The newest token of a window is in the weights, but not in a nonparametric memory.
        num_tokens = horizon if self.nonparametric else horizon - 1
        return num_tokens * self.associations_per_token

    @cached_property
    def buffer_size(self) -> int | None:
        """Number of associations in a state: history and open inner batch; ``None`` for all."""
        return (
            None
            if self.num_past_associations is None
            else (self.algorithm.batch_size - 1) + self.num_past_associations
        )

    @cached_property
    def links_at_batch_end(self) -> bool:
        """Whether the link acts only at the end of inner batches longer than one token."""
        return (
            self.retention.has_link
            and self.retention.link_every == "batch"
            and self.algorithm.batch_size > 1
        )

    def axes(self, K: int, V: int) -> dict[str, int]:
        """Return the sizes of the symbolic axes for keys of size K and values of size V.

        Args:
            K: key channels.
            V: value channels.

        Raises:
            RecipeError: a size is not an integer ≥ 1, or the memory needs K = V.
        """
        K, V = check_size("K", K), check_size("V", V)
        if self.memory.residual and K != V:
            raise RecipeError(
                f"{self.memory.title}(residual=True) adds the key to the prediction and needs K "
                f"= V, not K = {K} and V = {V}: use residual=False or equal sizes"
            )
        if self.memory.read.transposed and K != V:
            raise RecipeError(
                f"memory.Read(transposed=True) compares queries with values and needs K = V, not "
                f"K = {K} and V = {V}: use equal sizes"
            )
        F = self.features.dim(K) if self.features.finite else 0
        sizes = {
            "K": K,
            "V": V,
            "F": F,
            "b": self.algorithm.batch_size,
            "n": self.associations_per_token,
        }
        sizes["in"], sizes["out"] = F, V
        sizes["c"] = self.context.horizon or 1
        sizes["J"] = 1 if self.bias.probe is None else self.bias.probe.heads
        sizes |= self.features.axes(K)
        memory_axes = self.memory.axes(K, F, V)
        for axis, size in memory_axes.items():
            check_size(f"{self.memory.title}.axes: {axis}", size)
            if axis in sizes:
                raise RecipeError(
                    f"{self.memory.title} gives the axis {axis!r} a size, which the recipe has: "
                    "use another name"
                )
        return sizes | memory_axes

    def shapes(self, K: int, V: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the memory's weights, without batch and head.

        Args:
            K: key channels.
            V: value channels.

        Raises:
            RecipeError: a size is not an integer ≥ 1, or the memory needs K = V.
        """
        sizes = self.axes(K, V)
        if self.nonparametric or self.solves_from_gram:
            return ()
        F = sizes["F"]
        if self.uses_kernel_rows and isinstance(self.memory, Stack):
            return tuple(
                (m.out_features, m.in_features)
                for m in self.memory.maps(F, V)
                if not m.reads_features
            )
        return check_weight_shapes(self.memory.title, self.memory.shapes(F, V))

    def row_widths(self, V: int) -> tuple[int, ...]:
        """Return the output sizes of maps with one row per key (`uses_kernel_rows`).

        Raises:
            RecipeError: V is not an integer ≥ 1.
        """
        check_size("V", V)
        if not self.uses_kernel_rows or not isinstance(self.memory, Stack):
            return ()
        return tuple(m.out_features for m in self.memory.maps(0, V) if m.reads_features)

    def init_shapes(self, K: int, V: int, *, pairs: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of an initial memory, without the head.

        A memory with `uses_kernel_rows` has ``pairs`` keys, their rows, then the other maps.

        Args:
            K: key channels.
            V: value channels.
            pairs: number of initial rows of a memory over a kernel's features.

        Raises:
            RecipeError: ``pairs`` is not an integer ≥ 0, a size is not an integer ≥ 1, or the
                memory needs K = V.
        """
        count = check_size("pairs", pairs, at_least=0)
        widths = (K, *self.row_widths(V)) if self.uses_kernel_rows else ()
        return (*((count, width) for width in widths), *self.shapes(K, V))

    def needs_init(self) -> bool:
        """Whether a memory of zeros cannot learn, so that an initial memory is required."""
        return self.learns_init and self.memory.needs_init

    @property
    def learns_init(self) -> bool:
        """Whether a layer learns an initial memory, as for deep memories."""
        return not self.nonparametric and not self.memory.linear

    def replace(self, **changes: Any) -> Recipe:
        """Return this recipe with some choices replaced."""
        unknown = sorted(set(changes) - set(CHOICES))
        if unknown:
            raise RecipeError(f"a recipe has no choice {unknown[0]!r}; it has {', '.join(CHOICES)}")
        return dataclasses.replace(self, **changes)

    def canonical(self) -> Recipe:
        """Return the simplest recipe with the same meaning, see `recollect.recipe.canonical`."""
        return canonical(self)

    @cached_property
    def normal_form(self) -> str:
        """The canonical recipe in one line, equal for recipes with equal meanings."""
        return normal_form(dict(zip(CHOICES, self.canonical().members(), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with all defaults and a ``schema`` number."""
        return {"schema": SCHEMA, **fields_to_data(self)}

    @classmethod
    @limited_nesting()
    def from_dict(cls, data: Any) -> Recipe:
        """Rebuild a recipe; missing choices have their defaults.

        Raises:
            RecipeError: another schema, an unknown choice or field, or an unregistered member.
        """
        # Choices of another schema have other names.
        schema: Any = data.get("schema", SCHEMA) if isinstance(data, Mapping) else SCHEMA
        if schema != SCHEMA or type(schema) is not int:  # True == 1
            raise RecipeError(
                f"this recipe has schema {short_repr(schema)} and this version of recollect reads "
                f"schema {SCHEMA}: rename its fields as CHANGELOG.md lists, or install the version "
                "that wrote it"
            )
        choices = read_fields(cls, data, tag="schema", kind="choice")
        return cls(**{name: decode(member, name) for name, member in choices.items()})

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Rebuild a recipe from JSON text.

        Raises:
            RecipeError: the text is not JSON, has a repeated key, or is not a recipe.
        """
        try:
            data = read_json(text)
        except ValueError as error:
            raise RecipeError(f"this recipe is not JSON: {error}") from None
        return cls.from_dict(data)


MAX_MESSAGE = 300
"""Maximum number of characters of several conflicts in one message."""


@cache
def _cached_properties(owner: type) -> tuple[str, ...]:
    """Return the names of the cached properties of a class and of its bases."""
    attributes = [item for kind in owner.__mro__ for item in vars(kind).items()]
    return tuple(name for name, value in attributes if isinstance(value, cached_property))


def _join_conflicts(conflicts: list[str]) -> str:
    """Return the first conflict, with others up to `MAX_MESSAGE` characters."""
    if sum(map(len, conflicts)) > MAX_MESSAGE:
        conflicts = sorted(conflicts, key=len)  # short messages are usually the most specific
    message, is_complete = conflicts[0], True
    for conflict in conflicts[1:]:
        if len(message) + len(conflict) <= MAX_MESSAGE:
            message = f"{message}; also: {conflict}"
        else:
            is_complete = False
    return message if is_complete else f"{message}; and there are other reasons"
