"""Random recipes: what validates runs, splits, round-trips, differentiates, and agrees.

A draw either raises `RecipeError` when it is made, or everything that `check` asks holds for it.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.contracts import generate

import recollect as rc
from recollect.choices.member import all_members
from recollect.engines.select import select
from recollect.recipe.recipe import CHOICES

CI, ALL = 50, 1000

# The same float64 operations in another grouping: rounding only. Norm-wise, relative.
SPLIT = 1e-10
# Another order of summation and a triangular solve, at well-conditioned sizes.
ENGINE = 1e-9


def check(recipe: rc.Recipe, index: int) -> None:
    """Everything that holds for a valid recipe; raises AssertionError with what does not."""
    x = generate.small_inputs(recipe, index)
    y, state, slopes = generate.gradients(recipe, x, method="reference")
    if not y.abs().amax() < 1e6:
        # Some dynamics diverge from large starts (a cubic error, a link of degree above 1): no
        # recipe may do so from small ones.
        x = generate.smaller(recipe, x)
        y, state, slopes = generate.gradients(recipe, x, method="reference")
    for name, tensor in {"y": y, **generate.parts(state), **slopes}.items():
        assert torch.isfinite(tensor).all(), f"{name} is not finite"

    if generate.ill_posed(recipe):
        return  # finite; the rest is as exact as the draw's conditioning, see tests/engines

    cuts = generate.random_cuts(x.T, index)
    y2, state2 = generate.split(recipe, x, cuts)
    assert generate.error(y2, y) < SPLIT, f"outputs differ when split at {cuts}"
    wrong, name = generate.worst(generate.parts(state2), generate.parts(state))
    assert wrong < SPLIT, f"{name} of the state differs when split at {cuts}: {wrong:.1e}"

    _check_slopes(recipe, x, index)
    _check_masked(recipe, x, index, "reference")
    _check_packed(recipe, x, index)
    _check_read(recipe, x, y, state)
    _check_states(recipe, x, y, state, cuts[0])
    _check_dtypes(recipe, x)
    again = rc.Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.to_json() == recipe.to_json()

    simple = recipe.canonical()
    assert simple.canonical() == simple
    if simple != recipe:
        twin = generate.run(simple, _for(simple, x), method="reference")[0]
        assert generate.error(twin, y) < SPLIT, "the canonical form computes something else"

    engine = select(recipe).engine.name
    if engine != "reference":
        chunk = 1 + index % 6
        y3, state3, slopes3 = generate.gradients(recipe, x, method="auto", chunk_size=chunk)
        assert generate.error(y3, y) < ENGINE, f"outputs of {engine}: {generate.error(y3, y):.1e}"
        for what, found, expected in (
            ("state", generate.parts(state3), generate.parts(state)),
            ("gradient", slopes3, slopes),
        ):
            wrong, name = generate.worst(found, expected)
            assert wrong < ENGINE, f"{what} {name} of {engine}: {wrong:.1e}"
        _check_masked(recipe, x, index, "auto")


def _check_slopes(recipe: rc.Recipe, x: generate.Inputs, index: int) -> None:
    """The outer gradient of the outputs is their slope in a random direction."""
    if any(not getattr(part, "smooth", True) for part in generate.parts_of(recipe)):
        return  # a gradient that stands in for the slope
    g = torch.Generator().manual_seed(index)
    leaves = x.leaves()
    y, _ = generate.run(recipe, leaves, method="reference")
    weights = torch.randn(y.shape, generator=g, dtype=y.dtype)
    named = {n: a for n, a in leaves.tensors().items() if a.numel()}
    if not y.requires_grad:
        return
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
            z, _ = generate.run(recipe, x.put(moved), method="reference")
        return float((z * weights).sum())

    # Fourth-order central differences: h⁴ f⁽⁵⁾ + rounding/h is below 1e-6 where f is smooth. A kink
    # (relu, a threshold, a sign) inside the step is met by a smaller one.
    ratio = math.nan
    for h in (1e-4, 1e-6, 1e-8, 1e-9):
        ratio = (at(-2 * h) - 8 * at(-h) + 8 * at(h) - at(2 * h)) / (12 * h)
        if abs(found - ratio) < 1e-5 * max(1.0, abs(ratio), size):
            return
    raise AssertionError(f"outer gradient {found:.8g}, slope {ratio:.8g}")


def _check_packed(recipe: rc.Recipe, x: generate.Inputs, index: int) -> None:
    """Documents packed in one row, one of them empty, equal each run alone."""
    row = x.rows(0)
    borders = [0, *generate.random_cuts(x.T, index), x.T, x.T]
    y, state = generate.run(recipe, row, cu_seqlens=torch.tensor(borders))
    assert state.rows == len(borders) - 1
    for start, stop in itertools.pairwise(borders):
        alone, _ = generate.run(recipe, row.cut(start, stop))
        assert generate.error(y[:, start:stop], alone) < SPLIT, f"packed at {borders}"
    if row.init is not None:
        # One start per document, here the same one: also each document's own.
        starts = tuple(a.expand(len(borders) - 1, *a.shape) for a in row.init)
        twin, _ = generate.run(recipe, row, cu_seqlens=torch.tensor(borders), init=starts)
        assert torch.equal(twin, y)


def _check_read(recipe: rc.Recipe, x: generate.Inputs, y: torch.Tensor, state: rc.State) -> None:
    """Reading without writing is the last output; causal=False is reading after everything."""
    read, retention = recipe.memory.read, recipe.retention
    delayed = recipe.at_border or recipe.algorithm.every == "batch"
    # A ridge is refreshed after the last token of its span has read.
    inverse = recipe.algorithm.inverse
    if inverse is not None and inverse.ridge == "refreshed":
        delayed |= x.T % inverse.every == 0
    if read.when == "before" or read.bonus != 0.0 or delayed:
        return  # what the last token read is not what stands after it
    names = {gate.name for gate in retention.gates() if "decay" not in gate.name}
    names |= {name for part in recipe.context.within for name in part.reads}
    gates = {name: x.gates[name] for name in names}
    found = rc.read(recipe, x.q, gates=gates, state=state, params=x.params)
    assert generate.error(found[:, -1:], y[:, -1:]) < SPLIT, "rc.read after the last token"
    if not recipe.context.within:
        late, _ = generate.run(recipe, x, causal=False)
        assert generate.error(late, found) < SPLIT, "causal=False"


def _check_states(
    recipe: rc.Recipe, x: generate.Inputs, y: torch.Tensor, state: rc.State, cut: int
) -> None:
    """States carry the outer gradient, and survive being written, repeated, and begun anew."""
    whole, pieces = x.leaves(), x.leaves()
    found = []
    for leaves, cuts in ((whole, []), (pieces, [cut])):
        out, _ = generate.split(recipe, leaves, cuts)
        named = list(leaves.tensors().values())
        if not out.requires_grad:
            return
        found.append(
            torch.autograd.grad(
                out.square().sum(), named, allow_unused=True, materialize_grads=True
            )
        )
    for (name, _), a, b in zip(x.tensors().items(), *found, strict=True):
        wrong = generate.error(b, a)
        assert wrong < ENGINE, f"gradient of {name} across a split at {cut}: {wrong:.1e}"

    _, early = generate.run(recipe, x.cut(0, cut))
    early = rc.State.from_dict({name: a.clone() for name, a in early.detach().to_dict().items()})
    rest, _ = generate.run(recipe, x.cut(cut, x.T), state=early)
    assert generate.error(rest, y[:, cut:]) < ENGINE, "after a round trip of the state"
    twice = x.cut(cut, x.T).tokens(lambda a: a.repeat_interleave(2, dim=0))
    rest2, _ = generate.run(recipe, twice, state=early.repeat(2))
    assert generate.error(rest2[::2], rest) < ENGINE, "after repeating rows"
    anew = state.reset(torch.ones(state.rows, dtype=torch.bool), x.init)
    again, _ = generate.run(recipe, x, state=anew)
    assert generate.error(again, y) < ENGINE, "after a reset"
    assert state.nbytes == sum(a.numel() * a.element_size() for a in state.tensors())


def _check_dtypes(recipe: rc.Recipe, x: generate.Inputs) -> None:
    """Outputs in the values' dtype; states in float32 under float32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        y, state = generate.run(recipe, x.map(lambda a, dtype=dtype: a.to(dtype)))
        assert y.dtype == dtype
        assert all(w.dtype == torch.float32 for w in state.weights)
        assert torch.isfinite(y).all(), dtype


