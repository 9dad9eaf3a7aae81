"""A recipe in words and equations: its problem, its update, its engine and why.

Every line is made of what the members say about themselves (signed terms, see
`recollect.choices.equation_terms`), so a member of one's own explains itself like any other::

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
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from recollect.blocks.cost import cost
from recollect.blocks.layers import MixerLayer, layer_spec, memory_layers
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.choices.matmul_precision import check_precision_name
from recollect.costs import Cost
from recollect.engines.base import Engine
from recollect.engines.fla import PACKAGE, offer
from recollect.engines.select import select_engine
from recollect.explanation.composition import Composition, compose
from recollect.explanation.equations import legend, map_names, objective, read_rule, write_rule
from recollect.explanation.model_explanation import (
    LayerGroup,
    ModelExplanation,
    layer_title,
    layers_in_groups,
)
from recollect.explanation.naming import PROPERTIES, Named, fingerprint, named, properties
from recollect.fields import Gate, Param
from recollect.functional.binding import bind
from recollect.layer.checks import check_options
from recollect.layer.inspection import MemorySpec
from recollect.layer.options import GateOptions, LayerOptions
from recollect.messages import RecipeError
from recollect.parallel.strategies import strategy_for
from recollect.recipe.recipe import Recipe
from recollect.recipe.stability import step_limit
from recollect.report.formatting import format_si
from recollect.report.notebook import definition_table
from recollect.theory import findings

if TYPE_CHECKING:
    from recollect.zoo.preset import Preset

__all__ = [
    "PROPERTIES",
    "Explanation",
    "Named",
    "explain",
    "fingerprint",
    "named",
    "properties",
]

EQUATIONS = ("problem", "write", "read", "where")
_SIZE = 64  # K and V of the numbers that an explanation quotes


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `explain` found; ``str()`` lays it out.

    Attributes:
        title: the preset's name, or the recipe as one would type it.
        problem: the objective at time t.
        write, read: equations, one per line.
        where: what their symbols mean.
        engine, how: which engine runs the recipe, and in which way.
        backend: the operator of flash-linear-attention that takes the place of the engine's
            products on CUDA, or why none does.
        refused: why each faster engine does not, by name.
        fidelity: of a preset, how close it is to its source; empty for a recipe.
        named: systems with the same recipe, sizes apart. ``of``: how many were looked at.
        gates, params: the numbers and tensors that `recollect.recall` asks for.
        units: by name, of the numbers that a layer states in a unit of its own: what the recipe's
            number then is.
        init: shapes of the initial memory that it needs, if it does.
        state: what is remembered between calls, by part.
        properties: the answers to `PROPERTIES`.
        cost: the numbers behind the cost line, at K = V = 64.
        ranks: how its memory goes from rank to rank where a sequence lies along several
            (`recollect.parallel`), and why so.
        theory: what `recollect.theory` says of it at these sizes, with sources.
        products: what products multiply, where a precision was asked for, and why no less.

    Examples:
        >>> found = rc.explain(rc.Recipe())
        >>> found.problem
        '½‖W k_t − v_t‖²'
        >>> found.engine
        'linear'
        >>> found.gates[0].name
        'lr'
    """

    title: str
    recipe: Recipe
    problem: str
    write: tuple[str, ...]
    read: tuple[str, ...]
    where: tuple[str, ...]
    engine: str
    how: str
    backend: str
    refused: Mapping[str, tuple[str, ...]]
    named: tuple[Named, ...]
    of: int
    gates: tuple[Gate, ...]
    params: tuple[Param, ...]
    init: tuple[str, ...]
    state: tuple[str, ...]
    properties: Mapping[str, bool]
    cost: Cost | None
    ranks: str
    theory: tuple[str, ...] = ()
    fidelity: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    products: str = ""

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
            "backend": self.backend,
            "refused": {name: list(reasons) for name, reasons in self.refused.items()},
            "fidelity": self.fidelity,
            "named": [
                {"name": n.name, "title": n.title, "apart": dict(n.apart)} for n in self.named
            ],
            "gates": [_declared(gate) for gate in self.gates],
            "params": [_declared(param) for param in self.params],
            "units": dict(self.units),
            "init": list(self.init),
            "state": list(self.state),
            "properties": dict(self.properties),
            "cost": None if self.cost is None else self.cost.to_dict(),
            "ranks": self.ranks,
            "theory": list(self.theory),
            "products": self.products,
        }

    @property
    def blocks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Labels and their lines, in the order of printing."""
        return tuple((label, tuple(lines)) for label, lines in self._blocks() if lines)

    def __str__(self) -> str:
        lines = [self.title]
        for label, block in self.blocks:
            for index, line in enumerate(block):
                lines.append(f"{label if index == 0 else '':<9}{line}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return definition_table(f"`{self.title}`", self._blocks(), equations=EQUATIONS)

    @property
    def equations(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Problem, write and read rule, and what their symbols mean: a name and lines each."""
        blocks = dict(self._blocks())
        return tuple((name, tuple(blocks[name])) for name in EQUATIONS if blocks[name])

    def _blocks(self) -> Iterator[tuple[str, list[str]]]:
        yield "problem", [f"min  {self.problem}"]
        yield "write", list(self.write)
        yield "read", list(self.read)
        yield "where", list(self.where)
        refused = [f"not {name}: {reasons[0]}" for name, reasons in self.refused.items()]
        refused += self.backend.splitlines()
        if self.products:
            refused.insert(0, f"products of {self.products}")
        yield "engine", [f"{self.engine} ({self.how})", *refused]
        yield "fidelity", [self.fidelity] if self.fidelity else []
        if self.named and [n.name for n in self.named] != [self.title]:
            yield "named", [", ".join(map(str, self.named)), *self._beside()]
        elif not self.named:
            yield "named", [f"none of the {self.of}"]
        yield "needs", list(self._needs())
        yield "state", list(self.state)
        yield "cost", list(self._cost())
        yield "ranks", [self.ranks]
        yield "theory", list(self.theory)
        for label, answer in (("has", True), ("lacks", False)):
            names = [name for name, holds in self.properties.items() if holds is answer]
            if names:
                yield label, [", ".join(names)]

    def _beside(self) -> Iterator[str]:
        """What a bare recipe lacks of the systems with its name."""
        own = [one.name for one in self.named if one.options]
        if own and self.title == self.recipe.brief:
            layers = f"the layer of {own[0]} has" if len(own) == 1 else "their layers have"
            yield f"{layers} options beside the recipe: rc.zoo.get({own[0]!r}).options"

    def _needs(self) -> Iterator[str]:
        for gate in self.gates:
            owner = ", of the association" if gate.per_association else ""
            unit = f"; {self.units[gate.name]}" if gate.name in self.units else ""
            yield f"gate {gate.name} {_shape('B, T, H', gate.axes)} {_span(gate)}{owner}{unit}"
        for param in self.params:
            drawn = f", drawn ({param.draw})" if param.draw else ""
            fixed = "" if param.learned else ", not trained"
            unit = f"; {self.units[param.name]}" if param.name in self.units else ""
            yield f"param {param.name} {_shape('H', param.axes)} {_span(param)}{drawn}{fixed}{unit}"
        if self.init:
            yield f"init {', '.join(self.init)}: a memory of zeros would never learn"

    def _cost(self) -> Iterator[str]:
        if self.cost is None:
            return
        token = format_si(self.cost.per_token, "FLOP")
        decode = format_si(self.cost.decode, "FLOP")
        sizes = f"K = V = {_SIZE}, T = {self.cost.sizes['T']}"
        yield f"{token} per token and head, {decode} to decode one, at {sizes}"
        yield from self.cost.pace
        yield from self.cost.notes


