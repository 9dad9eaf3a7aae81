"""Cost of a recipe: FLOPs by part, bytes of state, bytes moved.

Each engine counts the FLOPs of its own calls (`Engine.cost`). This file adds the parts that engines
share.

A multiply–add is 2 FLOPs. Matrix products and triangular solves are counted, elementwise work is
not. Sizes as in `recollect.typing`: F features, R = C·c rows written per chunk of C tokens (c
associations under a window), N = ⌈T/C⌉ chunks, J = C·G rows read.

Engine ``linear``, per chunk and head, without momentum, window, probe or decay over values:

=========  =======================================================================
gram       2 R²F for K Kᵀ (errors that see the prediction only)
inverse    R³ of a unit triangular matrix, by substitution
solve      2 R²V for applying it
state      2 RFV to write, and 2 RFV to predict when errors see the prediction
read       2 JFV from the state, 2 JRF + 2 JRV from the chunk itself
=========  =======================================================================

Decays per entry and vector memories are scanned: 2 GFV to read, the rest is elementwise.
The other recipes of that engine solve for the state's coefficients first: R³ + 2 R²V + 2 R²F (twice
the last with momentum), 4 RFV + 2 RF² to write, and 2 F²V (2 (2F)²V with momentum) for the affine
map from chunk to chunk. Where a decay per channel meets momentum, tokens run one by one.

Engines ``least_squares``, ``kernel`` and ``deep``: see ``cost.py`` in their packages, and
`recollect.engines.common.kernel_rows_flops` for memories over a kernel's features.

Engine ``reference``, per token: the c associations of the window forward (2·weights), back to the
weights (2·weights) and through every map but the first (2·weights), and G reads (2·weights).
Newton–Schulz adds, per step and matrix with sides s ≤ l, 4 s²l + 2 s³.

The time on a CPU is estimated from these counts::

    seconds = CALL + FLOPs / RATE + bytes of states / BANDWIDTH + steps × seconds of a step

The engine states the seconds of a step. The constants fit the processor times of all presets at
three sizes, and ``results/bench/presets*-cpu.json`` checks them. Only ratios of times are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from recollect.choices.retention import Decay
from recollect.engines.base import Selection
from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.common.state_bytes import state_bytes
from recollect.engines.fewer_steps import fewer_steps
from recollect.engines.select import ENGINES, select_engine
from recollect.fields import int_check, validate
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.report.formatting import format_si

__all__ = ["BASELINE", "Cost", "ModelCost", "ParallelForm", "Workload", "read_cost", "recipe_cost"]

BASELINE = Recipe(retention=Decay(when="before"))
"""Gated DeltaNet, whose time other recipes are compared with."""

CALL, RATE, BANDWIDTH = 8e-4, 4e10, 2e9
"""Seconds of a call, FLOP/s, and bytes/s of states, on one thread of a CPU."""


@dataclass(frozen=True, kw_only=True)
class ParallelForm:
    """A change of a recipe that runs one token after another, to one with fewer steps.

    The changed recipe defines another layer.

    Attributes:
        changes: fields that change, as ``choice.field=value``.
        sequential_steps: number of dependent steps after the change.
        relative_time: estimated time after the change, as in `Cost`.
    """

    changes: tuple[str, ...]
    sequential_steps: int
    relative_time: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The price of one call of `recollect.recall` and of the state after it.

    Attributes:
        engine: name of the engine.
        how: how it runs the recipe.
        sizes: B, T, H, G, K, V, F.
        forward_flops: FLOPs of the whole call by part.
        training: FLOPs of the call with its backward pass, estimated as three times the forward.
        decode: FLOPs of one more token of every sequence, after T.
        state: bytes of the state after T tokens by part; their sum is `State.nbytes`.
        state_bytes_per_token: bytes that every further token adds to the state; 0 for constant
            states.
        min_bytes_moved: bytes that must be moved at least: inputs, outputs, and states that leave
            the processor (every chunk's start, or every token's).
        sequential_steps: number of dependent steps of the forward pass on a CPU. The operations of
            a step need the result of the step before: T if tokens run one after another, T / batch
            for inner batches, T / chunk for chunks, 1 if all tokens run at once.
        cpu_seconds: estimated time of the forward pass on one thread of a CPU. Only ratios of such
            times are meaningful on another machine.
        relative_time: ``cpu_seconds`` over those of Gated DeltaNet at equal sizes.
        parallel_form: the change that makes a recipe parallel whose tokens run one after another;
            ``None`` for other recipes, if no change in a short list does, and if ``engine`` names
            another engine than the recipe's own.
        notes: the expensive parts of this recipe, and assumptions of these numbers.

    Examples:
        >>> price = rc.cost(rc.Recipe(), K=16, V=16, H=2, T=128)
        >>> price.engine, sum(price.state.values())
        ('linear', 2056)
    """

    engine: str
    how: str
    sizes: dict[str, int]
    forward_flops: dict[str, int]
    training: int
    decode: int
    state: dict[str, int]
    state_bytes_per_token: int
    min_bytes_moved: int
    sequential_steps: int
    cpu_seconds: float
    relative_time: float
    parallel_form: ParallelForm | None = None
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Forward FLOPs."""
        return sum(self.forward_flops.values())

    @property
    def per_token(self) -> float:
        """Forward FLOPs per token and memory head."""
        tokens = self.sizes["B"] * self.sizes["T"] * self.sizes["H"]
        return self.total / tokens if tokens else 0.0

    @property
    def state_bytes(self) -> int:
        """Bytes of the state after T tokens."""
        return sum(self.state.values())

    @property
    def cache_grows(self) -> bool:
        """Whether the state grows with the sequence."""
        return self.state_bytes_per_token > 0

    @property
    def pace(self) -> tuple[str, ...]:
        """Sentences on the sequential steps, the estimated time, and the parallel form."""
        T, steps = self.sizes["T"], self.sequential_steps
        order = ": one token after another" if steps >= T else f" for {T} tokens"
        order = ": all tokens at once" if steps <= 1 else order
        lines = [
            f"{steps} sequential step{'s' * (steps != 1)}{order}",
            f"{_multiple(self.relative_time)} the time of Gated DeltaNet on a CPU (an estimate)",
        ]
        if self.parallel_form is not None:
            form = self.parallel_form
            lines.append(
                f"{form.sequential_steps} steps and {_multiple(form.relative_time)} with "
                f"{', '.join(form.changes)}, which is another layer"
            )
        return tuple(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "engine": self.engine,
            "how": self.how,
            "sizes": self.sizes,
            "forward": self.forward_flops,
            "forward_total": self.total,
            "training": self.training,
            "decode": self.decode,
            "state": self.state,
            "state_bytes": self.state_bytes,
            "state_grows_per_token": self.state_bytes_per_token,
            "moved": self.min_bytes_moved,
            "sequential_steps": self.sequential_steps,
            "cpu_seconds": self.cpu_seconds,
            "relative_time": self.relative_time,
            "parallel_form": None if self.parallel_form is None else asdict(self.parallel_form),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        grows = (
            f", and {format_si(self.state_bytes_per_token, 'B')} more per token"
            if self.state_bytes_per_token
            else ", constant"
        )
        rows = [
            ("engine", f"{self.engine} ({self.how})"),
            ("sizes", sizes),
            *((name, format_si(count, "FLOP")) for name, count in self.forward_flops.items()),
            ("forward", format_si(self.total, "FLOP")),
            ("training", f"{format_si(self.training, 'FLOP')} (estimate)"),
            ("decode", f"{format_si(self.decode, 'FLOP')} per token"),
            *((f"state {name}", format_si(size, "B")) for name, size in self.state.items()),
            ("state", f"{format_si(self.state_bytes, 'B')}{grows}"),
            ("moved", f"{format_si(self.min_bytes_moved, 'B')} (at least)"),
            *(("time", line) for line in self.pace),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """The cost of the memories of a model, at the sizes of its layers.

    The projections and the convolution of a layer are not counted.

    Attributes:
        model: name of the model's class.
        layers: costs of the memories, by the name of the layer in the model.
        not_counted: number of other modules with weights, by the name of their class.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> price = rc.cost(rc.lm.RecollectForCausalLM(config), T=128)
        >>> list(price.layers)
        ['model.blocks.0.layer', 'model.blocks.1.layer']
        >>> price.not_counted
        {'Embedding': 1, 'SwiGLU': 2, 'Linear': 1}
        >>> price.state_bytes == 2 * price.layers["model.blocks.0.layer"].state_bytes
        True
    """

    model: str
    layers: Mapping[str, Cost]
    not_counted: Mapping[str, int]

    @property
    def total(self) -> int:
        """Forward FLOPs of all layers."""
        return sum(cost.total for cost in self.layers.values())

    @property
    def decode(self) -> int:
        """FLOPs of one more token of every sequence in all layers."""
        return sum(cost.decode for cost in self.layers.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers after T tokens."""
        return sum(cost.state_bytes for cost in self.layers.values())

    @property
    def state_bytes_per_token(self) -> int:
        """Bytes that every further token adds to the states; 0 if all of them are constant."""
        return sum(cost.state_bytes_per_token for cost in self.layers.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "layers": {name: cost.to_dict() for name, cost in self.layers.items()},
            "not_counted": dict(self.not_counted),
            "total": self.total,
            "decode": self.decode,
            "state_bytes": self.state_bytes,
            "state_grows_per_token": self.state_bytes_per_token,
        }

    def __str__(self) -> str:
        sizes = next(iter(self.layers.values())).sizes
        B, T = sizes["B"], sizes["T"]
        rows = [("layer", "engine", "state", "FLOPs per token", "FLOPs to decode one")]
        for name, cost in (*self.layers.items(), ("total", self)):
            grows = cost.state_bytes_per_token / B
            state = format_si(cost.state_bytes / B, "B")
            state += f", and {format_si(grows, 'B')} per token" if grows else ""
            per_token = format_si(cost.total / max(B * T, 1), "FLOP")
            engine = cost.engine if isinstance(cost, Cost) else ""
            rows.append((name, engine, state, per_token, format_si(cost.decode / B, "FLOP")))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.model}: {len(self.layers)} memory layers, one sequence of {T} tokens"]
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
        others = [f"{count} × {name}" for name, count in self.not_counted.items()]
        others.insert(0, "projections and convolutions of these layers")
        return "\n".join([*lines, f"not counted: {', '.join(others)}"])


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a call.

    Attributes:
        K: key channels, ≥ 1.
        V: value channels, ≥ 1.
        H: memories (heads of keys and values), ≥ 1.
        T: tokens, ≥ 0.
        B: sequences, ≥ 1.
        G: query heads per memory, ≥ 1.
        dtype_bytes: of q, k and v: 2, 4 or 8; states have 4, or 8 when these have 8.
        engine: as for `recollect.recall`.

    Raises:
        ValueError: a size that is not a whole number or is below its minimum.
    """

    K: int = 64
    V: int = 64
    H: int = 1
    T: int = 4096
    B: int = 1
    G: int = 1
    dtype_bytes: int = 4
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name in ("K", "V", "H", "B", "G", "dtype_bytes", "T"):
            size = validate(name, int_check() if name == "T" else int_check(1), getattr(self, name))
            object.__setattr__(self, name, size)
        if self.dtype_bytes not in (2, 4, 8):
            raise ValueError(f"dtype_bytes must be 2, 4 or 8, not {self.dtype_bytes}")

    def sizes_of(self, recipe: Recipe) -> Sizes:
        """Return all sizes of a recipe's call."""
        return Sizes.of(recipe, K=self.K, V=self.V, H=self.H, T=self.T, B=self.B, G=self.G)