def _check_masked(recipe: rc.Recipe, x: generate.Inputs, index: int, method: str) -> None:
    """Poisoned gaps under an attention mask: each row equals its real tokens run alone."""
    g = torch.Generator().manual_seed(index)
    mask = torch.rand(x.q.shape[:2], generator=g) < 0.7

    def poison(a: torch.Tensor) -> torch.Tensor:
        gaps = ~mask.view(*mask.shape, *(1,) * (a.dim() - 2))
        return torch.where(gaps, torch.nan, a)

    y, state, slopes = generate.gradients(
        recipe, x.tokens(poison), attention_mask=mask, method=method
    )
    assert all(torch.isfinite(slope).all() for slope in slopes.values()), "poison under a mask"
    for row in range(mask.shape[0]):
        real = mask[row]
        alone = x.rows(row).tokens(lambda a, real=real: a[:, real])
        y1, state1 = generate.run(recipe, alone, method=method)
        assert generate.error(y[row : row + 1, real], y1) < SPLIT, f"masked outputs of {method}"
        assert not y[row, ~real].any(), "a masked token reads 0"
        if recipe.span is not None and not recipe.dual:  # an unbounded cache keeps its padding
            here = generate.parts(state.select(torch.tensor([row])))
            wrong, name = generate.worst(here, generate.parts(state1))
            assert wrong < SPLIT, f"masked {name} of the state of {method}: {wrong:.1e}"


