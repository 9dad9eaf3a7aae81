"""A recipe in words and equations: its problem, its update and its engine.

Each line is composed of the signed terms that the members state
(`recollect.choices.equation_terms`), so members of your own are explained as well::

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
from typing import Any, overload

from torch import nn

from recollect.blocks.cost import cost
from recollect.blocks.layers import MixerLayer, layer_spec, memory_layers
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.choices.matmul_precision import check_precision_name
from recollect.costs import Cost
from recollect.engines.base import Engine
from recollect.engines.fla import PACKAGE, offer
from recollect.engines.select import select_engine
from recollect.explanation.composition import Composition
from recollect.explanation.equations import legend, map_names, objective, read_rule, write_rule
from recollect.explanation.labelled_text import SIZE, LabelledText, shape_text
from recollect.explanation.model_explanation import (
    LayerGroup,
    ModelExplanation,
    layer_title,
    layers_in_groups,
)
from recollect.explanation.naming import MatchingSystem, properties, systems_with_recipe
from recollect.fields import Gate, Param
from recollect.functional.binding import bind
from recollect.layer.checks import check_options
from recollect.layer.options import GateOptions, LayerOptions
from recollect.messages import RecipeError
from recollect.parallel.strategies import strategy_for
from recollect.recipe.recipe import Recipe
from recollect.recipe.stability import step_limit
from recollect.report.formatting import format_si
from recollect.theory import findings
from recollect.zoo.preset import Preset, get, variants

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, kw_only=True)
class Explanation(LabelledText):
    """Explanation of one recipe; ``str()`` prints its `blocks`.

    Attributes:
        title: name of the preset, or the recipe as Python code.
        recipe: the recipe.
        problem: objective at time t.
        write_equations, read_equations: equations, one per line.
        symbols: descriptions of the symbols in the equations.
        ties: equations of the layer's queries, keys, gates and params that are computed from others
            (`recollect.Tie`).
        engine, engine_mode: the engine that runs the recipe, and its algorithm.
        matmul_precision: precision of matrix products, if one was requested.
        backend: the operator of flash-linear-attention that replaces the engine's products on
            CUDA, or the reason why none does.
        engine_refusals: names of faster engines, with the reasons why they cannot run the recipe.
        fidelity: closeness of a preset to its source; empty for a recipe.
        same_recipe_systems: presets whose recipe differs at most in sizes.
        num_systems: number of presets that were compared.
        gates, params: gates and params that `recollect.recall` needs.
        units: descriptions, by name, of units in which a layer states gates and params.
        init: shapes of the initial memory, if the recipe needs one.
        state: parts of the state between calls.
        properties: answers to the questions of `recollect.explanation.naming.PROPERTIES`.
        cost: costs at K = V = 64.
        sequence_parallel: how ranks that share a sequence pass on the memory, with the reason
            (`recollect.parallel`).
        theory: results of `recollect.theory` at these sizes, with sources.

    Examples:
        >>> explanation = rc.explain(rc.Recipe())
        >>> explanation.problem
        '½‖W k_t − v_t‖²'
        >>> explanation.engine
        'linear'
        >>> explanation.blocks[2]
        ('read', ('y_t = W_t q_t',))
    """

    title: str
    recipe: Recipe
    problem: str
    write_equations: tuple[str, ...]
    read_equations: tuple[str, ...]
    symbols: tuple[str, ...]
    ties: tuple[str, ...] = ()
    engine: str
    engine_mode: str
    matmul_precision: str = ""
    backend: str
    engine_refusals: Mapping[str, tuple[str, ...]]
    fidelity: str = ""
    same_recipe_systems: tuple[MatchingSystem, ...]
    num_systems: int
    gates: tuple[Gate, ...]
    params: tuple[Param, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    init: tuple[str, ...]
    state: tuple[str, ...]
    properties: Mapping[str, bool]
    cost: Cost | None
    sequence_parallel: str
    theory: tuple[str, ...] = ()

    @property
    def solution(self) -> list[tuple[str, list[str]]]:
        """Labels and lines of the equations and of the engine."""
        precision = [f"products of {self.matmul_precision}"] if self.matmul_precision else []
        return [
            ("problem", [f"min  {self.problem}"]),
            ("write", [*self.write_equations]),
            ("read", [*self.read_equations]),
            ("where", [*self.symbols]),
            ("ties", [*self.ties]),
            ("engine", [f"{self.engine} ({self.engine_mode})", *precision]),
        ]

    def _lines(self) -> Iterator[tuple[str, list[str]]]:
        *equations, (_, engine) = self.solution
        yield from equations
        refusals = [f"not {name}: {why[0]}" for name, why in self.engine_refusals.items()]
        yield "engine", [*engine, *refusals, *self.backend.splitlines()]
        yield "fidelity", [self.fidelity] if self.fidelity else []
        yield "named", [*self._system_lines()]
        yield "needs", [*self._input_lines()]
        yield "state", [*self.state]
        yield "cost", [*self._cost_lines()]
        yield "ranks", [self.sequence_parallel]
        yield "theory", [*self.theory]
        for label, answer in (("has", True), ("lacks", False)):
            names = [name for name, value in self.properties.items() if value is answer]
            yield label, [", ".join(names)] if names else []

    def _system_lines(self) -> Iterator[str]:
        systems = self.same_recipe_systems
        if not systems:
            yield f"none of the {self.num_systems}"
        elif [system.name for system in systems] != [self.title]:
            yield ", ".join(map(str, systems))
        with_options = [system.name for system in systems if system.has_options]
        if with_options and self.title == self.recipe.brief:
            first, *others = with_options
            layers = "their layers have" if others else f"the layer of {first} has"
            yield f"{layers} options beside the recipe: rc.zoo.get({first!r}).options"

    def _input_lines(self) -> Iterator[str]:
        for gate in self.gates:
            owner = ", of the association" if gate.per_association else ""
            yield f"gate {self._input_text(gate)}{owner}{self._unit_text(gate)}"
        for param in self.params:
            draw = f", drawn ({param.draw})" if param.draw else ""
            frozen = "" if param.learned else ", not trained"
            yield f"param {self._input_text(param)}{draw}{frozen}{self._unit_text(param)}"
        if self.init:
            yield f"init {', '.join(self.init)}: a memory of zeros would never learn"

    def _input_text(self, item: Gate | Param) -> str:
        interval = str(item.range).replace(">=", "≥").replace("<=", "≤")
        return f"{item.name} {shape_text(item)} {interval}"

    def _unit_text(self, item: Gate | Param) -> str:
        return f"; {self.units[item.name]}" if item.name in self.units else ""

    def _cost_lines(self) -> Iterator[str]:
        if self.cost is None:
            return
        token = format_si(self.cost.per_token, "FLOP")
        decode = format_si(self.cost.decode, "FLOP")
        sizes = f"K = V = {SIZE}, T = {self.cost.sizes['T']}"
        yield f"{token} per token and head, {decode} to decode one, at {sizes}"
        yield from self.cost.pace
        yield from self.cost.notes


@overload
def explain(
    recipe: Recipe, *, engine: str = ..., precision: str | None = ..., full: bool = ...
) -> Explanation: ...
@overload
def explain(
    recipe: Mixer, *, engine: str = ..., precision: str | None = ..., full: bool = ...
) -> Composition: ...
@overload
def explain(
    recipe: nn.Module, *, engine: str = ..., precision: str | None = ..., full: bool = ...
) -> ModelExplanation: ...
@overload
def explain(
    recipe: str | Preset, *, engine: str = ..., precision: str | None = ..., full: bool = ...
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
        full: whether to print equations of the scales of normalised steps, not only descriptions.

    Raises:
        RecipeError: an unknown name, an engine that cannot run the recipe, layer options that do
            not fit it, or a model without memory layers.
        ValueError: an unknown precision.

    Examples:
        >>> print(rc.explain("gated_delta_net").write_equations[0])
        W_t = α_t W_(t−1) − η_t (α_t W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
        >>> rc.explain(rc.Recipe(bias=rc.bias.Huber())).engine
        'deep'
        >>> print(str(rc.explain("titans_mac")).splitlines()[1])
        composes MemoryAsContext(memory, attention, segment=128, persistent=8)
    """
    check_precision_name(precision)
    if isinstance(recipe, nn.Module):
        return _explain_model(recipe, engine, precision, full=full)
    system = get(recipe) if isinstance(recipe, str) else recipe
    if isinstance(system, Preset) and system.kind == "hybrid":
        title, layers = system.name, dict(system.layers)
    elif isinstance(system, Mixer) and not isinstance(system, RecipeMixer):
        title, layers = system.kind, {system.kind: system}
    else:
        return _explain_recipe(system, engine, precision, full=full)
    parts: dict[str, Explanation] = {}
    for name, mixer in layers.items():
        for path, leaf in mixer.leaves.items():
            key = path if len(layers) == 1 else f"{name}.{path}" if path else name
            parts[key] = _explain_recipe(leaf, engine, precision, full=full)
    return Composition(
        title=title,
        fidelity=_fidelity(system),
        layers=layers,
        parts=parts,
        costs={name: _cost(mixer, engine) for name, mixer in layers.items()},
    )