def recipe_cost(recipe: Recipe, workload: Workload) -> Cost:
    """Return the cost of one call of a recipe; `recollect.cost` also takes compositions.

    Raises:
        RecipeError: sizes that the recipe cannot have, an engine that cannot run it, or an engine
            without counted costs.
        ValueError: an unknown engine.
    """
    selection, s = select_engine(recipe, workload.engine), workload.sizes_of(recipe)
    counted = selection.engine.count_flops(recipe, s)
    if counted is None:
        supported = [e for e in ENGINES if not e.unsupported_reasons(recipe)]
        priced = [e.name for e in supported if e.count_flops(recipe, s) is not None]
        raise RecipeError(
            f"rc.cost has no price for the engine {selection.engine.name!r}, which runs this "
            f"recipe: name one that states its cost, engine={' or '.join(map(repr, priced))}"
        )
    baseline = _baseline_seconds(workload)
    price = _priced(recipe, selection, counted, workload, baseline)
    # An engine that the caller named may be slower than the one that the recipe needs.
    if not 1 < s.T <= counted.steps or selection.engine is not select_engine(recipe).engine:
        return price
    change = fewer_steps(recipe, s)
    if change is None:
        return price
    changed, changes, fewer = change
    faster = _priced(changed, select_engine(changed), fewer, workload, baseline)
    form = ParallelForm(
        changes=changes,
        sequential_steps=faster.sequential_steps,
        relative_time=faster.relative_time,
    )
    return replace(price, parallel_form=form)


