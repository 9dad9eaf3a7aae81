"""Random recipes and fitting inputs, drawn from the registry of members.

A member joins every suite that draws from here by being registered: its declared fields (options,
flags, numbers, quantities, slots) say what may be drawn. Draws depend only on their index.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.contracts import outside
from torch import Tensor, nn

import recollect as rc
from recollect.choices.fields import Gate, Param, Range, domain
from recollect.choices.member import Member, all_members
from recollect.recipe import initial_params as draws
from recollect.recipe.recipe import CHOICES
from recollect.state.state import State

FACTORY = "contracts.two_layers"


@rc.memory.module_factory(FACTORY)
def two_layers(inputs: int, outputs: int) -> nn.Module:
    """What the suites use where a member asks for a module."""
    return nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, outputs, bias=False))


# -- recipes -----------------------------------------------------------------------------------


def drawn(cls: type[Member]) -> bool:
    """Whether the suites draw a member."""
    return cls.__module__.startswith("recollect.") or cls.__module__ == outside.__name__


def members(choice: str) -> list[type[Member]]:
    """Registered members of a choice by name: the library's, and those of `outside`.

    Members that single tests make stay out, so that a draw does not depend on what ran before.
    """
    found = [c for c in all_members().values() if drawn(c)]
    return sorted((c for c in found if choice in c.choices()), key=lambda c: c.__name__)


def _number(rng: random.Random, span: Range, reach: float) -> float:
    """A number not far (in units of ``reach``) from an end; now and then an end that belongs."""
    low, high = span.low, span.high
    ends = [end for end, is_open in ((low, span.low_open), (high, span.high_open))
            if end is not None and not is_open]  # fmt: skip
    if ends and rng.random() < 0.15:
        return float(rng.choice(ends))
    if low is not None and high is not None:
        return low + (0.05 + 0.9 * rng.random()) * (high - low)
    if low is not None:
        return low + reach * (0.2 + rng.random() ** 2)
    if high is not None:
        return high - reach * (0.2 + rng.random() ** 2)
    return rng.gauss(0.0, 0.5)


def _value(rng: random.Random, field: dataclasses.Field[Any], depth: int) -> Any:
    """A value that the field declares it would take."""
    rule = domain(field)
    if rule is None:
        spec = field.metadata.get("recollect")
        if spec is None:
            return field.default
        if rng.random() < 0.3:
            return _number(rng, spec.range, 0.5)  # rates: a step of 2 diverges
        return rng.choice(spec.kinds)
    if rule.optional and rng.random() < 0.4:
        return None
    if rule.kind == "integer":
        assert rule.range.low is not None
        return int(rule.range.low) + rng.choice((0, 0, 1, 1, 2, 3))
    if rule.kind == "number":
        return _number(rng, rule.range, 1.3)
    if rule.kind == "option":
        return rng.choice(rule.words)
    if rule.kind == "flag":
        return rng.random() < 0.5
    if rule.kind == "text":
        return FACTORY
    pool = members(rule.words[0])
    if rule.many:
        return tuple(
            draw_member(rng, rng.choice(pool), depth + 1) for _ in range(rng.choice((0, 1, 2)))
        )
    for _ in range(4):
        # A slot takes members of its kind that its owner may still refuse: try a few.
        try:
            return draw_member(rng, rng.choice(pool), depth + 1)
        except rc.RecipeError:
            continue
    return field.default


def draw_member(rng: random.Random, cls: type[Member], depth: int = 0) -> Member:
    """A member with random fields; raises `RecipeError` where they contradict each other."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING
        if required or (depth < 3 and rng.random() < 0.6):
            values[field.name] = _value(rng, field, depth)
    return cls(**values)


def draw(index: int, seed: int = 0) -> rc.Recipe:
    """The recipe of that index; raises `RecipeError` when its choices contradict each other."""
    rng = random.Random(1_000_003 * seed + index)
    chosen: dict[str, Any] = {}
    for name in CHOICES:
        if rng.random() < 0.6:
            chosen[name] = draw_member(rng, rng.choice(members(name)))
    if rng.random() < 0.5:
        chosen = _advised(rng, chosen)
    return rc.Recipe(**chosen)