def _explain_model(model: nn.Module, engine: str, precision: str | None, *, full: bool) -> Any:
    """Explain a layer, or the groups of equal layers of a model."""
    layers, groups = memory_layers(model, "explain"), list[LayerGroup]()
    for layer, names in layers_in_groups(layers):
        spec = layer_spec(layer)
        recipe: Any = layer.mixer if isinstance(layer, MixerLayer) else spec.recipe
        if recipe is spec.recipe and spec.options is not None:
            recipe = RecipeMixer(recipe=recipe, options=spec.options)
        explanation = explain(
            recipe,
            engine=spec.engine if engine == "auto" else engine,
            precision=spec.precision if precision is None else precision,
            full=full,
        )
        if names == ("",):
            return explanation
        sizes = {"H": spec.num_kv_heads, "K": spec.head_dim, "V": spec.value_dim}
        title = layer_title(layer)
        groups.append(LayerGroup(title=title, names=names, sizes=sizes, explanation=explanation))
    return ModelExplanation(model=type(model).__name__, groups=tuple(groups))


def _explain_recipe(
    system: object, engine: str, precision: str | None, *, full: bool
) -> Explanation:
    """Explain a recipe, with the layer options of a preset or mixer."""
    if isinstance(system, Recipe):
        title, recipe, options = system.brief, system, None
    elif isinstance(system, Preset):
        title, recipe, options = system.name, system.recipe, system.options
    elif isinstance(system, RecipeMixer):
        title, recipe, options = system.recipe.brief, system.recipe, system.options
    else:
        raise RecipeError(
            "explain takes a Recipe, the name of an architecture or a preset, not "
            f"{type(system).__name__}"
        )
    if options is not None:
        check_options(recipe, options)
    selection = select_engine(recipe, engine)
    systems, num_systems = systems_with_recipe(recipe, options)
    return Explanation(
        title=title,
        recipe=recipe,
        problem=objective(recipe),
        write_equations=write_rule(recipe, full=full),
        read_equations=read_rule(recipe),
        symbols=legend(recipe, full=full),
        ties=() if options is None else tuple(tie.equation for tie in options.ties),
        engine=selection.engine.name,
        engine_mode=selection.description,
        matmul_precision=_matmul_precision(selection.engine, recipe, precision),
        backend=_backend(recipe, engine),
        engine_refusals={name: tuple(reasons) for name, reasons in selection.rejected.items()},
        fidelity=_fidelity(system),
        same_recipe_systems=systems,
        num_systems=num_systems,
        gates=recipe.gates(),
        params=recipe.params(),
        units=_units(recipe, options),
        init=_init(recipe),
        state=_state(recipe),
        properties=properties(recipe),
        cost=_cost(recipe, engine),
        sequence_parallel=str(strategy_for(recipe)),
        theory=findings(recipe, SIZE, SIZE),
    )