def read_cost(recipe: Recipe, workload: Workload, queries: int) -> int:
    """Return the FLOPs of one call of `recollect.read` after T tokens.

    Args:
        recipe: the regression problem.
        workload: sizes of the calls that wrote the memory.
        queries: of every sequence and query head, ≥ 0.

    Raises:
        RecipeError: an engine without counted costs of reads.
        ValueError: an unknown engine.
    """
    engine, s = select_engine(recipe, workload.engine).engine, workload.sizes_of(recipe)
    feature_flops = recipe.features.flops(s.K) * s.G * s.H if recipe.features.finite else 0
    return (engine.count_read_flops(recipe, s, queries) + feature_flops * queries) * s.B


def _baseline_seconds(workload: Workload) -> float:
    """Return the estimated time of `BASELINE`, or 0 if its engine has no counted costs."""
    selection = select_engine(BASELINE)
    counted = selection.engine.count_flops(BASELINE, workload.sizes_of(BASELINE))
    if counted is None:
        return 0.0
    return _priced(BASELINE, selection, counted, workload, 1.0).cpu_seconds


def _priced(
    recipe: Recipe, selection: Selection, counted: FlopCount, workload: Workload, baseline: float
) -> Cost:
    """Return the cost of a call from the counts of its engine."""
    s, dtype_bytes = workload.sizes_of(recipe), workload.dtype_bytes
    state_size = 8 if dtype_bytes == 8 else 4
    feature_flops = recipe.features.flops(s.K) * (s.n + s.G) * s.H if recipe.features.finite else 0
    forward = {"features": feature_flops * s.T, **counted.forward}
    forward = {name: flops * s.B for name, flops in forward.items() if flops}
    keeps_factor = recipe.solves_from_gram and selection.engine.name == "kernel"
    state, grows = state_bytes(recipe, s, dtype_bytes, state_size, factored=keeps_factor)
    weights = state.get("memory", 0) + state.get("algorithm", 0)
    gates = sum(s.numel(gate.axes) for gate in recipe.gates())
    inputs = s.B * s.T * s.H * ((s.n + s.G) * (s.K + s.V) + gates)
    states = 2 * counted.states * weights
    seconds = CALL + sum(forward.values()) / RATE + states / BANDWIDTH
    seconds += counted.steps * counted.step_seconds
    return Cost(
        engine=selection.engine.name,
        how=selection.description,
        sizes={"B": s.B, "T": s.T, "H": s.H, "G": s.G, "K": s.K, "V": s.V, "F": s.F},
        forward_flops=forward,
        training=3 * sum(forward.values()),
        decode=(counted.decode + feature_flops) * s.B,
        state=state,
        state_bytes_per_token=grows,
        min_bytes_moved=inputs * dtype_bytes + states,
        sequential_steps=counted.steps,
        cpu_seconds=seconds,
        relative_time=seconds / baseline if baseline else math.nan,
        notes=counted.notes,
    )


def _multiple(ratio: float) -> str:
    """A multiple with two digits."""
    return f"about {float(f'{ratio:.2g}'):g} ×"
