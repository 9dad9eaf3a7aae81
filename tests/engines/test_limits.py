"""Numbers at the ends of their ranges: −inf logs, exact zeros, and empty batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.select import ENGINES

EXACT = 1e-9
GD = rc.algorithm.GradientDescent
PRESETS = {name: rc.zoo.get(name).recipe for name in rc.zoo.names()}
LOG_RATES = {
    "mlstm": PRESETS["mlstm"],
    "matrix": rc.Recipe(algorithm=GD(lr="log_input")),
    "matrix, dot product": rc.Recipe(bias=rc.bias.DotProduct(), algorithm=GD(lr="log_input")),
    "perceptron": rc.Recipe(memory=rc.memory.MLP(), algorithm=GD(lr="log_input", batch_size=4)),
}
EXTREME = [0, 3, 4]
"""Tokens with extreme values: the first, and two in a row."""


def fast(recipe: rc.Recipe) -> list[str]:
    return [engine.name for engine in ENGINES[:-1] if not engine.unsupported_reasons(recipe)]


def inputs(recipe: rc.Recipe, **sizes: int) -> generate.Inputs:
    memory = recipe.memory
    square = memory.is_elementwise or getattr(memory, "residual", False) or memory.read.transposed
    return generate.inputs(recipe, **{"B": 1, "T": 7, "K": 4, "V": 4 if square else 3, **sizes})


def put(x: generate.Inputs, name: str, number: float, tokens: object = EXTREME) -> generate.Inputs:
    changed = x.tensors()[name].clone()
    changed[:, tokens] = number
    return x.replace_tensors({name: changed})


def finite(state: rc.State) -> dict[str, Tensor]:
    """Return the tensors of a state with a number in place of −inf, for finite differences."""
    return {
        n: x.masked_fill(x == -math.inf, -7.0) for n, x in generate.flatten_state(state).items()
    }


def all_of(recipe: rc.Recipe, x: generate.Inputs, **options: object) -> dict[str, Tensor]:
    """Return outputs, state and gradients by name."""
    y, state, slopes = generate.gradients(recipe, x, **options)
    return {"y": y, **finite(state), **{f"gradient of {name}": a for name, a in slopes.items()}}


def errors(
    results: dict[str, Tensor], expected: dict[str, Tensor], batch_size: int
) -> dict[str, float]:
    """Return the largest relative error of a sequence by name; params belong to all sequences."""
    largest: dict[str, float] = {}
    for name, a in expected.items():
        is_shared = name.startswith(("gradient of param", "gradient of init"))
        size = 1 if len(a) == batch_size and not is_shared else max(1, len(a))
        pairs = zip(results[name].split(size), a.split(size), strict=True)
        largest[name] = max(generate.relative_error(*pair) for pair in pairs)
    return largest


def as_batch(variants: list[generate.Inputs]) -> generate.Inputs:
    """Join inputs that differ in tensors with an axis of tokens."""
    names = [n for n in variants[0].tensors() if not n.startswith(("param", "init"))]
    joined = {n: torch.cat([x.tensors()[n] for x in variants]) for n in names}
    return variants[0].replace_tensors(joined)


def batched(names: Iterable[str], slow: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by recipes, with their variants in one batch and in separate calls.

    An engine may have a branch for tensors that are 0 everywhere, which a batch of variants misses.
    The fast suite has separate calls of one recipe per engine.
    """
    engines = {"reference"}  # with separate calls, or without a need of them
    params = []
    for name in names:
        engine = next(iter(fast(PRESETS[name])), "reference")
        is_first = name not in slow and engine not in engines
        engines.update([engine] * is_first)
        for in_batch, is_slow in ((True, name in slow), (False, not is_first)):
            marks = [pytest.mark.slow] * is_slow
            label = f"{name}-{'one batch' if in_batch else 'separate'}"
            params.append(pytest.param(name, in_batch, marks=marks, id=label))
    return pytest.mark.parametrize(("name", "in_batch"), params)


def agree(recipe: rc.Recipe, x: generate.Inputs) -> dict[str, Tensor]:
    """Compare every engine with the reference, as far as the rounding of the reference allows.

    MEMORA's W is uniform if A is 0, so its layer norm divides rounding errors by their size: a
    deviation is an error only above ten times that of the reference under changes of 1e-15.
    """
    expected = all_of(recipe, x, engine="reference")
    assert not [name for name, a in expected.items() if not a.isfinite().all()]
    for method in fast(recipe):
        results = all_of(recipe, x, engine=method, chunk_size=4)
        wrong = errors(results, expected, len(x.q))
        if max(wrong.values()) < EXACT:
            continue
        rounded = dict.fromkeys(expected, EXACT / 10)
        for _ in range(4):
            noise = {n: 1e-15 * torch.randn_like(a) for n, a in x.tensors().items() if n[0] in "vi"}
            moved = x.replace_tensors({n: x.tensors()[n] + a for n, a in noise.items()})
            near = all_of(recipe, moved, engine="reference")
            deviation = errors(near, expected, len(x.q))
            rounded = {name: max(e, deviation[name]) for name, e in rounded.items()}
        for name in expected:
            assert wrong[name] < 10 * rounded[name], name
    return {n.removeprefix("gradient of "): a for n, a in expected.items() if "gradient" in n}


