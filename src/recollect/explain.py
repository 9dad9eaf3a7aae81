"""A recipe in words and equations: what it solves, how it moves, which engine runs it and why.

Every line is made of what the members say about themselves (signed terms, see
`recollect.choices.terms`), so a member of one's own explains itself like any other::

    >>> print(rc.explain("gated_delta_net"))
    gated_delta_net
    problem  min  ½‖W k_t − v_t‖²
    write    W_t = α_t W_(t−1) − η_t (α_t W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
    read     y_t = W_t q_t
    engine   linear (triangular solve)
    ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from recollect.choices.member import Gate, Member, Param, RecipeError, domain
from recollect.choices.terms import Gradient, Term, Terms, grouped, written
from recollect.cost import Cost, cost, readable
from recollect.engines.select import select
from recollect.recipe import CHOICES, Recipe

if TYPE_CHECKING:
    from recollect.options import LayerOptions

__all__ = ["PROPERTIES", "Explanation", "Named", "explain", "named", "properties"]

PROPERTIES = {
    "dynamic decay": "what is forgotten depends on the token",
    "deep memory": "the memory is not linear in its weights",
    "nonlinear capacity": "the number of features grows faster than the key's size",
    "locally optimal": "the step uses, or approximates, second-order information",
    "flexible context": "a step sees more than the current association",
}
"""The five questions of ATLAS table 1, as they are asked of a recipe."""

_SIZE = 64  # K and V of the numbers that an explanation quotes


class _Preset(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def options(self) -> LayerOptions: ...


@dataclass(frozen=True, kw_only=True)
class Named:
    """A system of the literature with the same recipe.

    Attributes:
        row: its number in the table of architectures.
        apart: the layer options in which the systems named together differ.
    """

    name: str
    title: str
    row: int
    apart: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.apart:
            return self.name
        return f"{self.name} ({', '.join(f'{key}={_plain(x)}' for key, x in self.apart.items())})"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `explain` found; ``str()`` lays it out.

    Attributes:
        title: the preset's name, or the recipe as one would type it.
        problem: the objective at time t.
        write, read: equations, one per line.
        where: what their symbols mean.
        engine, how: which engine runs the recipe, and in which way.
        refused: why each faster engine does not, by name.
        named: systems with the same recipe, sizes apart. ``of``: how many were looked at.
        gates, params: the numbers and tensors that `recollect.recall` asks for.
        init: shapes of the initial memory that it needs, if it does.
        state: what is remembered between calls, by part.
        properties: the answers to `PROPERTIES`.
        cost: the numbers behind the cost line, at K = V = 64.
    """

    title: str
    recipe: Recipe
    problem: str
    write: tuple[str, ...]
    read: tuple[str, ...]
    where: tuple[str, ...]
    engine: str
    how: str
    refused: Mapping[str, tuple[str, ...]]
    named: tuple[Named, ...]
    of: int
    gates: tuple[Gate, ...]
    params: tuple[Param, ...]
    init: tuple[str, ...]
    state: tuple[str, ...]
    properties: Mapping[str, bool]
    cost: Cost | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.title,
            "recipe": self.recipe.to_dict(),
            "problem": self.problem,
            "write": list(self.write),
            "read": list(self.read),
            "where": list(self.where),
            "engine": self.engine,
            "how": self.how,
            "refused": {name: list(reasons) for name, reasons in self.refused.items()},
            "named": [
                {"name": n.name, "title": n.title, "row": n.row, "apart": dict(n.apart)}
                for n in self.named
            ],
            "gates": [_asked(gate) for gate in self.gates],
            "params": [_asked(param) for param in self.params],
            "init": list(self.init),
            "state": list(self.state),
            "properties": dict(self.properties),
            "cost": None if self.cost is None else self.cost.to_dict(),
        }

    def __str__(self) -> str:
        lines = [self.title]
        for label, block in self._blocks():
            for index, line in enumerate(block):
                lines.append(f"{label if index == 0 else '':<9}{line}")
        return "\n".join(lines)

    def _blocks(self) -> Iterator[tuple[str, list[str]]]:
        yield "problem", [f"min  {self.problem}"]
        yield "write", list(self.write)
        yield "read", list(self.read)
        yield "where", list(self.where)
        refused = [f"not {name}: {reasons[0]}" for name, reasons in self.refused.items()]
        yield "engine", [f"{self.engine} ({self.how})", *refused]
        if self.named and [n.name for n in self.named] != [self.title]:
            yield "named", [", ".join(map(str, self.named))]
        elif not self.named:
            yield "named", [f"none of the {self.of}"]
        yield "needs", list(self._needs())
        yield "state", list(self.state)
        yield "cost", list(self._cost())
        for label, answer in (("has", True), ("lacks", False)):
            found = [name for name, holds in self.properties.items() if holds is answer]
            if found:
                yield label, [", ".join(found)]

    def _needs(self) -> Iterator[str]:
        for gate in self.gates:
            travels = ", of the association" if gate.travels else ""
            yield f"gate {gate.name} {_shape('B, T, H', gate.axes)} {_span(gate)}{travels}"
        for param in self.params:
            yield f"param {param.name} {_shape('H', param.axes)} {_span(param)}"
        if self.init:
            yield f"init {', '.join(self.init)}: a memory of zeros would never learn"

    def _cost(self) -> Iterator[str]:
        if self.cost is None:
            return
        token = readable(self.cost.per_token, "FLOP")
        decode = readable(self.cost.decode, "FLOP")
        sizes = f"K = V = {_SIZE}, T = {self.cost.sizes['T']}"
        yield f"{token} per token and head, {decode} to decode one, at {sizes}"
        yield from self.cost.notes


