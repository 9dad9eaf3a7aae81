"""Everything that holds for any valid recipe, whichever members it is made of."""

from __future__ import annotations

import itertools
import math

import torch

from recollect.choices.features.base import Kernel
from recollect.engines.select import select_engine
from recollect.functional.read import read
from recollect.recipe.recipe import Recipe
from recollect.state.state import State
from recollect.testing.compare import (
    error,
    gradients,
    label,
    parts,
    random_cuts,
    require,
    run,
    same,
    split,
    worst,
)
from recollect.testing.draws import parts_of
from recollect.testing.inputs import Inputs, ill_posed, small_inputs, smaller

__all__ = ["ENGINE", "SPLIT", "check_recipe", "kinked", "read_gates"]

# The same float64 operations in another grouping: rounding only. Norm-wise, relative.
SPLIT = 1e-10
# Another order of summation and a triangular solve, at well-conditioned sizes.
ENGINE = 1e-9


def check_recipe(recipe: Recipe, index: int = 0) -> list[tuple[str, str | None]]:
    """Hold one recipe to everything that any valid recipe promises, in float64.

    Finite; the same split anywhere, masked, packed, written to a state and back; its outer gradient
    the slope of its outputs; its canonical form the same; the engine that `recall` chooses equal to
    the reference in outputs, state and all gradients.

    Args:
        recipe: what is checked.
        index: of the random inputs, sizes and cuts.

    Returns:
        The name of each check, and the reason if it was skipped.

    Raises:
        AssertionError: what does not hold, in one sentence.
    """
    x = small_inputs(recipe, index)
    y, state, slopes = gradients(recipe, x, engine="reference")
    if not y.abs().amax() < 1e6:
        # Some dynamics diverge from large starts (a cubic error, a link of degree above 1): no
        # recipe may do so from small ones.
        x = smaller(recipe, x)
        y, state, slopes = gradients(recipe, x, engine="reference")
    for name, tensor in {"y": y, **parts(state)}.items():
        require(torch.isfinite(tensor).all(), f"{name} is not finite")
    for name, tensor in slopes.items():
        require(torch.isfinite(tensor).all(), f"the gradient of {name} is not finite")

    checks: list[tuple[str, str | None]] = [("outputs and gradients are finite", None)]
    if ill_posed(recipe):  # the rest is as exact as the draw's conditioning, see tests/engines
        rest = "splits, masks, packing, reading, states and engines agree"
        return [*checks, (rest, "slopes are fitted without a ridge")]

    cuts = random_cuts(x.T, index)
    same(split(recipe, x, cuts), (y, state), SPLIT, f"split at {cuts}")
    checks.append(("outputs and state are equal for any split", None))

    checks.append((label(_check_slopes), _check_slopes(recipe, x, index)))
    _check_masked(recipe, x, index, "reference")
    checks.append((label(_check_masked), None))
    _check_packed(recipe, x, index)
    checks.append((label(_check_packed), None))
    checks.append((label(_check_read), _check_read(recipe, x, y, state)))
    checks.append((label(_check_states), _check_states(recipe, x, y, state, cuts[0])))
    _check_dtypes(recipe, x)
    checks.append((label(_check_dtypes), None))
    again = Recipe.from_json(recipe.to_json())
    alike = again == recipe and hash(again) == hash(recipe)
    require(alike and again.to_json() == recipe.to_json(), "JSON gives back another recipe")

    simple = recipe.canonical()
    require(simple.canonical() == simple, "the canonical form has another canonical form")
    if simple != recipe:
        twin = run(simple, _for(simple, x), engine="reference")[0]
        require(error(twin, y) < SPLIT, "the canonical form computes something else")
    checks.append(("JSON gives the recipe back, and its canonical form computes as much", None))

    engine = select_engine(recipe).engine.name
    if engine != "reference":
        chunk = 1 + index % 6
        y3, state3, slopes3 = gradients(recipe, x, engine="auto", chunk_size=chunk)
        same((y3, state3), (y, state), ENGINE, f"of engine {engine}")
        wrong, name = worst(slopes3, slopes)
        require(wrong < ENGINE, f"the gradient of {name} by engine {engine} is off by {wrong:.1e}")
        _check_masked(recipe, x, index, "auto")
    only = "the reference is the only engine" if engine == "reference" else None
    return [*checks, ("the engine that recall chooses agrees with the reference", only)]