@pytest.mark.parametrize("name", LOG_RATES)
def test_log_rate_of_minus_infinity(name: str) -> None:
    """A log rate of −∞ is a step of 0, as in the recipe with rates in place of their logs."""
    recipe = LOG_RATES[name]
    plain = replace(recipe, algorithm=replace(recipe.algorithm, lr="input"))
    for tokens in (EXTREME, slice(None)):
        x = put(inputs(recipe), "gate log_lr", -math.inf, tokens)
        slopes = agree(recipe, x)
        gates = {**x.gates, "lr": x.gates["log_lr"].exp()}
        gates.pop("log_lr")
        expected, _ = rc.recall(
            plain, x.q, x.k, x.v, gates, params=x.params, initial_memory=x.init, engine="reference"
        )
        y, _ = generate.run_recall(recipe, x, engine="reference")
        assert generate.relative_error(y, expected) < EXACT
        assert (slopes["gate log_lr"][:, tokens] == 0).all()


@pytest.mark.parametrize("method", ["reference", "linear", "deep"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_other_rates_that_are_not_finite_are_refused(method: str, bad: float) -> None:
    recipe = LOG_RATES["matrix"]
    x = put(inputs(recipe), "gate log_lr", bad)
    with pytest.raises(ValueError, match=r"gate 'log_lr' has an? (NaN|infinity) at row 0, token 0"):
        generate.run_recall(recipe, x, engine=method)


@pytest.mark.parametrize("name", ["mamba", "rg_lru"])
def test_factored_decay_of_minus_infinity(name: str) -> None:
    """∂α/∂a = α log α, which is 0 with α, as for other decays that leave nothing."""
    recipe = PRESETS[name]
    for tokens in (EXTREME, slice(None)):
        slopes = agree(recipe, put(inputs(recipe), "gate log_decay", -math.inf, tokens))
        nearly = put(inputs(recipe), "gate log_decay", -1e6, tokens)
        _, _, expected = generate.gradients(recipe, nearly, engine="reference")
        assert generate.largest_error(slopes, expected)[0] < EXACT


def logs(recipe: rc.Recipe) -> Iterator[str]:
    yield from (f"gate {gate.name}" for gate in recipe.gates() if gate.name.startswith("log_"))


FORGETS = [name for name, r in PRESETS.items() if list(logs(r))]


@batched(FORGETS)
def test_a_log_of_minus_infinity(name: str, in_batch: bool) -> None:
    recipe = PRESETS[name]
    x = inputs(recipe)
    for gate in logs(recipe):
        variants = [put(x, gate, -math.inf), put(x, gate, -math.inf, slice(None))]
        if x.tensors()[gate].dim() > 3:  # a single channel
            changed = x.tensors()[gate].clone()
            changed[:, EXTREME, ..., 0] = -math.inf
            variants.append(x.replace_tensors({gate: changed}))
        for batch in [as_batch(variants)] if in_batch else variants:
            agree(recipe, batch)


def may_be_zero(recipe: rc.Recipe) -> Iterator[str]:
    yield from ("q", "k", "v")
    for gate in recipe.gates():
        span = gate.range
        above = span.low is None or span.low < 0 or (span.low == 0 and not span.low_open)
        below = span.high is None or span.high > 0 or (span.high == 0 and not span.high_open)
        if above and below:
            yield f"gate {gate.name}"


@batched(PRESETS, slow=generate.VARIANTS)
def test_exact_zeros_in_every_number(name: str, in_batch: bool) -> None:
    recipe = PRESETS[name]
    x = inputs(recipe)
    variants = [put(x, number, 0.0) for number in may_be_zero(recipe)]
    everything = {name: a.clone() for name, a in x.tensors().items()}
    for number in may_be_zero(recipe):
        everything[number][:, EXTREME] = 0.0
    variants.append(x.replace_tensors(everything))
    for batch in [as_batch(variants)] if in_batch else variants:
        agree(recipe, batch)
    for i, a in enumerate(x.init or ()):
        agree(recipe, x.replace_tensors({f"init {i}": torch.zeros_like(a)}))


@pytest.mark.parametrize("name", generate.presets())
def test_no_rows_or_no_tokens(name: str) -> None:
    """A batch without rows (moba, ffn_moe), and a full pass over no tokens (ffn_swiglu)."""
    recipe = PRESETS[name]
    for B, T in ((0, 3), (2, 0), (0, 0)):
        x = inputs(recipe, B=B, T=T)
        for method in ("auto", *fast(recipe), "reference"):
            y, state, _ = generate.gradients(recipe, x, engine=method)
            assert y.shape == (B, T, *x.q.shape[2:3], x.v.shape[-1])
            y_continued, _ = generate.run_recall(recipe, x, engine=method, state=state.detach())
            assert y_continued.shape == y.shape
            if not any(part.horizon is not None for part in recipe.context.restrictions):
                y_complete, _ = generate.run_recall(recipe, x, engine=method, causal=False)
                assert y_complete.shape == y.shape
