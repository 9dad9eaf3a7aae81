"""The recipe: six choices that state the regression problem a sequence layer solves.

A recipe is immutable, hashable data. It owns no tensor, validates itself when it is made, and
writes itself to JSON and back without running anybody's code.
"""

# More than 400 lines: one class, and all that is asked of a recipe as a whole.

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from recollect.choices.algorithm.base import Algorithm
from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.base import Bias
from recollect.choices.bias.losses import L2
from recollect.choices.context.base import Context
from recollect.choices.context.windows import Online
from recollect.choices.features.base import Features
from recollect.choices.features.finite import Identity
from recollect.choices.fields import Gate, Param
from recollect.choices.member import Member, RecipeError, decode, not_too_deep
from recollect.choices.memory.base import Memory, Stack
from recollect.choices.memory.maps import Matrix
from recollect.choices.retention.base import Keep, Retention
from recollect.choices.trial import check_shapes
from recollect.fields import LARGEST, as_whole
from recollect.recipe.json_text import read_json
from recollect.recipe.normal_form import normal_form
from recollect.recipe.rewrites import REWRITES
from recollect.recipe.rules import check_size, joint_rules, name_rules
from recollect.report.notebook import equations_of, facts
from recollect.wording import named_arguments, shown

if TYPE_CHECKING:
    once_made = property  # which is what a protocol asks for
else:
    once_made = cached_property

__all__ = ["SCHEMA", "Recipe", "RecipeError"]

SCHEMA = 1
CHOICES = ("memory", "features", "bias", "context", "retention", "algorithm")