def explain(recipe: Recipe | str | _Preset, *, method: str = "auto") -> Explanation:
    """What a recipe solves, how it moves, and how it runs.

    Args:
        recipe: a recipe, the name of an architecture of the zoo, or a preset.
        method: explain as if this engine had been asked for.

    Raises:
        RecipeError: an unknown name, or a method that cannot run the recipe.
    """
    title, options, found = _resolve(recipe)
    selection = select(found, method)
    matches, of = named(found, options)
    return Explanation(
        title=title,
        recipe=found,
        problem=_problem(found),
        write=_write(found),
        read=_read(found),
        where=_where(found),
        engine=selection.engine.name,
        how=selection.how,
        refused={name: tuple(reasons) for name, reasons in selection.refused.items()},
        named=matches,
        of=of,
        gates=found.gates(),
        params=found.params(),
        init=_init(found),
        state=_state(found),
        properties=properties(found),
        cost=_price(found, method),
    )


def _resolve(recipe: object) -> tuple[str, LayerOptions | None, Recipe]:
    if isinstance(recipe, str):
        from recollect import zoo

        recipe = zoo.get(recipe)
    if isinstance(recipe, Recipe):
        return _typed(recipe), None, recipe
    name, found = getattr(recipe, "name", None), getattr(recipe, "recipe", None)
    if not isinstance(name, str) or not isinstance(found, Recipe):
        raise RecipeError(
            "explain takes a Recipe, the name of an architecture or a preset, not "
            f"{type(recipe).__name__}"
        )
    return name, getattr(recipe, "options", None), found


def _typed(recipe: Recipe) -> str:
    """The recipe as one would type it, defaults left out."""
    plain = Recipe()
    said = [
        f"{name}={getattr(recipe, name).brief}"
        for name in CHOICES
        if getattr(recipe, name) != getattr(plain, name)
    ]
    return f"Recipe({', '.join(said)})"


# -- equations -----------------------------------------------------------------------------------


def _index(recipe: Recipe) -> str:
    return "tj" if recipe.associations > 1 else recipe.context.index


def _problem(recipe: Recipe) -> str:
    i = _index(recipe)
    x = "k_i" if recipe.nonparametric else recipe.features.lift(f"k_{i}")
    loss = recipe.bias.term(recipe.memory.at(x, raw=f"k_{i}"), f"v_{i}")
    if i == "t":
        return written(_over(recipe, loss, apart=True))
    if i == "tj":
        total = written(loss)
        return f"Σ_(j≤{recipe.associations}) {total if len(loss) == 1 else f'({total})'}"
    return written(_over(recipe, loss))