@overload
def explain(
    recipe: Recipe,
    *,
    engine: str = "auto",
    precision: str | None = None,
    full: bool = False,
) -> Explanation: ...
@overload
def explain(
    recipe: Mixer,
    *,
    engine: str = "auto",
    precision: str | None = None,
    full: bool = False,
) -> Composition: ...
@overload
def explain(
    recipe: nn.Module,
    *,
    engine: str = "auto",
    precision: str | None = None,
    full: bool = False,
) -> ModelExplanation: ...
@overload
def explain(
    recipe: str | Preset, *, engine: str = "auto", precision: str | None = None, full: bool = False
) -> Any: ...


def explain(
    recipe: Any, *, engine: str = "auto", precision: str | None = None, full: bool = False
) -> Explanation | Composition | ModelExplanation:
    """Explain the problem, the update and the engine of a recipe, or of all recipes of a mixer.

    Args:
        recipe: a recipe, a mixer, the name of an architecture of the zoo, or a preset; or a layer,
            or a model that has some, whose equal layers are explained once.
        engine: engine to explain, as for `recollect.recall`.
        precision: precision of products to explain, as for `recollect.recall`.
        full: whether the scales of normalised steps are equations, and not descriptions alone.

    Raises:
        RecipeError: an unknown name, an engine that cannot run the recipe, layer options that do
            not fit it, or a model without memory layers.
        ValueError: an unknown precision.

    Examples:
        >>> print(rc.explain("gated_delta_net").write[0])
        W_t = α_t W_(t−1) − η_t (α_t W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
        >>> rc.explain(rc.Recipe(bias=rc.bias.Huber())).engine
        'deep'
        >>> print(str(rc.explain("titans_mac")).splitlines()[1])
        composes MemoryAsContext(memory, attention, segment=128, persistent=8)
    """
    check_precision_name(precision)
    if isinstance(recipe, nn.Module):
        return _explain_model(recipe, engine, precision, full=full)
    layers = _composed(recipe)
    if layers is not None:
        title, mixers = layers
        parts: dict[str, Explanation] = {}
        for name, mixer in mixers.items():
            for path, leaf in mixer.leaves.items():
                key = path if len(mixers) == 1 else f"{name}.{path}" if path else name
                parts[key] = _explained(leaf, engine, precision, full=full)
        return compose(title, mixers, parts, engine, fidelity=_fidelity(recipe))
    return _explained(recipe, engine, precision, full=full)