@named_arguments
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A sequence layer, stated as a regression problem.

    With nothing said it is Matrix, Identity, L2, Online, Keep, GradientDescent: DeltaNet.

    Args:
        memory: what function stores the associations, and how it is read.
        features: how keys and queries are lifted first.
        bias: what counts as an error on one association.
        context: which associations count at time t, and how much.
        retention: what keeps the memory near its past and bounded.
        algorithm: how the objective is minimised.

    Raises:
        RecipeError: choices that contradict each other, naming both and what would fit.

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
                    f"Recipe({name}=...) must be a member such as {hint}, not {shown(value)}"
                )
        reasons = list(dict.fromkeys(self._reasons()))
        if reasons:
            raise RecipeError(_joined(reasons))
        self._warm()

    def _warm(self) -> None:
        """Ask what is cached now: the first asking takes a lock, at which torch.compile breaks."""
        owners: list[Recipe | Member] = [self, *self.members()]
        for owner in owners:
            if isinstance(owner, Member):
                owners.extend(owner.parts())
            for kind in type(owner).__mro__:
                for name, value in vars(kind).items():
                    if isinstance(value, cached_property):
                        getattr(owner, name)

    def _reasons(self) -> Iterator[str]:
        for part in self.members():
            yield from part.requires(self)
        yield from joint_rules(self)
        yield from name_rules(self.members(), past=self.context.horizon is None)

    def members(self) -> tuple[Member, ...]:
        """The six members in order."""
        return tuple(getattr(self, name) for name in CHOICES)

    @property
    def brief(self) -> str:
        """The recipe as one would type it, defaults left out."""
        plain = Recipe()
        said = [
            f"{name}={getattr(self, name).brief}"
            for name in CHOICES
            if getattr(self, name) != getattr(plain, name)
        ]
        return f"Recipe({', '.join(said)})"

    def _repr_html_(self) -> str:
        choices = [(name, [getattr(self, name).brief]) for name in CHOICES]
        equations = [*equations_of(self)]
        code = (*CHOICES, *(name for name, _ in equations))
        return facts("`Recipe`", [*choices, *equations], equations=code)

    def gates(self) -> tuple[Gate, ...]:
        """Per-token numbers that `recall` needs."""
        return self._gates

    @cached_property
    def read_gates(self) -> tuple[str, ...]:
        """Names of those that a read asks for: of retention, but for decays, and of the context."""
        retained = [gate.name for gate in self.retention.gates() if "decay" not in gate.name]
        asked = {name for part in self.context.within for name in part.reads}
        inside = [gate.name for gate in self.context.gates() if gate.name in asked]
        return tuple(dict.fromkeys((*retained, *inside)))

    def params(self) -> tuple[Param, ...]:
        """Learned tensors that `recall` needs."""
        return self._params

    @cached_property
    def _gates(self) -> tuple[Gate, ...]:
        return tuple(gate for part in self.members() for gate in part.gates())

    @cached_property
    def _params(self) -> tuple[Param, ...]:
        return tuple(param for part in self.members() for param in part.params())

    def constants(self) -> dict[str, float]:
        """Numbers fixed by the recipe, by engine-side name (decays as logs)."""
        return dict(self._constants)

    def logs(self) -> frozenset[str]:
        """Params that engines receive as logarithms."""
        return self._logs

    @cached_property
    def _constants(self) -> dict[str, float]:
        constants = self._neutral()
        for part in self.members():
            constants.update(part.constants())
        return constants

    def _neutral(self) -> dict[str, float]:
        """Numbers that engines read and no member declares: steps at rate 1, all of the past."""
        constants: dict[str, float] = {}
        algorithm = self.algorithm
        descends = not (algorithm.solves or algorithm.condenses)
        if descends and not {"lr", "log_lr"} & algorithm.numbers.keys():
            constants["lr"] = 1.0
        if self.context.horizon is None and self.memory.degree is None and self.features.finite:
            for name, neutral in (("log_decay", 0.0), ("weight", 1.0)):
                if name not in self.context.numbers:
                    constants[name] = neutral
        return constants

    def per_association(self, gate: Gate) -> bool:
        """Whether a gate has an axis n after the head: one number per association of a token."""
        return self.associations > 1 and (gate.travels or gate.name in ("lr", "log_lr"))

    @cached_property
    def _logs(self) -> frozenset[str]:
        return frozenset().union(*(part.logs() for part in self.members()))

    def statics(self) -> frozenset[str]:
        """Params that are numbers of the recurrence rather than of a feature map or norm."""
        return self._statics

    @cached_property
    def _statics(self) -> frozenset[str]:
        return frozenset().union(*(part.static_quantities() for part in self.members()))

    @once_made
    def associations(self) -> int:
        """n, associations per token."""
        return 1 if self.context.horizon is None else self.algorithm.steps

    @once_made
    def nonparametric(self) -> bool:
        """Whether the memory keeps associations instead of weights."""
        return self.memory.degree is not None

    @once_made
    def dual(self) -> bool:
        """Whether maps read infinitely many features, so that their weights are rows by key."""
        infinite = not self.nonparametric and not self.features.finite
        return infinite and self.context.horizon is not None

    @once_made
    def solves_from_gram(self) -> bool:
        """Whether a matrix over a kernel's features is solved for all of the past at every token.

        The weights are never formed: what is kept is the associations.
        """
        infinite = not self.nonparametric and not self.features.finite
        return infinite and self.context.horizon is None

    @property
    def from_gram(self) -> bool:
        """The former name of `solves_from_gram`."""
        return self.solves_from_gram

    @once_made
    def ridge(self) -> float:
        """λ of a solver in units of the error's slope; 0 where there is none."""
        affine = self.bias.affine
        slope = affine[0] if affine is not None and affine[0] > 0 else 1.0
        ridge = self.algorithm.ridge
        return 0.0 if isinstance(ridge, str) else ridge / slope

    @once_made
    def history(self) -> int | None:
        """Past associations that later tokens or reads still need; ``None`` for all."""
        horizon = self.context.keeps
        if horizon is None:
            return 0 if self.algorithm.condenses else None
        # A window of weights has already written its newest association; attention has not.
        return horizon if self.nonparametric else horizon - 1

    @once_made
    def span(self) -> int | None:
        """Raw associations a state must hold: history and open inner batch; ``None`` for all."""
        return None if self.history is None else (self.algorithm.batch - 1) + self.history

    @once_made
    def at_border(self) -> bool:
        """Whether the link acts only at the borders of inner batches longer than one token."""
        return (
            self.retention.linked and self.retention.every == "batch" and self.algorithm.batch > 1
        )

    def axes(self, K: int, V: int) -> dict[str, int]:
        """Sizes of the symbolic axes for keys of size K and values of size V.

        Args:
            K: key channels.
            V: value channels.

        Raises:
            RecipeError: a size that is no whole number of at least 1, or the memory needs K = V.
        """
        K, V = check_size("K", K), check_size("V", V)
        if self.memory.residual and K != V:
            raise RecipeError(
                f"{self.memory.title}(residual=True) adds the key to the prediction and needs K "
                f"= V, not K = {K} and V = {V}: use residual=False or equal sizes"
            )
        F = self.features.dim(K) if self.features.finite else 0
        sizes = {"K": K, "V": V, "F": F, "b": self.algorithm.batch, "n": self.associations}
        sizes["in"], sizes["out"] = F, V
        sizes["c"] = self.context.horizon or 1
        sizes["J"] = 1 if self.bias.probe is None else self.bias.probe.heads
        sizes |= self.features.axes(K)
        own = self.memory.axes(K, F, V)
        for axis, size in own.items():
            check_size(f"{self.memory.title}.axes: {axis}", size)
            if axis in sizes:
                raise RecipeError(
                    f"{self.memory.title} gives the axis {axis!r} a size, which the recipe has: "
                    "call it otherwise"
                )
        return sizes | own

    def shapes(self, K: int, V: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the memory's weights, without batch and head.

        Args:
            K: key channels.
            V: value channels.

        Raises:
            RecipeError: a size that is no whole number of at least 1, or the memory needs K = V.
        """
        sizes = self.axes(K, V)
        if self.nonparametric or self.solves_from_gram:
            return ()
        F = sizes["F"]
        if self.dual and isinstance(self.memory, Stack):
            return tuple((m.out, m.inp) for m in self.memory.maps(F, V) if not m.first)
        shapes, wrong = check_shapes(self.memory.title, self.memory.shapes(F, V))
        if wrong is not None:
            raise RecipeError(wrong)
        return shapes

    def row_widths(self, V: int) -> tuple[int, ...]:
        """Outputs of the maps whose weights are rows by key (`dual`).

        Args:
            V: value channels.

        Raises:
            RecipeError: a size that is no whole number of at least 1.
        """
        check_size("V", V)
        if not self.dual or not isinstance(self.memory, Stack):
            return ()
        return tuple(m.out for m in self.memory.maps(0, V) if m.first)

    def init_shapes(self, K: int, V: int, *, pairs: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of ``init``, without the head.

        Of a `dual` memory: ``pairs`` keys, the rows that go with them, then the other maps.

        Args:
            K: key channels.
            V: value channels.
            pairs: rows that a memory over a kernel's features starts with.

        Raises:
            RecipeError: a number that is no whole number of at least 1, or the memory needs K = V.
        """
        count = as_whole(pairs)
        if count is None or not 0 <= count <= LARGEST:
            raise RecipeError(
                f"pairs must be a whole number >= 0 of at most 64 bits, not {shown(pairs)}"
            )
        widths = (K, *self.row_widths(V)) if self.dual else ()
        return (*((count, width) for width in widths), *self.shapes(K, V))

    starts = init_shapes  # its former name

    def needs_init(self) -> bool:
        """Whether a zero memory would never learn, so that ``init`` is required."""
        return self.learns_init and self.memory.needs_init

    @property
    def learns_init(self) -> bool:
        """Whether a layer learns an initial memory: a deep one, from zeros where they learn."""
        return not self.nonparametric and not self.memory.linear

    def but(self, **changes: Any) -> Recipe:
        """This recipe with some choices replaced."""
        unknown = sorted(set(changes) - set(CHOICES))
        if unknown:
            raise RecipeError(f"a recipe has no choice {unknown[0]!r}; it has {', '.join(CHOICES)}")
        return dataclasses.replace(self, **changes)

    def canonical(self) -> Recipe:
        """The simplest recipe with the same meaning, by the rewrites of `recipe.rewrites`."""
        recipe = self
        while True:
            before = recipe
            for rewrite in REWRITES.values():
                recipe = rewrite(recipe)
            if recipe == before:
                return recipe

    @once_made
    def normal_form(self) -> str:
        """The canonical recipe in one line: the same for recipes that mean the same."""
        canonical = self.canonical()
        return normal_form({name: getattr(canonical, name) for name in CHOICES})

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every default written out and a ``schema`` number."""
        return {"schema": SCHEMA, **{name: getattr(self, name).to_dict() for name in CHOICES}}

    @classmethod
    def from_dict(cls, data: Any) -> Recipe:
        """Rebuild a recipe; choices left out take their defaults.

        Raises:
            RecipeError: another schema, an unknown choice or field, or an unregistered member.
        """
        if not isinstance(data, dict):
            raise RecipeError(f"a recipe is a mapping of choices, not {type(data).__name__}")
        schema: Any = data.get("schema", SCHEMA)
        if schema != SCHEMA or type(schema) is not int:  # true is 1, too
            raise RecipeError(
                f"this recipe has schema {shown(schema)} and this version of recollect reads "
                f"schema {SCHEMA}: install the version that wrote it"
            )
        unknown = sorted(set(data) - {"schema", *CHOICES}, key=str)
        if unknown:
            raise RecipeError(
                f"a recipe has no choice {shown(unknown[0])}; it has {', '.join(CHOICES)}"
            )
        with not_too_deep("members of a recipe"):
            return cls(**{name: decode(data[name]) for name in CHOICES if name in data})

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """`from_dict` of JSON text.

        Raises:
            RecipeError: the text is not JSON, names a key twice, or is not a recipe.
        """
        try:
            data = read_json(text)
        except ValueError as error:
            raise RecipeError(f"this recipe is not JSON: {error}") from None
        return cls.from_dict(data)


SENTENCE = 300
"""Characters of several reasons in one sentence."""


def _joined(reasons: list[str]) -> str:
    """The first reason, and others while it is a sentence that somebody reads."""
    if sum(map(len, reasons)) > SENTENCE:
        reasons = sorted(reasons, key=len)  # the shortest ones are as a rule the plainest
    said, left = reasons[0], False
    for reason in reasons[1:]:
        if len(said) + len(reason) <= SENTENCE:
            said = f"{said}; also: {reason}"
        else:
            left = True
    return f"{said}; and there are other reasons" if left else said