def _advised(rng: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    """Follow what refusals say would fit, a few times: some choices only stand together."""
    for _ in range(5):
        try:
            rc.Recipe(**chosen)
        except rc.RecipeError as error:
            advice = re.findall(rf"({'|'.join(CHOICES)})\.([A-Z]\w*)\(", str(error))
            for choice, name in advice:
                if name in all_members() and rng.random() < 0.7:
                    chosen = {**chosen, choice: draw_member(rng, all_members()[name])}
        else:
            break
    return chosen


def valid(count: int, seed: int = 0) -> Iterator[tuple[int, rc.Recipe]]:
    """The first ``count`` indices whose recipes are valid, with the recipes."""
    index = 0
    while count:
        try:
            recipe = draw(index, seed)
        except rc.RecipeError:
            pass
        else:
            count -= 1
            yield index, recipe
        index += 1


def parts_of(recipe: rc.Recipe) -> Iterator[Member]:
    """The members of a recipe, and their members."""
    pending: list[Member] = list(recipe.members())
    while pending:
        part = pending.pop()
        yield part
        pending += part.parts()


# -- inputs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of one call of `recall`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    params: dict[str, Tensor]
    init: tuple[Tensor, ...] | None

    @property
    def T(self) -> int:
        return self.q.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a name that says what it is."""
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            **{f"gate {name}": x for name, x in self.gates.items()},
            **{f"param {name}": x for name, x in self.params.items()},
            **{f"init {i}": x for i, x in enumerate(self.init or ())},
        }

    def map(self, f: Any) -> Inputs:
        """Apply ``f`` to every tensor."""
        return Inputs(
            q=f(self.q),
            k=f(self.k),
            v=f(self.v),
            gates={name: f(x) for name, x in self.gates.items()},
            params={name: f(x) for name, x in self.params.items()},
            init=None if self.init is None else tuple(f(x) for x in self.init),
        )

    def put(self, changed: dict[str, Tensor]) -> Inputs:
        """Other numbers under the names of `tensors`."""
        named = iter({**self.tensors(), **changed}.values())
        return self.map(lambda _: next(named))

    def tokens(self, f: Any) -> Inputs:
        """Apply ``f`` to the tensors that have tokens."""
        gates = {name: f(x) for name, x in self.gates.items()}
        return dataclasses.replace(self, q=f(self.q), k=f(self.k), v=f(self.v), gates=gates)

    def cut(self, start: int, stop: int) -> Inputs:
        """Tokens ``start`` to ``stop``."""
        return self.tokens(lambda x: x[:, start:stop])

    def rows(self, row: int) -> Inputs:
        """One row of the batch."""
        return self.tokens(lambda x: x[row : row + 1])

    def leaves(self) -> Inputs:
        """The same numbers as leaves that ask for gradients."""
        return self.map(lambda x: x.detach().clone().requires_grad_())


def ill_posed(recipe: rc.Recipe) -> bool:
    """Whether slopes are fitted to any number of associations without a ridge.

    Then a draw may have fewer of them than coefficients, or barely as many: directions of rounding.
    """
    return bool(recipe.memory.degree) and recipe.algorithm.ridge == 0


def sizes(recipe: rc.Recipe, rng: random.Random) -> tuple[int, int]:
    """Small K and V that the recipe's memory accepts."""
    K, V = rng.randint(3, 5), rng.randint(3, 5)
    options = [(K, V), (K, K)]
    if recipe.features.finite:
        options.append((K, recipe.features.dim(K)))
    for K, V in options:
        try:
            recipe.shapes(K, V)
        except rc.RecipeError:
            continue
        return K, V
    raise AssertionError(f"no small sizes fit {recipe}")


def _gate(gate: Gate, shape: Sequence[int], g: torch.Generator) -> Tensor:
    u = torch.rand(*shape, generator=g, dtype=torch.float64)
    low, high = gate.range.low, gate.range.high
    if low is not None and high is not None:
        return low + (0.05 + 0.9 * u) * (high - low)
    if high is not None:
        return high - u
    if low is not None:
        return low + 0.02 + 0.4 * u
    return gate.init + torch.randn(*shape, generator=g, dtype=torch.float64) * 0.3


def _param(param: Param, shape: Sequence[int], g: torch.Generator) -> Tensor:
    u = torch.rand(*shape, generator=g, dtype=torch.float64)
    low, high = param.range.low, param.range.high
    if low is not None and high is not None:
        return low + (0.3 + 0.65 * u) * (high - low)
    if low is not None:
        return low + 0.02 + 0.4 * u
    jitter = torch.randn(*shape, generator=g, dtype=torch.float64) * 0.2
    return draws.start(param, tuple(shape), generator=g) + jitter


def inputs(
    recipe: rc.Recipe,
    *,
    B: int = 2,
    T: int = 7,
    H: int = 2,
    G: int = 1,
    K: int = 4,
    V: int = 4,
    seed: int = 0,
    zero: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Random arguments for a recipe: unit keys, gates and params inside their ranges.

    Args:
        G: query heads per memory.
        zero: start from a memory of zeros instead of a random one.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n = recipe.associations
    lead = (B, T, H, n) if n > 1 else (B, T, H)
    unit = nn.functional.normalize
    q, k = unit(normal(B, T, H * G, K), dim=-1), unit(normal(*lead, K), dim=-1)
    v = 0.5 * normal(*lead, V)
    axes = recipe.axes(K, V)
    gates: dict[str, Tensor] = {}
    for gate in recipe.gates():
        several = (n,) if recipe.per_association(gate) else ()
        shape = (B, T, H, *several, *(axes[axis] for axis in gate.axes))
        value = _gate(gate, shape, g)
        # A gate over K is a key: of unit length, as keys are, or its erasures diverge.
        gates[gate.name] = unit(value, dim=-1) if gate.axes == ("K",) else value
    params = {
        param.name: _param(param, (H, *(axes[axis] for axis in param.axes)), g)
        for param in recipe.params()
    }
    init = None
    if not recipe.nonparametric:
        size = 0.0 if zero else 0.4
        pairs = 0 if zero and not recipe.needs_init() else 3
        init = tuple(size * normal(H, *shape) for shape in recipe.starts(K, V, pairs=pairs))
    made = Inputs(q=q, k=k, v=v, gates=gates, params=params, init=init)
    return made.map(lambda x: x.to(dtype))


def small_inputs(recipe: rc.Recipe, index: int, *, longest: int = 9) -> Inputs:
    """Inputs of random small sizes, by index."""
    rng = random.Random(7 * index + 1)
    K, V = sizes(recipe, rng)
    return inputs(
        recipe,
        B=rng.randint(1, 2),
        T=rng.randrange(3, longest + 1, 2),
        H=rng.randint(1, 2),
        G=rng.choice((1, 1, 2)),
        K=K,
        V=V,
        seed=index,
        zero=index % 4 == 0 and not recipe.needs_init(),
    )


def smaller(recipe: rc.Recipe, x: Inputs, size: float = 0.05) -> Inputs:
    """The same inputs with smaller values, memories and positive gates."""
    scaled = {gate.name for gate in recipe.gates() if gate.range.low == 0 and not gate.range.high}
    gates = {name: size * a if name in scaled else a for name, a in x.gates.items()}
    init = None if x.init is None else tuple(size * a for a in x.init)
    return dataclasses.replace(x, v=size * x.v, gates=gates, init=init)


# -- running and comparing ---------------------------------------------------------------------


def run(recipe: rc.Recipe, x: Inputs, **options: Any) -> tuple[Tensor, State]:
    """One call of `recall`; ``init`` is left out when a state is given."""
    if options.get("state") is None:
        options.setdefault("init", x.init)
    y, state = rc.recall(recipe, x.q, x.k, x.v, x.gates, params=x.params, **options)
    assert state is not None
    return y, state


def split(
    recipe: rc.Recipe, x: Inputs, cuts: Sequence[int], methods: Sequence[str] = ("reference",),
    **options: Any,
) -> tuple[Tensor, State]:  # fmt: skip
    """The same sequence in pieces that end at ``cuts``, taking turns between ``methods``."""
    borders = [0, *cuts, x.T]
    state, outputs = None, []
    for piece, (start, stop) in enumerate(itertools.pairwise(borders)):
        y, state = run(
            recipe,
            x.cut(start, stop),
            state=state,
            method=methods[piece % len(methods)],
            **options,
        )
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def random_cuts(T: int, index: int) -> list[int]:
    """One to three borders; pieces may be empty."""
    rng = random.Random(index)
    return sorted(rng.randint(0, T) for _ in range(rng.randint(1, 3)))


def parts(state: State) -> dict[str, Tensor]:
    """A state's tensors by name, booleans and counts as floats."""
    found = {name: x for name, x in state.to_dict().items() if name != "sizes"}
    return {n: x if x.is_floating_point() else x.double() for n, x in found.items()}


def loss(y: Tensor, state: State) -> Tensor:
    """A fixed random projection of the outputs and of everything learned in the state."""
    g = torch.Generator().manual_seed(99)
    total = (y * torch.randn(y.shape, generator=g, dtype=torch.float64).to(y)).sum()
    learned = [*state.weights, *(w for name in sorted(state.slots) for w in state.slots[name])]
    if state.ones is not None:
        learned.append(state.ones)
    if state.dual is not None:
        slots = state.dual.slots
        learned += [*state.dual.rows, *(u for name in sorted(slots) for u in slots[name])]
    for x in learned:
        total = total + (x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x)).sum()
    return total


def gradients(
    recipe: rc.Recipe, x: Inputs, **options: Any
) -> tuple[Tensor, State, dict[str, Tensor]]:
    """Outputs, final state, and the gradient of `loss` by the name of each input."""
    leaves = x.leaves()
    y, state = run(recipe, leaves, **options)
    named = leaves.tensors()
    total = loss(y, state)
    if not total.requires_grad:
        return y, state, {name: torch.zeros_like(a) for name, a in named.items()}
    found = torch.autograd.grad(
        total, list(named.values()), allow_unused=True, materialize_grads=True
    )
    return y, state, dict(zip(named, found, strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / max(1, ‖expected‖); NaN counts as infinitely wrong."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.numel():
        return 0.0
    a, b = found.detach().double(), expected.detach().double()
    wrong = float((a - b).norm() / b.norm().clamp_min(1.0))
    return wrong if wrong == wrong else float("inf")


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error among tensors of the same names, and whose it is."""
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    return max(((error(found[n], expected[n]), n) for n in expected), default=(0.0, ""))