def _over(recipe: Recipe, terms: Terms, *, apart: bool = False) -> Terms:
    """A sum of one association as terms of the whole context: one term, or one for each."""
    total = recipe.context.total
    if len(terms) > 1 and not apart:
        return (Term((total(f"({written(terms)})"),)),)
    return tuple(Term((total(" ".join(t.factors)),), t.coefficient) for t in terms)


def _gradient(recipe: Recipe, point: str) -> Gradient:
    """g_t at the weights ``point``, over the context."""
    memory, context = recipe.memory, recipe.context
    i = _index(recipe)
    x, v = recipe.features.lift(f"k_{i}"), f"v_{i}"
    if not memory.linear or memory.outer("e", x) is None:
        alone = Term((context.total(f"∇ℓ({point}; {x}, {v})"),))
        return Gradient(terms=(alone,), compact=(alone,))
    error = recipe.bias.error_terms(memory.at(x, W=point), v)
    error = tuple(term for term in error if term.coefficient != 0)
    written_at = [memory.outer(grouped(" ".join(term.factors)), x) or "" for term in error]
    parts = _over(
        recipe,
        tuple(Term((text,), t.coefficient) for text, t in zip(written_at, error, strict=True)),
        apart=True,
    )
    compact = parts
    if len(error) > 1:
        compact = _over(recipe, (Term((memory.outer(f"({written(error)})", x) or "",)),))
    affine = recipe.bias.affine
    sees = affine is not None and affine[0] != 0
    return Gradient(
        terms=parts if context.horizon == 1 else compact,
        compact=compact,
        erase=parts[:1] if sees else (),
        write=parts[1:] if sees else parts,
    )


def _probed(recipe: Recipe, point: str) -> tuple[Terms, Terms]:
    """The erasure and the write of a probe, as terms added to the memory."""
    probe, affine = recipe.bias.probe, recipe.bias.affine
    assert probe is not None and affine is not None  # a probe needs an affine bias
    lift, i = recipe.features.lift, _index(recipe)
    key, own = lift(f"k_{i}"), lift(f"w_{i}" if probe.at == "token" else f"k_{i}")
    into = own if probe.write == "probe" else key
    rate = probe.symbol("rate", i)
    error = grouped(recipe.memory.at(own, W=point))
    if probe.per == "key" and isinstance(rate, str):
        erase = Term((error, f"({rate} ⊙ {into})ᵀ"), -affine[0])
    else:
        erase = Term((error, f"{into}ᵀ")).times(rate, -affine[0])
    write = Term((f"v_{i}", f"{key}ᵀ")).times(recipe.algorithm.pace(i), affine[1])
    return (erase,), (write,)


def _write(recipe: Recipe) -> tuple[str, ...]:
    memory, retention, algorithm = recipe.memory, recipe.retention, recipe.algorithm
    if recipe.nonparametric:
        drop = "" if recipe.history is None else f", drop (k_i, v_i) of i ≤ t−{recipe.history}"
        return (f"keep (k_t, v_t){drop}",)
    if recipe.context.horizon is None:
        return _full_pass(recipe)
    if algorithm.reduce == "mean":
        return _averaged(recipe)
    rebuilt = retention.linked or not retention.additive
    W, A = memory.letter, "A" if retention.linked and retention.additive else memory.letter
    several = recipe.associations > 1
    at = "tj" if several else "t"
    old, new = (f"{A}_(t,j−1)", f"{A}_(t,j)") if several else (f"{A}_(t−1)", f"{A}_t")
    vector, decay = memory.diagonal, retention.decay
    point = f"{W}°" if algorithm.batch > 1 else f"{W}_(t,j−1)" if several else f"{W}_(t−1)"
    if decay is not None and decay.when == "before":
        point = str(decay.on(point, at, vector=vector))
    if recipe.bias.probe is not None:
        erase, write = _probed(recipe, point)
        lines, step = (), (*erase, *write)
    else:
        gradient = _gradient(recipe, point)
        lines, step = algorithm.moves(gradient, at)
    equations = [*lines]
    if algorithm.every == "batch":
        equations += _at_border(recipe, step, A)
    else:
        moves = retention.moves(old, new, step, at=at, vector=vector)
        if rebuilt and retention.linked and retention.additive:
            moves = (f"{moves[0]},   {W}_t = {retention.text()}", *moves[1:])
        equations += [";   ".join((*lines, *moves))] if len(lines) == 1 else moves
        equations = equations[1:] if len(lines) == 1 else equations
    if several:
        n = recipe.associations
        equations.append(f"j = 1..{n};   {A}_(t,0) = {A}_(t−1),   {A}_t = {A}_(t,{n})")
        if decay is not None:
            equations.append("the decay acts on the first sub-step")
    equations += _rate(recipe)
    equations += _borders(recipe, " ".join(equations))
    return tuple(equations)


