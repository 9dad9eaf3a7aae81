"""What a recipe costs: FLOPs by part, bytes of state, bytes moved, as data.

Each engine states the FLOPs of its own calls (`Engine.cost`); this file adds what all share.

A multiply–add is 2 FLOPs; only matrix products and triangular solves are counted, elementwise work
is not. Sizes as in `recollect.typing`: F features, R = C·c rows written per chunk of C tokens (c
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
`recollect.engines.common.kernel_rows_cost` for memories over a kernel's features.

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
from dataclasses import asdict, dataclass, replace
from typing import Any

from recollect.choices.member import RecipeError
from recollect.choices.retention import Decay
from recollect.engines.common.sizes import Counted, Sizes
from recollect.engines.common.state_bytes import state_bytes
from recollect.engines.fewer_steps import fewer_steps
from recollect.engines.select import ENGINES, Selection, select
from recollect.fields import held, whole
from recollect.recipe.argument import takes_recipe
from recollect.recipe.recipe import Recipe
from recollect.report.units import readable

__all__ = ["BASELINE", "Cost", "ParallelForm", "cost", "reading"]

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
        engine: which engine the numbers are of; ``how``: how it runs the recipe.
        sizes: B, T, H, G, K, V, F.
        forward: FLOPs of the whole call by part.
        training: FLOPs of the call with its backward, estimated as three times the forward.
        decode: FLOPs of one more token of every row, after T.
        state: bytes of the state after T tokens by part; their sum is `State.nbytes`.
        grows: bytes that every further token adds to the state; 0 for constant states.
        moved: bytes that must be moved at the least: inputs, outputs, and states where they leave
            the processor (every chunk's start, or every token's).
        sequential_steps: number of dependent steps of the forward pass on a CPU. The operations of
            a step need the result of the step before: T where tokens run one after another, T /
            batch for inner batches, T / chunk for chunks, 1 where all tokens run at once.
        cpu_seconds: estimated time of the forward pass on one thread of a CPU. Only ratios of such
            times are meaningful on another machine.
        relative_time: ``cpu_seconds`` over those of Gated DeltaNet at equal sizes.
        parallel_form: the change that makes a recipe parallel whose tokens run one after another;
            ``None`` for other recipes, if no change in a short list does, and if ``method`` names
            another engine than the recipe's own.
        notes: what is dear about this recipe, and what these numbers rest on.

    Examples:
        >>> price = rc.cost(rc.Recipe(), K=16, V=16, H=2, T=128)
        >>> price.engine, sum(price.state.values())
        ('linear', 2056)
    """

    engine: str
    how: str
    sizes: dict[str, int]
    forward: dict[str, int]
    training: int
    decode: int
    state: dict[str, int]
    grows: int
    moved: int
    sequential_steps: int
    cpu_seconds: float
    relative_time: float
    parallel_form: ParallelForm | None = None
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Forward FLOPs."""
        return sum(self.forward.values())

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
        return self.grows > 0

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
            "forward": self.forward,
            "forward_total": self.total,
            "training": self.training,
            "decode": self.decode,
            "state": self.state,
            "state_bytes": self.state_bytes,
            "state_grows_per_token": self.grows,
            "moved": self.moved,
            "sequential_steps": self.sequential_steps,
            "cpu_seconds": self.cpu_seconds,
            "relative_time": self.relative_time,
            "parallel_form": None if self.parallel_form is None else asdict(self.parallel_form),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        grows = f", and {readable(self.grows, 'B')} more per token" if self.grows else ", constant"
        rows = [
            ("engine", f"{self.engine} ({self.how})"),
            ("sizes", sizes),
            *((name, readable(count, "FLOP")) for name, count in self.forward.items()),
            ("forward", readable(self.total, "FLOP")),
            ("training", f"{readable(self.training, 'FLOP')} (estimate)"),
            ("decode", f"{readable(self.decode, 'FLOP')} per token"),
            *((f"state {name}", readable(size, "B")) for name, size in self.state.items()),
            ("state", f"{readable(self.state_bytes, 'B')}{grows}"),
            ("moved", f"{readable(self.moved, 'B')} (at least)"),
            *(("time", line) for line in self.pace),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


@takes_recipe
def cost(
    recipe: Recipe,
    *,
    K: int = 64,
    V: int = 64,
    H: int = 1,
    T: int = 4096,
    B: int = 1,
    G: int = 1,
    dtype_bytes: int = 4,
    method: str = "auto",
) -> Cost:
    """What one call over T tokens costs; the formulae are in the module's docstring.

    Args:
        recipe: the regression problem.
        K: key channels, ≥ 1.
        V: value channels, ≥ 1.
        H: memories (heads of keys and values), ≥ 1.
        T: tokens, ≥ 0.
        B: rows, ≥ 1.
        G: query heads per memory, ≥ 1.
        dtype_bytes: of q, k and v: 2, 4 or 8; states have 4, or 8 when these have 8.
        method: as for `recollect.recall`.

    Raises:
        RecipeError: sizes that the recipe cannot have, a method that cannot run it, or an engine
            that states no cost.
        ValueError: a size that is no whole number or below its least, or an unknown method.

    Examples:
        >>> price = rc.cost(rc.Recipe(), K=16, V=16, H=2, T=128)
        >>> longer = rc.cost(rc.Recipe(), K=16, V=16, H=2, T=256)
        >>> longer.total == 2 * price.total
        True
        >>> price.grows
        0
        >>> rc.cost(rc.zoo.get("softmax_attention").recipe, K=16, V=16, H=2, T=128).grows
        257
    """
    given = {"K": K, "V": V, "H": H, "B": B, "G": G, "dtype_bytes": dtype_bytes}
    sizes = {name: held(name, whole(1), size) for name, size in given.items()}
    K, V, H, B, G, dtype_bytes = sizes.values()
    T = held("T", whole(), T)
    if dtype_bytes not in (2, 4, 8):
        raise ValueError(f"dtype_bytes must be 2, 4 or 8, not {dtype_bytes}")
    selection = select(recipe, method)
    s = Sizes.of(recipe, K=K, V=V, H=H, T=T, B=B, G=G)
    if selection.engine.cost is None:
        priced = [e.name for e in ENGINES if e.cost is not None and not e.refuses(recipe)]
        raise RecipeError(
            f"rc.cost has no price for the engine {selection.engine.name!r}, which runs this "
            f"recipe: name one that states its cost, method={' or '.join(map(repr, priced))}"
        )
    counted = selection.engine.cost(recipe, s)
    baseline = _baseline_seconds(s, dtype_bytes)
    price = _priced(recipe, selection, counted, s, dtype_bytes, baseline)
    # An engine that the caller named may be slower than the one that the recipe needs.
    if not 1 < T <= counted.steps or selection.engine is not select(recipe).engine:
        return price
    change = fewer_steps(recipe, s)
    if change is None:
        return price
    changed, changes, fewer = change
    faster = _priced(changed, select(changed), fewer, s, dtype_bytes, baseline)
    form = ParallelForm(
        changes=changes,
        sequential_steps=faster.sequential_steps,
        relative_time=faster.relative_time,
    )
    return replace(price, parallel_form=form)


def _baseline_seconds(s: Sizes, dtype_bytes: int) -> float:
    """Estimated time of `BASELINE` at the sizes of another recipe; 0 if its engine has no price."""
    selection = select(BASELINE)
    if selection.engine.cost is None:
        return 0.0
    sizes = Sizes.of(BASELINE, K=s.K, V=s.V, H=s.H, T=s.T, B=s.B, G=s.G)
    counted = selection.engine.cost(BASELINE, sizes)
    return _priced(BASELINE, selection, counted, sizes, dtype_bytes, 1.0).cpu_seconds


def _priced(
    recipe: Recipe,
    selection: Selection,
    counted: Counted,
    s: Sizes,
    dtype_bytes: int,
    baseline: float,
) -> Cost:
    """The price of a call from what its engine counts."""
    state_size = 8 if dtype_bytes == 8 else 4
    lifts = recipe.features.flops(s.K) * (s.n + s.G) * s.H if recipe.features.finite else 0
    forward = {"features": lifts * s.T, **counted.forward}
    forward = {name: flops * s.B for name, flops in forward.items() if flops}
    factored = recipe.solves_from_gram and selection.engine.name == "kernel"
    state, grows = state_bytes(recipe, s, dtype_bytes, state_size, factored=factored)
    weights = state.get("memory", 0) + state.get("algorithm", 0)
    gates = sum(s.numel(gate.axes) for gate in recipe.gates())
    inputs = s.B * s.T * s.H * ((s.n + s.G) * (s.K + s.V) + gates)
    states = 2 * counted.states * weights
    seconds = CALL + sum(forward.values()) / RATE + states / BANDWIDTH
    seconds += counted.steps * counted.step_seconds
    return Cost(
        engine=selection.engine.name,
        how=selection.how,
        sizes={"B": s.B, "T": s.T, "H": s.H, "G": s.G, "K": s.K, "V": s.V, "F": s.F},
        forward=forward,
        training=3 * sum(forward.values()),
        decode=(counted.decode + lifts) * s.B,
        state=state,
        grows=grows,
        moved=inputs * dtype_bytes + states,
        sequential_steps=counted.steps,
        cpu_seconds=seconds,
        relative_time=seconds / baseline if baseline else math.nan,
        notes=counted.notes,
    )


def _multiple(ratio: float) -> str:
    """A multiple with two digits."""
    return f"about {float(f'{ratio:.2g}'):g} ×"


@takes_recipe
def reading(
    recipe: Recipe,
    queries: int,
    *,
    K: int = 64,
    V: int = 64,
    H: int = 1,
    T: int = 4096,
    B: int = 1,
    G: int = 1,
    method: str = "auto",
) -> int:
    """FLOPs of one call of `recollect.read`: queries that read and write nothing.

    Args:
        recipe: the regression problem.
        queries: of every row, ≥ 0.
        K: key channels, ≥ 1.
        V: value channels, ≥ 1.
        H: memories, ≥ 1.
        T: tokens that the memory has learned, ≥ 0.
        B: rows, ≥ 1.
        G: query heads per memory, ≥ 1.
        method: as for `recollect.recall`.

    Raises:
        RecipeError: an engine that does not state what a read costs.
        ValueError: a size that is no whole number or below its least, or an unknown method.

    Examples:
        >>> from recollect.cost import reading
        >>> reading(rc.Recipe(), 10, K=16, V=16, T=128)
        5120
    """
    given = {"K": K, "V": V, "H": H, "B": B, "G": G}
    sizes = {name: held(name, whole(1), size) for name, size in given.items()}
    K, V, H, B, G = sizes.values()
    T, queries = held("T", whole(), T), held("queries", whole(), queries)
    engine = select(recipe, method).engine
    if engine.reading is None:
        raise RecipeError(
            f"rc.cost has no price for reads of the engine {engine.name!r}, which runs this recipe"
        )
    s = Sizes.of(recipe, K=K, V=V, H=H, T=T, B=B, G=G)
    lifts = recipe.features.flops(K) * G * H if recipe.features.finite else 0
    return (engine.reading(recipe, s, queries) + lifts * queries) * B