def _explain_model(model: nn.Module, engine: str, precision: str | None, *, full: bool) -> Any:
    """Explain a layer, or the groups of equal layers of a model."""
    layers, groups = memory_layers(model, "explain"), list[LayerGroup]()
    for layer, names in layers_in_groups(layers):
        spec = layer_spec(layer)
        inner: Any = layer.mixer if isinstance(layer, MixerLayer) else _with_options(spec)
        explanation = explain(
            inner,
            engine=spec.engine if engine == "auto" else engine,
            precision=spec.precision if precision is None else precision,
            full=full,
        )
        if names == ("",):
            return explanation
        sizes = {"H": spec.num_kv_heads, "K": spec.head_dim, "V": spec.value_dim}
        group = LayerGroup(
            title=layer_title(layer), names=names, sizes=sizes, explanation=explanation
        )
        groups.append(group)
    return ModelExplanation(model=type(model).__name__, groups=tuple(groups))


def _with_options(spec: MemorySpec) -> Recipe | RecipeMixer:
    """Return the recipe of a layer, with the options if it has some."""
    if spec.options is None:
        return spec.recipe
    return RecipeMixer(recipe=spec.recipe, options=spec.options)


def _composed(recipe: object) -> tuple[str, dict[str, Mixer]] | None:
    """Title and layers of a composition; ``None`` for what states one recipe."""
    from recollect.zoo.preset import Preset, get

    if isinstance(recipe, str):
        recipe = get(recipe)
    if isinstance(recipe, Preset) and recipe.kind == "hybrid":
        return recipe.name, dict(recipe.layers)
    if isinstance(recipe, Mixer) and not isinstance(recipe, RecipeMixer):
        return recipe.kind, {recipe.kind: recipe}
    return None