def _rate(recipe: Recipe) -> list[str]:
    """η_t where it is made from the key."""
    algorithm, affine = recipe.algorithm, recipe.bias.affine
    size = getattr(algorithm, "size", None)
    if not algorithm.keyed or affine is None or not callable(size):
        return []
    return [f"η_t = {size(recipe.features.lift('k_t'), affine[0])}"]


def _borders(recipe: Recipe, text: str) -> list[str]:
    """What W° is, and when the link acts."""
    W, b, retention = recipe.memory.letter, recipe.algorithm.batch, recipe.retention
    if b == 1:
        return []
    first = f"{W}° = {W} at the start of the inner batch of {b}"
    if recipe.at_border:
        if retention.settles_first:
            return [f"{first}, and link(A) after its first token; the link acts at its end"]
        return [f"{first}; the link acts at its end"]
    return [first] if f"{W}°" in text else []


def _at_border(recipe: Recipe, step: Terms, A: str) -> list[str]:
    """One update at the end of every inner batch; tokens in between read W°."""
    retention, algorithm, W = recipe.retention, recipe.algorithm, recipe.memory.letter
    decay, b = retention.decay, algorithm.batch
    start = f"{A}°"
    kept = Term((start,)) if decay is None else decay.on(start, "b")
    moved = tuple(
        Term(tuple(f.replace("η_t", "η̄") for f in term.factors), term.coefficient) for term in step
    )
    line = f"{A}_t = {written((kept, *moved))} at the last token of the inner batch"
    if retention.linked:
        line += f",   {W}_t = {retention.text()}"
    bars = [] if decay is None or not isinstance(decay.rate, str) else ["α_b = Π α_t"]
    bars += ["η̄ = mean η_t"] if any("η̄" in f for t in moved for f in t.factors) else []
    over = [f"{', '.join(bars)} over the inner batch; tokens in it read {W}°"] if bars else []
    return [line, *(over or [f"tokens in the inner batch of {b} read {W}°"])]


def _averaged(recipe: Recipe) -> tuple[str, ...]:
    """TTT's mean over the open inner batch."""
    algorithm, W, b = recipe.algorithm, recipe.memory.letter, recipe.algorithm.batch
    x = recipe.features.lift("k_s")
    gradient = Term((f"∇ℓ({W}°; {x}, v_s)",)).times(algorithm.pace("s"))
    offset, place = algorithm.symbol("offset"), "1/(place in the batch)"
    if offset == 0.0:
        tau = place
    else:
        tau = f"max(0, {written((Term((place,)), Term(()).times(offset)))})"
    return (
        f"{W}_t = {W}° − τ_t Σ_(s≤t) {gradient}",
        f"τ_t = {tau}; {W}° and s begin with the inner batch of {b}",
    )


def _full_pass(recipe: Recipe) -> tuple[str, ...]:
    """Gradient steps on all of the past, from the initial memory, at every token."""
    W, n = recipe.memory.letter, recipe.algorithm.steps
    if n == 1:
        step = _gradient(recipe, f"{W}_0").scaled(recipe.algorithm.pace(), -1.0)
        return (f"{W}_t = {written((Term((f'{W}_0',)), *step))}",)
    step = _gradient(recipe, W).scaled(recipe.algorithm.pace(), -1.0)
    return (f"{W} ← {written((Term((W,)), *step))}", f"{n} times from {W}_0, at every t")