def _fidelity(system: object) -> str:
    """Return how close a system of the zoo is to its source; empty for other systems."""
    if not isinstance(system, Preset):
        return ""
    fidelity = system.fidelity
    line, deviations = f"{fidelity.kind}: {fidelity.source}", fidelity.deviations
    if system.variant:
        line = f"variant {system.variant!r}, {line}"
    if len(deviations) > 1:
        pointer = f"rc.zoo.get({system.name!r}).fidelity"
        line = f"{line}; {len(deviations)} deviations, listed by {pointer}"
        published = f"{system.name}:published"
        return f"{line}; the printed equation is {published!r}" if published in variants() else line
    return ". ".join((line, *map(str, deviations)))


_PRECISIONS = {
    "float32": "float32",
    "tf32": "TF32 where the device has it, added in float32",
}


def _matmul_precision(engine: Engine, recipe: Recipe, precision: str | None) -> str:
    """Describe the precision of matrix products, if one was requested."""
    if precision is None:
        return ""
    reason = engine.float32_reason(recipe)
    if reason is None or precision == "float32":
        return _PRECISIONS[precision]
    return f"float32, not {precision}: {reason}"


def _backend(recipe: Recipe, engine: str) -> str:
    """Return the operators of flash-linear-attention for a recipe, or the reason for none."""
    try:
        bound = bind(recipe, H=1, K=SIZE, V=SIZE)
    except RecipeError as error:
        return f"not {PACKAGE}: {error}"
    return str(offer(bound, engine))