def _for(recipe: rc.Recipe, x: generate.Inputs) -> generate.Inputs:
    """Inputs without the gates and params that a simpler recipe no longer asks for."""
    gates = {gate.name: x.gates[gate.name] for gate in recipe.gates()}
    params = {param.name: x.params[param.name] for param in recipe.params()}
    return generate.Inputs(q=x.q, k=x.k, v=x.v, gates=gates, params=params, init=x.init)


def sweep(count: int) -> None:
    """Check ``count`` valid recipes, and that what is refused is refused with a reason."""
    done, index, refused = 0, 0, 0
    failures: list[str] = []
    while done < count:
        try:
            recipe = generate.draw(index)
        except rc.RecipeError as error:
            refused, index = refused + 1, index + 1
            if not any(choice in str(error) for choice in (*CHOICES, "read", "probe")):
                failures.append(f"draw {index - 1} is refused without naming a choice: {error}")
            continue
        try:
            check(recipe, index)
        except Exception as error:
            failures.append(f"draw {index}: {type(error).__name__}: {error}\n    {recipe}")
        done, index = done + 1, index + 1
    print(f"{count} valid of {index} draws ({count / index:.0%}); {refused} refused with a reason")
    assert not failures, f"{len(failures)} of {count} fail:\n" + "\n".join(failures[:20])
    # Fewer would mean that validation refuses, or the generator draws, next to nothing.
    assert count / index > 0.1


def test_random_recipes() -> None:
    sweep(CI)


@pytest.mark.slow
def test_many_random_recipes() -> None:
    sweep(ALL)


def test_every_member_is_drawn() -> None:
    """Among the recipes of the slow sweep every registered member stands in a valid one."""
    seen: set[str] = set()
    for _, recipe in generate.valid(ALL):
        waiting = list(recipe.members())
        while waiting:
            part = waiting.pop()
            seen.add(type(part).__name__)
            waiting.extend(part.parts())
    drawn = {name for name, cls in all_members().items() if generate.drawn(cls)}
    assert drawn - seen == set()


def test_draws_are_reproducible() -> None:
    (index, recipe), *_ = generate.valid(1)
    assert generate.draw(index) == recipe
    one, two = generate.small_inputs(recipe, index), generate.small_inputs(recipe, index)
    assert all(torch.equal(a, two.tensors()[name]) for name, a in one.tensors().items())
    assert math.isfinite(float(generate.run(recipe, one)[0].sum()))