def _explained(recipe: object, engine: str, precision: str | None, *, full: bool) -> Explanation:
    """Explain one recipe."""
    title, options, resolved = _resolve(recipe)
    if options is not None:
        check_options(resolved, options)
    selection = select_engine(resolved, engine)
    matches, of = named(resolved, options)
    return Explanation(
        title=title,
        recipe=resolved,
        problem=objective(resolved),
        write=write_rule(resolved, full=full),
        read=read_rule(resolved),
        where=legend(resolved, full=full),
        engine=selection.engine.name,
        how=selection.description,
        backend=_backend(resolved, engine),
        refused={name: tuple(reasons) for name, reasons in selection.rejected.items()},
        named=matches,
        of=of,
        gates=resolved.gates(),
        params=resolved.params(),
        init=_init(resolved),
        state=_state(resolved),
        properties=properties(resolved),
        cost=_price(resolved, engine),
        ranks=str(strategy_for(resolved)),
        theory=findings(resolved, _SIZE, _SIZE),
        fidelity=_fidelity(recipe),
        units=_units(resolved, options),
        products=_products(selection.engine, resolved, precision),
    )


def _fidelity(system: object) -> str:
    """Return how close a system of the zoo is to its source, empty for all else."""
    from recollect.zoo.preset import Preset, get, variants

    system = get(system) if isinstance(system, str) else system
    if not isinstance(system, Preset):
        return ""
    fidelity = system.fidelity
    line, deviations = f"{fidelity.kind}: {fidelity.source}", fidelity.deviations
    if system.variant:
        line = f"variant {system.variant!r}, {line}"
    if len(deviations) > 1:
        pointer = f"rc.zoo.get({system.name!r}).fidelity"
        line = f"{line}; {len(deviations)} deviations, listed by {pointer}"
        printed = f"{system.name}:published"
        return f"{line}; the printed equation is {printed!r}" if printed in variants() else line
    return ". ".join((line, *map(str, deviations)))


_MULTIPLIED = {
    "float32": "float32",
    "tf32": "TF32 where the device has it, added in float32",
}


def _products(engine: Engine, recipe: Recipe, precision: str | None) -> str:
    """What products multiply where a precision was asked for."""
    if precision is None:
        return ""
    reason = engine.float32_reason(recipe)
    if reason is None or precision == "float32":
        return _MULTIPLIED[precision]
    return f"float32, not {precision}: {reason}"


def _backend(recipe: Recipe, engine: str) -> str:
    """What flash-linear-attention has for a recipe, or why nothing."""
    try:
        at = bind(recipe, H=1, K=_SIZE, V=_SIZE)
    except RecipeError as error:
        return f"not {PACKAGE}: {error}"
    return str(offer(at, engine))


def _units(recipe: Recipe, options: LayerOptions | None) -> dict[str, str]:
    """What the numbers are that a layer states in a unit of its own."""
    found: dict[str, str] = {}
    for one in (*recipe.gates(), *recipe.params()):
        own = GateOptions() if options is None else options.gate(one.name)
        unit = own.resolve_unit(one.name, recipe)
        if unit == "stability_limit":
            limit = step_limit(recipe)
            found[one.name] = f"in a layer η_t = s_t · {limit}, s_t times the stability limit"
        elif unit == "batch_mean":
            bound = "" if own.low is None else f", at least {own.low:g}"
            found[one.name] = f"in a layer in multiples of 1/place in the inner batch{bound}"
        elif unit == "value_rms":
            found[one.name] = "in a layer in multiples of √V, the length of a value"
    return found


def _resolve(recipe: object) -> tuple[str, LayerOptions | None, Recipe]:
    from recollect.zoo.preset import Preset, get

    if isinstance(recipe, Recipe):
        return recipe.brief, None, recipe
    if isinstance(recipe, str):
        recipe = get(recipe)
    if isinstance(recipe, Preset):
        return recipe.name, recipe.options, recipe.recipe
    if isinstance(recipe, RecipeMixer):
        return recipe.recipe.brief, recipe.options, recipe.recipe
    raise RecipeError(
        "explain takes a Recipe, the name of an architecture or a preset, not "
        f"{type(recipe).__name__}"
    )