def _read(recipe: Recipe) -> tuple[str, ...]:
    memory, read, W = recipe.memory, recipe.memory.read, recipe.memory.letter
    if recipe.nonparametric:
        return (_attend(recipe),)
    q, k = recipe.features.lift("q_t"), recipe.features.lift("k_t")
    when = f"{W}_(t−1)" if read.when == "before" else f"{W}_t"
    found = memory.at(q, raw="q_t", W=when)
    n = "n_(t−1)" if read.when == "before" else "n_t"
    notes: list[str] = []
    if read.normalize != "none":
        below = f"({n}·{q})" if read.normalize == "sum" else f"max(|{n}·{q}|, 1)"
        found = f"{found} / {below}"
        zero = "; y_t = 0 where that is 0" if read.normalize == "sum" else ""
        notes.append(f"n_t: the write with 1 in place of v_t{zero}")
    if read.bonus != 0.0:
        u = read.symbol("bonus")
        match = f"⟨{q}, u ⊙ {k}⟩" if isinstance(u, str) else f"⟨{q}, {k}⟩"
        more = Term((match, "v_t"), 1.0 if isinstance(u, str) else u)
        found = written((Term((found,)), more))
    if recipe.algorithm.every == "batch":
        found = found.replace(f"{W}_t", f"{W}°")
    elif recipe.at_border:
        notes.append(f"inside the batch {W}_t is {W}° decayed plus the steps, without the link")
    return (f"y_t = {found}", *notes)


def _attend(recipe: Recipe) -> str:
    span = getattr(recipe.context, "span", "Σ_(i≤t)")
    total = f"{span} s(k_i, q_t)"
    affine = recipe.bias.affine
    normalized = affine is not None and affine[0] != 0
    return f"y_t = {total} v_i" + (f" / {total}" if normalized else "")


def _where(recipe: Recipe) -> tuple[str, ...]:
    """What the members' symbols mean."""
    notes = [note for part in recipe.members() for note in part.notes()]
    decay = recipe.retention.decay
    if not recipe.nonparametric and not recipe.memory.linear:
        maps = ", ".join(_names(recipe))
        if maps:
            notes.insert(0, f"W: {maps}, in order of application")
        if decay is not None and decay.per in ("key", "key_value"):
            notes.append("channels of keys decay in the first map, other maps decay by their mean")
        if decay is not None and decay.per in ("value", "key_value"):
            notes.append("channels of values decay in the last map, other maps decay by their mean")
        if getattr(recipe.algorithm, "per", "head") == "value":
            notes.append("rates of value channels act in the last map, other maps take their mean")
    return tuple(dict.fromkeys(notes))


def _names(recipe: Recipe) -> list[str]:
    maps = getattr(recipe.memory, "maps", None)
    return [m.name for m in maps(1, 1)] if callable(maps) else []  # type: ignore[attr-defined]


# -- state, needs, cost --------------------------------------------------------------------------


def _shape(lead: str, axes: tuple[str, ...]) -> str:
    return f"[{', '.join((lead, *axes))}]"


def _span(item: Gate | Param) -> str:
    return str(item.range).replace(">=", "≥").replace("<=", "≤")


def _asked(item: Gate | Param) -> dict[str, Any]:
    lead = "B, T, H" if isinstance(item, Gate) else "H"
    found: dict[str, Any] = {
        "name": item.name,
        "owner": item.owner,
        "shape": _shape(lead, item.axes),
        "range": str(item.range),
        "init": list(item.init) if isinstance(item.init, tuple) else item.init,
    }
    return {**found, "travels": item.travels} if isinstance(item, Gate) else found


def _init(recipe: Recipe) -> tuple[str, ...]:
    return tuple(_shapes(recipe)) if recipe.needs_init() else ()


