"""What a recipe costs: FLOPs by part, bytes of state, bytes moved, as data.

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

Engine ``kernel``: see `cost_kernel`, and `engines.common.kernel_rows_cost` for memories over a
kernel's features.

Engine ``deep``: see `recollect.engines.deep.count`.

Engine ``reference``, per token: the c associations of the window forward (2·weights), back to the
weights (2·weights) and through every map but the first (2·weights), and G reads (2·weights).
Newton–Schulz adds, per step and matrix with sides s ≤ l, 4 s²l + 2 s³.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recollect.choices.member import RecipeError
from recollect.choices.memory.maps import Stack
from recollect.cost_kernel import gram_flops, local_flops
from recollect.engines import deep
from recollect.engines.common.kernel_rows_cost import dual_flops, row_bytes
from recollect.engines.linear.chunked import chunk_length
from recollect.engines.linear.engine import per_value_systems, scans
from recollect.engines.linear.scan import GROUP
from recollect.engines.select import ENGINES, select

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Cost", "cost", "readable"]


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
        notes: what is dear about this recipe, and what these numbers rest on.
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
            *(("note", note) for note in self.notes),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def readable(count: float, unit: str) -> str:
    """A count with three digits and a prefix: powers of 1024 for bytes, of 1000 otherwise."""
    step, prefixes = (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit == "B" else (1000, "\0kMGTP")
    index = 0
    while abs(count) >= step and index < len(prefixes) - 1:
        count, index = count / step, index + 1
    digits = f"{count:.0f}" if index == 0 or count >= 100 else f"{count:.3g}"
    return f"{digits} {prefixes[index].strip(chr(0))}{unit}"


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
        K: key channels. V: value channels. H: memories. T: tokens. B: rows.
        G: query heads per memory.
        dtype_bytes: of q, k and v: 2, 4 or 8; states have 4, or 8 when these have 8.
        method: as for `recollect.recall`.

    Raises:
        RecipeError: sizes that the recipe cannot have, a method that cannot run it, or an engine
        whose price is not known here.
        ValueError: a size below its least, or an unknown method.
    """
    given = {"K": K, "V": V, "H": H, "B": B, "G": G, "dtype_bytes": dtype_bytes}
    for name, size in given.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
    if T < 0:
        raise ValueError(f"T must be at least 0, not {T}")
    selection = select(recipe, method)
    s = _Sizes.of(recipe, K=K, V=V, H=H, T=T, B=B, G=G)
    state_size = 8 if dtype_bytes == 8 else 4
    forward, decode, borders, notes = _counts(recipe, selection.engine.name)(recipe, s)
    lifts = recipe.features.flops(K) * (s.n + G) * H if recipe.features.finite else 0
    forward, decode = {"features": lifts * T, **forward}, decode + lifts
    forward = {name: flops * B for name, flops in forward.items() if flops}
    factored = recipe.from_gram and selection.engine.name == "kernel"
    state, grows = _state(recipe, s, dtype_bytes, state_size, factored=factored)
    weights = state.get("memory", 0) + state.get("algorithm", 0)
    gates = sum(s.numel(gate.axes) for gate in recipe.gates())
    inputs = B * T * H * (s.n * (K + V) + G * (K + V) + gates)
    return Cost(
        engine=selection.engine.name,
        how=selection.how,
        sizes={"B": B, "T": T, "H": H, "G": G, "K": K, "V": V, "F": s.F},
        forward=forward,
        training=3 * sum(forward.values()),
        decode=decode * B,
        state=state,
        grows=grows,
        moved=inputs * dtype_bytes + 2 * borders * weights,
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """All sizes of a call; ``shapes`` are those of the memory's weights."""

    K: int
    V: int
    H: int
    T: int
    B: int
    G: int
    F: int
    n: int
    c: int
    shapes: tuple[tuple[int, ...], ...]
    axes: dict[str, int]

    @classmethod
    def of(cls, recipe: Recipe, *, K: int, V: int, H: int, T: int, B: int, G: int) -> _Sizes:
        axes = recipe.axes(K, V)
        return cls(
            K=K,
            V=V,
            H=H,
            T=T,
            B=B,
            G=G,
            F=axes["F"],
            n=recipe.associations,
            c=recipe.context.horizon or 1,
            shapes=recipe.shapes(K, V),
            axes=axes,
        )

    def numel(self, axes: tuple[str, ...]) -> int:
        """Entries of a gate or param of one head."""
        size = 1
        for axis in axes:
            size *= self.axes[axis]
        return size

    @property
    def weights(self) -> int:
        """Entries of the memory of one head."""
        return sum(_numel(shape) for shape in self.shapes)


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


# -- state ---------------------------------------------------------------------------------------


def _state(
    recipe: Recipe, s: _Sizes, dtype_bytes: int, state_size: int, *, factored: bool
) -> tuple[dict[str, int], int]:
    """Bytes by part, and bytes that each further token adds."""
    rows, heads = s.B, s.B * s.H
    normalized = recipe.memory.read.normalize != "none" and not recipe.dual
    ones = s.F if normalized else 0
    parts = {"memory": heads * s.weights * state_size}
    # A normalised memory moves together with its memory of ones, one more row.
    wide = recipe.algorithm.wide(recipe)
    slots = sum(
        (_numel(recipe.algorithm.slot_shape(name, shape)) + ones)
        * (8 if name in wide else state_size)
        for name in recipe.algorithm.slots
        for shape in s.shapes
    )
    parts["algorithm"] = heads * slots
    scale = 1 if recipe.memory.read.normalize == "floor" else 0
    parts["normaliser"] = heads * (ones + scale) * state_size
    each = _slot(recipe, s, dtype_bytes, state_size, normalized) * rows
    span = recipe.span
    name = "associations" if recipe.nonparametric or span is None else "open tokens"
    parts[name] = each * (s.T if span is None else span)
    parts["position"] = 8 * rows
    if recipe.dual:
        row, closed = row_bytes(recipe, s, state_size) * rows, s.T - s.T % recipe.algorithm.batch
        parts["rows"] = row * closed * s.n  # those of the open inner batch are not written yet
        return {name: size for name, size in parts.items() if size}, row * s.n
    if factored:
        parts["factor"] = heads * s.T * (s.T + s.V) * state_size
        each += heads * (2 * s.T + 1 + s.V) * state_size
    return {name: size for name, size in parts.items() if size}, each if span is None else 0


def _slot(recipe: Recipe, s: _Sizes, dtype_bytes: int, state_size: int, normalized: bool) -> int:
    """Bytes of one association with its numbers, of one row: k, v, every rate, and a mask."""
    numbers = dict.fromkeys(recipe.constants(), 1)
    named = frozenset().union(*(part.static_quantities() for part in recipe.members()))
    for asked in (*recipe.params(), *recipe.gates()):
        if asked.name in named or asked in recipe.gates():
            numbers[asked.name] = s.numel(asked.axes)
    if "log_lr" in numbers:
        numbers["lr"] = numbers["log_lr"]
    rates = sum(numbers.values())
    return s.H * ((s.K + s.V + normalized) * dtype_bytes + rates * state_size) + 1


# -- FLOPs ---------------------------------------------------------------------------------------

_Count = tuple[dict[str, int], int, int, tuple[str, ...]]
"""FLOPs of one row by part, of one decoded token, states that cross a border, notes."""


def _linear(recipe: Recipe, s: _Sizes) -> _Count:
    affine, decay, algorithm = recipe.bias.affine, recipe.retention.decay, recipe.algorithm
    assert affine is not None  # linear.refuses
    if scans(recipe):
        return _scan(recipe, s)
    per = decay.per if decay is not None else "head"
    V = s.V + (recipe.memory.read.normalize != "none")
    heads, F = s.H, s.F
    notes: list[str] = []
    moving = algorithm.momentum_of != "none"
    sees = affine[0] != 0
    # Value channels with equations of their own become heads of one row.
    if recipe.memory.diagonal:
        heads, F, V, per = s.H * V, 1, 1, "head"
    elif per_value_systems(recipe):
        notes.append(f"one triangular system per value channel: {V} of them in place of one")
        heads, V, per = s.H * V, 1, "key" if per in ("key_value", "entry") else "head"
    T, c = s.T * s.n, s.c
    probe = recipe.bias.probe is not None
    token = _token(F, V, c, s.G, sees=sees, probe=probe) * heads
    if moving and per != "head":
        notes.append("decay per channel with momentum runs token by token")
        return {"tokens": token * s.T}, token, T, tuple(notes)
    over_values = per in ("value", "key_value") and not sees
    plain = not (moving or probe or c > 1 or over_values)

    def chunk(C: int) -> dict[str, int]:
        parts = _plain if plain else _flow
        of = algorithm.momentum_of
        counted = parts(F, V, C * c, C * s.G, sees=sees, probe=probe, moving=moving, of=of)
        return {**counted, "coefficients": 2 * C**3 if moving else 0}

    if s.n > 1:  # the sub-steps of a decoded token are a chunk of their own
        token = sum(chunk(s.n).values()) * heads
    C = min(chunk_length(solves=sees), T)
    N = -(-T // C) if T else 0
    forward = {name: n * N * heads for name, n in chunk(C).items()}
    bonus, first = _read_extras(recipe, s)
    forward["read"] += bonus * s.T + first
    return forward, token + bonus + first, N, tuple(notes)


def _read_extras(recipe: Recipe, s: _Sizes) -> tuple[int, int]:
    """FLOPs of the bonus, per token, and of reading before the first write, per call."""
    read = recipe.memory.read
    bonus = 2 * s.G * s.F * s.H if read.bonus != 0.0 else 0
    return bonus, 2 * s.G * s.F * s.V * s.H if read.when == "before" and s.T else 0


def _scan(recipe: Recipe, s: _Sizes) -> _Count:
    """Entry by entry: only the read of a matrix is a product."""
    bonus, first = _read_extras(recipe, s)
    token = 0 if recipe.memory.diagonal else 2 * s.G * s.F * s.V * s.H + bonus
    first = 0 if recipe.memory.diagonal else first
    notes = ("the scan is elementwise, about 6 operations per entry and token, not counted here",)
    groups = -(-s.T // max(16, GROUP // (s.H * s.weights))) if s.T else 0
    return {"read": token * s.T + first}, token + first, groups, notes


def _token(F: int, V: int, c: int, G: int, *, sees: bool, probe: bool) -> int:
    """One token of one head: write, predict and erase (c associations each), read."""
    if probe:
        return 2 * F * V * (3 + G)
    return 2 * F * V * ((3 if sees else 1) * c + G)


def _plain(F: int, V: int, R: int, J: int, *, sees: bool, **_: object) -> dict[str, int]:
    return {
        "gram": 2 * R * R * F if sees else 0,
        "inverse": R**3 if sees else 0,
        "solve": 2 * R * R * V if sees else 0,
        "state": (4 if sees else 2) * R * F * V,
        "read": 2 * J * F * V + 2 * J * R * (F + V),
    }


def _flow(
    F: int, V: int, R: int, J: int, *, sees: bool, probe: bool, moving: bool, of: str | None
) -> dict[str, int]:
    """`recollect.engines.linear.chunk_general.solve`: known rows, unknown rows, or both."""
    both = sees and (probe or (moving and of == "value"))
    known = both or not sees
    gram = inverse = solve = 0
    state = 2 * R * F * V * (2 if moving else 1) if known else 0
    read = 2 * J * F * V * (2 if moving else 1)
    # One map per chunk; where momentum would make it 2F × 2F, thin products walk instead.
    scan = 0 if sees == moving else 2 * F * F * V * (4 if moving else 1)
    if known:
        read += 2 * J * R * (F + V)
    if sees:
        gram = 2 * R * R * F * (2 if both else 1)
        inverse = R**3
        solve = 2 * R * R * V * (2 if both else 1) + 2 * R * R * F * (2 if moving else 1)
        maps = 0 if moving else 1
        writes = 2 if moving and not both else 1
        state += 2 * R * F * F * maps + 2 * R * F * V * (writes + (2 if moving else 1))
        read += 2 * J * R * (F + V)
    parts = {"gram": gram, "inverse": inverse, "solve": solve}
    return {**parts, "state": state, "scan": scan, "read": read}


def _least_squares(recipe: Recipe, s: _Sizes) -> _Count:
    """`recursion_backward` and `conjugate_gradient`; F³/3 for a factor."""
    algorithm, F, V, H, T, G = recipe.algorithm, s.F, s.V, s.H, s.T, s.G
    read, write = 2 * G * F * V, 2 * F * V
    inverse = algorithm.inverse
    assert inverse is not None  # least_squares.refuses
    if inverse.recurs:
        C = min(64, T)
        N = -(-T // C) if T else 0
        J = C * G
        chunk = {
            "gram": 2 * C * F * F + 2 * C * C * F,
            "factor": C**3 // 3 + C * C * (F + V),
            "state": 2 * C * F * (F + V) + 2 * C * F * V,
            "read": 2 * J * F * V + 2 * J * C * (F + V),
        }
        if inverse.ridge == "refreshed" and recipe.context.forgets:
            every = inverse.every
            border = 2 * F**3 + 2 * F * F * V
            chunk["borders"] = border * C // every + 2 * C * F * F + 2 * C * C * (F + V)
        step = (4 * F * F + 2 * F * F + 2 * write + read) * H
        return {name: n * N * H for name, n in chunk.items()}, step, N, ()
    kind = "" if inverse.kind == "exact" else inverse.kind
    attend = _plain(F, V, 64, 64 * G, sees=False)
    product = sum(_plain(F, F, 64, 64 * G, sees=False).values())
    N = -(-T // 64) if T else 0
    parts = {"read": sum(attend.values()) * N * H}
    notes: tuple[str, ...] = ()
    step = 2 * write + read
    if kind == "spectral":
        parts["eigenvectors"] = 10 * F**3 * T * H
        step += 10 * F**3
    elif kind == "conjugate_gradient" or not kind:
        count = inverse.steps if kind else 30
        parts["products"] = product * N * H * count
        step += 2 * F * F * (1 + G * count)
        if not kind:
            notes = ("counted as 30 iterations; they stop at the tolerance (rc.watch_solves)",)
    return parts, step * H, N, notes


def _kernel(recipe: Recipe, s: _Sizes) -> _Count:
    if recipe.dual:
        return dual_flops(recipe, s)
    return gram_flops(recipe, s) if recipe.from_gram else local_flops(recipe, s)


def _deep(recipe: Recipe, s: _Sizes) -> _Count:
    memory = recipe.memory
    assert isinstance(memory, Stack)  # deep.refuses
    V = s.V + (memory.read.normalize != "none")
    maps, b, T = memory.maps(s.F, V), recipe.algorithm.batch, s.T * s.n
    whole, rest = divmod(T, b)
    if whole and rest:
        whole, rest = whole + 1, 0  # the last inner batch is padded to the others' length
    one = deep.batch_flops(recipe, maps, b, s.G)
    last = deep.batch_flops(recipe, maps, rest, s.G, ends=False) if rest else dict.fromkeys(one, 0)
    parts = {name: s.H * (whole * one[name] + last[name]) for name in one}
    # A decoded token replays its open inner batch, half of it on average.
    open_batch = deep.batch_flops(recipe, maps, (b + 1) // 2, s.G, ends=b == 1)
    decode = s.H * s.n * sum(open_batch.values())
    notes: list[str] = []
    price = deep.orthogonal(recipe, maps)
    if price:
        plain = (sum(one.values()) - one["Newton–Schulz"]) / b
        token = price if recipe.algorithm.every == "token" else price / b
        notes.append(
            f"orthogonalising takes {readable(token, 'FLOP')} per token and head, "
            f"{token / plain:.0f} times plain descent's {readable(plain, 'FLOP')}"
        )
    if b > 1:
        notes.append("decoding replays the open inner batch, half of it on average")
    return parts, decode, -(-T // b), tuple(notes)


def _reference(recipe: Recipe, s: _Sizes) -> _Count:
    if recipe.dual:
        return dual_flops(recipe, s)
    if recipe.nonparametric or recipe.from_gram:
        each = 2 * (s.K + s.V) * s.H * s.G
        horizon = recipe.context.horizon
        pairs = sum(min(t, horizon or t) for t in range(1, s.T + 1))
        return {"attention": each * pairs}, each * min(s.T + 1, horizon or s.T + 1), 0, ()
    first = sum(_numel(shape) for shape in _firsts(recipe, s))
    forward, backward = 2 * s.weights, 2 * (2 * s.weights - first)
    read = s.G * 2 * s.weights
    if recipe.algorithm.condenses:
        F, V = s.F, s.V
        each = {"statistics": 2 * F * (F + V), "solve": 2 * F**3 // 3 + 2 * F * F * V}
        token = sum(each.values()) + s.G * 2 * F * V
        parts = {name: n * s.T * s.H for name, n in each.items()}
        parts["read"] = s.G * 2 * F * V * s.T * s.H
        return parts, token * s.H, s.T, ("every token solves a dense system",)
    if recipe.context.horizon is None:
        steps = recipe.algorithm.steps
        past = (forward + backward) * steps * s.H
        pairs = s.T * (s.T + 1) // 2
        parts = {"write": past * pairs, "read": read * s.T * s.H}
        return parts, past * (s.T + 1) + read * s.H, s.T, ("every token solves from the origin",)
    passes = 2 if recipe.algorithm.splits else 1
    write = s.c * (forward + backward) * passes * s.n
    orthogonal = sum(_newton_schulz(shape, recipe) for shape in s.shapes)
    notes: list[str] = []
    if orthogonal:
        ratio = f"{orthogonal / max(write, 1):.0f} times the gradient's {readable(write, 'FLOP')}"
        price = f"orthogonalising takes {readable(orthogonal, 'FLOP')} per token and head, {ratio}"
        if recipe.algorithm.every == "batch":
            # The reference settles every token, to keep what it needs at the border.
            orthogonal *= 2
            price += (
                "; the recipe needs it once per inner batch, this engine takes it at every token"
            )
        notes.append(price)
    parts = {"write": write, "Newton–Schulz": orthogonal, "read": read}
    token = (write + orthogonal + read) * s.H
    # A decoded token replays its open inner batch, half of it on average.
    replayed = token - read * s.H
    decode = token + replayed * (recipe.algorithm.batch - 1) // 2
    if recipe.algorithm.batch > 1:
        notes.append("decoding replays the open inner batch, half of it on average")
    counted = {name: n * s.T * s.H for name, n in parts.items()}
    return counted, decode, s.T, tuple(notes)


def _firsts(recipe: Recipe, s: _Sizes) -> tuple[tuple[int, ...], ...]:
    """Shapes of the maps that read the key itself: nothing is propagated through them."""
    memory = recipe.memory
    if isinstance(memory, Stack):
        return tuple((m.out, m.inp) for m in memory.maps(s.F, s.V) if m.first)
    return s.shapes[:1]


def _newton_schulz(shape: tuple[int, ...], recipe: Recipe) -> int:
    steps = recipe.algorithm.newton_steps
    if steps == 0 or len(shape) < 2:
        return 0
    rows, columns = shape[0], _numel(shape[1:])
    small, large = min(rows, columns), max(rows, columns)
    return steps * (4 * small * small * large + 2 * small**3)


_ENGINES: dict[str, Callable[[Recipe, _Sizes], _Count]] = {
    "linear": _linear,
    "least_squares": _least_squares,
    "kernel": _kernel,
    "deep": _deep,
    "reference": _reference,
}


def _counts(recipe: Recipe, engine: str) -> Callable[[Recipe, _Sizes], _Count]:
    """What an engine takes; another engine's price is never put in its place."""
    if engine not in _ENGINES:
        priced = [e.name for e in ENGINES if e.name in _ENGINES and not e.refuses(recipe)]
        raise RecipeError(
            f"rc.cost has no price for the engine {engine!r}, which runs this recipe: name one "
            f"that it knows, method={' or '.join(map(repr, priced))}"
        )
    return _ENGINES[engine]