# -- state, needs, cost --------------------------------------------------------------------------


def _shape(lead: str, axes: tuple[str, ...]) -> str:
    return f"[{', '.join((lead, *axes))}]"


def _span(item: Gate | Param) -> str:
    return str(item.range).replace(">=", "≥").replace("<=", "≤")


def _declared(item: Gate | Param) -> dict[str, Any]:
    lead = "B, T, H" if isinstance(item, Gate) else "H"
    entry: dict[str, Any] = {
        "name": item.name,
        "owner": item.owner,
        "shape": _shape(lead, item.axes),
        "range": str(item.range),
        "init": list(item.init) if isinstance(item.init, tuple) else item.init,
    }
    if isinstance(item, Gate):
        return {**entry, "per_association": item.per_association}
    return {**entry, "draw": item.draw, "learned": item.learned}


def _init(recipe: Recipe) -> tuple[str, ...]:
    if not recipe.needs_init():
        return ()
    widths = recipe.row_widths(_SIZE)
    pairs = [f"m keys [m×{_SIZE}]"] if recipe.uses_kernel_rows else []
    return (*pairs, *(f"m rows [m×{width}]" for width in widths), *_shapes(recipe))


def _shapes(recipe: Recipe) -> list[str]:
    """The memory's weights of one head, with numbers at K = V = 64."""
    names = map_names(recipe)[len(recipe.row_widths(_SIZE)) :]
    shapes = recipe.shapes(_SIZE, _SIZE)
    letters = names if len(names) == len(shapes) else [recipe.memory.weight_symbol] * len(shapes)
    return [f"{name} [{'×'.join(map(str, s))}]" for name, s in zip(letters, shapes, strict=True)]


def _state(recipe: Recipe) -> tuple[str, ...]:
    """What is remembered, and its size per row and head."""
    try:
        price = cost(recipe, K=_SIZE, V=_SIZE, T=1)
    except RecipeError as error:
        return (f"of unknown size: {error}",)
    parts: list[str] = []
    if recipe.nonparametric or recipe.num_past_associations is None:
        span = recipe.buffer_size
        parts.append("all associations" if span is None else f"the last {span} associations")
    if recipe.solves_from_gram:
        parts.append("the factor of their likenesses, a row per token")
    elif not recipe.nonparametric:
        widths = recipe.row_widths(_SIZE)
        if recipe.uses_kernel_rows:
            parts.append(
                f"a key [{_SIZE}] and rows {', '.join(f'[{w}]' for w in widths)} per token"
            )
        parts += [", ".join(_shapes(recipe))] if _shapes(recipe) else []
        parts += list(_slots(recipe))
        if recipe.memory.read.normalize != "none" and not recipe.uses_kernel_rows:
            parts.append("its normaliser")
        if recipe.buffer_size:
            parts.append(f"{recipe.buffer_size} open association{'s' * (recipe.buffer_size > 1)}")
    size = format_si(price.state_bytes_per_token or price.state_bytes, "B")
    per = "per token, row and head" if price.state_bytes_per_token else "per row and head"
    return (f"{'; '.join(parts)}: {size} {per} at K = V = {_SIZE}",)


def _slots(recipe: Recipe) -> Iterator[str]:
    """The algorithm's own state, with the shapes that are not the memory's."""
    for name in recipe.algorithm.slots:
        shapes = recipe.shapes(_SIZE, _SIZE)
        own = [recipe.algorithm.slot_shape(name, shape) for shape in shapes]
        same = own == list(shapes)
        yield f"{name} of the same shape" if same else f"{name} {_sizes(own)}"


def _sizes(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(f"[{'×'.join(map(str, s)) or 1}]" for s in shapes)


def _price(recipe: Recipe, engine: str) -> Cost | None:
    try:
        return cost(recipe, K=_SIZE, V=_SIZE, engine=engine)
    except RecipeError:
        return None