def _shapes(recipe: Recipe) -> list[str]:
    """The memory's weights of one head, with numbers at K = V = 64."""
    names = _names(recipe)
    shapes = recipe.shapes(_SIZE, _SIZE)
    letters = names if len(names) == len(shapes) else [recipe.memory.letter] * len(shapes)
    return [f"{name} [{'×'.join(map(str, s))}]" for name, s in zip(letters, shapes, strict=True)]


def _state(recipe: Recipe) -> tuple[str, ...]:
    """What is remembered, and its size per row and head."""
    try:
        price = cost(recipe, K=_SIZE, V=_SIZE, T=1)
    except RecipeError:
        return ("of a size that K = V does not fit",)
    parts: list[str] = []
    if recipe.nonparametric or recipe.context.horizon is None:
        span = recipe.span
        parts.append("all associations" if span is None else f"the last {span} associations")
    if not recipe.nonparametric:
        parts += [", ".join(_shapes(recipe))]
        parts += [f"{name} of the same shape" for name in recipe.algorithm.slots]
        if recipe.memory.read.normalize != "none":
            parts.append("its normaliser")
        if recipe.span:
            parts.append(f"{recipe.span} open association{'s' * (recipe.span > 1)}")
    size = readable(price.grows or price.state_bytes, "B")
    per = "per token, row and head" if price.grows else "per row and head"
    return (f"{'; '.join(parts)}: {size} {per} at K = V = {_SIZE}",)


def _price(recipe: Recipe, method: str) -> Cost | None:
    try:
        return cost(recipe, K=_SIZE, V=_SIZE, method=method)
    except RecipeError:
        return None


# -- the five properties -------------------------------------------------------------------------


def properties(recipe: Recipe) -> dict[str, bool]:
    """The five properties of ATLAS table 1, by the questions of `PROPERTIES`."""
    gates = {gate.name for gate in recipe.gates()}
    features, nonparametric = recipe.features, recipe.nonparametric
    if features.finite and not nonparametric:
        # Linear growth doubles with the key's size; a polynomial does more.
        grows = features.dim(2 * _SIZE) > 2 * features.dim(_SIZE)
    else:
        grows = True
    return {
        "dynamic decay": any(name.startswith("log_decay") for name in gates),
        "deep memory": not recipe.memory.linear and not nonparametric,
        "nonlinear capacity": grows,
        "locally optimal": recipe.algorithm.curvature,
        "flexible context": recipe.context.horizon != 1,
    }


# -- names ---------------------------------------------------------------------------------------


def fingerprint(recipe: Recipe) -> Any:
    """What two recipes of one name share: everything but sizes.

    Integers that only make the same thing larger are left out; of others (steps, depth) it counts
    whether they are at their least.
    """
    canonical = recipe.canonical()
    return tuple(_print(getattr(canonical, name)) for name in CHOICES)


def _print(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(_print(item) for item in part)
    if not isinstance(part, Member):
        return part
    found: list[Any] = [type(part).__name__]
    for item in part._fields():
        rule, value = domain(item), getattr(part, item.name)
        if rule is not None and rule.kind == "integer":
            if rule.size:
                continue
            value = value is not None and value > (rule.range.low or 0)
        found.append((item.name, _print(value)))
    return tuple(found)


def named(recipe: Recipe, options: LayerOptions | None = None) -> tuple[tuple[Named, ...], int]:
    """Architectures of the zoo with the same recipe, and how many there are.

    Args:
        options: of the layer, to name first the systems that share them.
    """
    from recollect import zoo

    wanted = fingerprint(recipe)
    presets = [zoo.get(name) for name in zoo.names()]
    same = [preset for preset in presets if fingerprint(preset.recipe) == wanted]
    if options is not None:
        same.sort(key=lambda preset: preset.options != options)
    flat = [dict(_leaves(preset.options.to_dict())) for preset in same]
    keys = dict.fromkeys(key for f in flat for key in f)
    differ = [key for key in keys if len({_plain(f.get(key)) for f in flat}) > 1]
    found = [
        Named(
            name=preset.name,
            title=preset.title,
            row=preset.row,
            apart={key: f[key] for key in differ if f.get(key) is not None},
        )
        for preset, f in zip(same, flat, strict=True)
    ]
    return tuple(found), len(presets)


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