def kinked(recipe: Recipe) -> bool:
    """Whether a gradient in it stands in for the slope, so that finite differences do not apply."""
    return any(isinstance(part, Kernel) and not part.smooth for part in parts_of(recipe))


def read_gates(recipe: Recipe) -> set[str]:
    """Names of the gates that a query needs when it only reads."""
    names = {gate.name for gate in recipe.retention.gates() if gate.role != "decay"}
    return names | {name for part in recipe.context.restrictions for name in part.query_gates}


def _check_slopes(recipe: Recipe, x: Inputs, index: int) -> str | None:
    """The outer gradient of the outputs is their slope in a random direction."""
    if kinked(recipe):
        return "a gradient in it replaces a slope"
    g = torch.Generator().manual_seed(index)
    leaves = x.leaves()
    y, _ = run(recipe, leaves, engine="reference")
    weights = torch.randn(y.shape, generator=g, dtype=y.dtype)
    named = {n: a for n, a in leaves.tensors().items() if a.numel()}
    if not y.requires_grad:
        return "outputs have no gradient"
    slopes = torch.autograd.grad(
        (y * weights).sum(), list(named.values()), allow_unused=True, materialize_grads=True
    )
    # A zero memory is where links have kinks: stay there.
    ways = [torch.randn(a.shape, generator=g, dtype=a.dtype) * a.detach() for a in named.values()]
    found = sum(float((a * b).sum()) for a, b in zip(slopes, ways, strict=True))
    size = sum(float(a.norm() * b.norm()) for a, b in zip(slopes, ways, strict=True))

    def at(step: float) -> float:
        moved = {n: a.detach() + step * w for (n, a), w in zip(named.items(), ways, strict=True)}
        with torch.no_grad():
            z, _ = run(recipe, x.put(moved), engine="reference")
        return float((z * weights).sum())

    # Fourth-order central differences: h⁴ f⁽⁵⁾ + rounding/h is below 1e-6 where f is smooth. A kink
    # (relu, a threshold, a sign) inside the step is met by a smaller one.
    ratio = math.nan
    for h in (1e-4, 1e-6, 1e-8, 1e-9):
        ratio = (at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h)
        if abs(found - ratio) < 1e-5 * max(1.0, abs(ratio), size):
            return None
    raise AssertionError(
        f"the outer gradient is {found:.8g} in a direction in which the outputs' slope is "
        f"{ratio:.8g}"
    )


def _check_packed(recipe: Recipe, x: Inputs, index: int) -> None:
    """Documents packed in one row, one of them empty, equal each run alone."""
    row = x.rows(0)
    borders = [0, *random_cuts(x.T, index), x.T, x.T]
    y, state = run(recipe, row, cu_seqlens=torch.tensor(borders))
    require(state.rows == len(borders) - 1, "a packed row does not give one state per document")
    for start, stop in itertools.pairwise(borders):
        alone, _ = run(recipe, row.cut(start, stop))
        wrong = error(y[:, start:stop], alone)
        require(wrong < SPLIT, f"outputs of documents packed at {borders} are off by {wrong:.1e}")
    if row.init is not None:
        # One start per document, here the same one: also each document's own.
        starts = tuple(a.expand(len(borders) - 1, *a.shape) for a in row.init)
        twin, _ = run(recipe, row, cu_seqlens=torch.tensor(borders), initial_memory=starts)
        require(torch.equal(twin, y), "packed documents with a memory each give other outputs")


def _check_read(recipe: Recipe, x: Inputs, y: torch.Tensor, state: State) -> str | None:
    """Reading without writing is the last output; causal=False is reading after everything."""
    how = recipe.memory.read
    delayed = recipe.links_at_batch_end or recipe.algorithm.update_every == "batch"
    # A ridge is refreshed after the last token of its span has read.
    inverse = recipe.algorithm.inverse
    if inverse is not None and inverse.ridge == "refreshed":
        delayed |= x.T % inverse.refresh_every == 0
    if how.when == "before" or how.bonus != 0.0 or delayed:
        return "the last token reads another memory than the final one"
    gates = {name: x.gates[name] for name in read_gates(recipe)}
    found = read(recipe, x.q, gates=gates, state=state, params=x.params)
    wrong = error(found[:, -1:], y[:, -1:])
    require(wrong < SPLIT, f"rc.read after the last token is off by {wrong:.1e}")
    if not recipe.context.restrictions:
        late, _ = run(recipe, x, causal=False)
        wrong = error(late, found)
        require(wrong < SPLIT, f"causal=False is off by {wrong:.1e} from reading afterwards")
    return None