def _units(recipe: Recipe, options: LayerOptions | None) -> dict[str, str]:
    """Describe the units in which a layer states gates and params."""
    units: dict[str, str] = {}
    for item in (*recipe.gates(), *recipe.params()):
        gate = GateOptions() if options is None else options.gate(item.name)
        unit = gate.resolve_unit(item.name, recipe)
        if unit == "stability_limit":
            limit = step_limit(recipe)
            units[item.name] = f"in a layer η_t = s_t · {limit}, s_t times the stability limit"
        elif unit == "batch_mean":
            bound = "" if gate.low is None else f", at least {gate.low:g}"
            units[item.name] = f"in a layer in multiples of 1/place in the inner batch{bound}"
        elif unit == "value_rms":
            units[item.name] = "in a layer in multiples of √V, the length of a value"
    return units


def _init(recipe: Recipe) -> tuple[str, ...]:
    """Return the shapes of the initial memory, if the recipe needs one."""
    if not recipe.needs_init():
        return ()
    keys = [f"m keys [m×{SIZE}]"] if recipe.uses_kernel_rows else []
    rows = [f"m rows [m×{width}]" for width in recipe.row_widths(SIZE)]
    return (*keys, *rows, *_weight_shapes(recipe))


def _weight_shapes(recipe: Recipe) -> list[str]:
    """Return the names and shapes of the memory's weights of one head."""
    names = map_names(recipe)[len(recipe.row_widths(SIZE)) :]
    shapes = recipe.shapes(SIZE, SIZE)
    symbols = names if len(names) == len(shapes) else [recipe.memory.weight_symbol] * len(shapes)
    return [f"{name} {_shape_list([shape])}" for name, shape in zip(symbols, shapes, strict=True)]


def _shape_list(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(f"[{'×'.join(map(str, shape)) or 1}]" for shape in shapes)


def _state(recipe: Recipe) -> tuple[str, ...]:
    """Describe the state, and its size per batch element and head."""
    try:
        sizes = cost(recipe, K=SIZE, V=SIZE, T=1)
    except RecipeError as error:
        return (f"of unknown size: {error}",)
    parts: list[str] = []
    if recipe.nonparametric or recipe.num_past_associations is None:
        count = recipe.buffer_size
        parts.append("all associations" if count is None else f"the last {count} associations")
    if recipe.solves_from_gram:
        parts.append("the factor of their likenesses, a row per token")
    elif not recipe.nonparametric:
        weights, batch = _weight_shapes(recipe), recipe.buffer_size
        if recipe.uses_kernel_rows:
            rows = ", ".join(f"[{width}]" for width in recipe.row_widths(SIZE))
            parts.append(f"a key [{SIZE}] and rows {rows} per token")
        parts += [", ".join(weights)] if weights else []
        parts += _slots(recipe)
        if recipe.memory.read.normalize != "none" and not recipe.uses_kernel_rows:
            parts.append("its normaliser")
        if batch:
            parts.append(f"{batch} open association{'s' * (batch > 1)}")
    size = format_si(sizes.state_bytes_per_token or sizes.state_bytes, "B")
    per = "per token, row and head" if sizes.state_bytes_per_token else "per row and head"
    return (f"{'; '.join(parts)}: {size} {per} at K = V = {SIZE}",)


def _slots(recipe: Recipe) -> Iterator[str]:
    """Describe the state of the algorithm, with shapes that differ from the memory's."""
    shapes = recipe.shapes(SIZE, SIZE)
    for name in recipe.algorithm.slots:
        slots = [recipe.algorithm.slot_shape(name, shape) for shape in shapes]
        yield f"{name} {'of the same shape' if slots == list(shapes) else _shape_list(slots)}"


def _cost(recipe: Recipe | Mixer, engine: str) -> Cost | None:
    try:
        return cost(recipe, K=SIZE, V=SIZE, engine=engine)
    except RecipeError:
        return None