def _check_states(recipe: Recipe, x: Inputs, y: torch.Tensor, state: State, cut: int) -> str | None:
    """States carry the outer gradient, and survive being written, repeated, and reset."""
    found: list[tuple[torch.Tensor, ...]] = []
    for leaves, cuts in ((x.leaves(), []), (x.leaves(), [cut])):
        out, _ = split(recipe, leaves, cuts)
        named = list(leaves.tensors().values())
        if not out.requires_grad:
            return "outputs have no gradient"
        found.append(
            torch.autograd.grad(
                out.square().sum(), named, allow_unused=True, materialize_grads=True
            )
        )
    for name, a, b in zip(x.tensors(), *found, strict=True):
        wrong = error(b, a)
        require(
            wrong < ENGINE, f"the gradient of {name} across a split at {cut} is off by {wrong:.1e}"
        )

    _, early = run(recipe, x.cut(0, cut))
    early = State.from_dict({name: a.clone() for name, a in early.detach().to_dict().items()})
    rest, _ = run(recipe, x.cut(cut, x.T), state=early)
    require(error(rest, y[:, cut:]) < ENGINE, "outputs after a round trip of the state are off")
    twice = x.cut(cut, x.T).tokens(lambda a: a.repeat_interleave(2, dim=0))
    rest2, _ = run(recipe, twice, state=early.repeat(2))
    require(error(rest2[::2], rest) < ENGINE, "outputs after repeating a state's rows are off")
    anew = state.reset(torch.ones(state.rows, dtype=torch.bool), x.init)
    again, _ = run(recipe, x, state=anew)
    require(error(again, y) < ENGINE, "outputs after a reset are off")
    size = sum(a.numel() * a.element_size() for a in state.tensors())
    require(state.nbytes == size, "a state's nbytes are not those of its tensors")
    return None


def _check_dtypes(recipe: Recipe, x: Inputs) -> None:
    """Outputs in the values' dtype; states in float32 under float32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        y, state = run(recipe, x.map(lambda a, dtype=dtype: a.to(dtype)))
        require(y.dtype == dtype, f"outputs of {dtype} inputs are {y.dtype}")
        single = all(w.dtype == torch.float32 for w in state.weights)
        require(single, f"weights of {dtype} inputs are not kept in float32")
        require(torch.isfinite(y).all(), f"outputs in {dtype} are not finite")


def _check_masked(recipe: Recipe, x: Inputs, index: int, engine: str) -> None:
    """Poisoned gaps under an attention mask: each row equals its real tokens run alone."""
    g = torch.Generator().manual_seed(index)
    mask = torch.rand(x.q.shape[:2], generator=g) < 0.7

    def poison(a: torch.Tensor) -> torch.Tensor:
        gaps = ~mask.view(*mask.shape, *(1,) * (a.dim() - 2))
        return torch.where(gaps, torch.nan, a)

    y, state, slopes = gradients(recipe, x.tokens(poison), attention_mask=mask, engine=engine)
    finite = all(torch.isfinite(slope).all() for slope in slopes.values())
    require(finite, f"NaN under an attention mask reaches the gradients of {engine}")
    for row in range(mask.shape[0]):
        real = mask[row]
        alone = x.rows(row).tokens(lambda a, real=real: a[:, real])
        y1, state1 = run(recipe, alone, engine=engine)
        wrong = error(y[row : row + 1, real], y1)
        require(wrong < SPLIT, f"masked outputs of {engine} are off by {wrong:.1e}")
        require(not y[row, ~real].any(), f"a masked token of {engine} reads something other than 0")
        is_bounded = recipe.buffer_size is not None and not recipe.uses_kernel_rows
        if is_bounded:  # an unbounded cache keeps its padding
            here = parts(state.select(torch.tensor([row])))
            wrong, name = worst(here, parts(state1))
            require(wrong < SPLIT, f"masked {name} of the state of {engine} is off by {wrong:.1e}")


def _for(recipe: Recipe, x: Inputs) -> Inputs:
    """Inputs without the gates and params that a simpler recipe no longer asks for."""
    gates = {gate.name: x.gates[gate.name] for gate in recipe.gates()}
    params = {param.name: x.params[param.name] for param in recipe.params()}
    return Inputs(q=x.q, k=x.k, v=x.v, gates=gates, params=params, init=x.init)
