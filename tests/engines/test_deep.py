"""The deep engine on random recipes: its two code paths, memory use, graphs, and state.

The contract suites compare fixed recipes with the reference. Here recipes are drawn from memory ×
bias × retention × algorithm × window × batch × decay, with odd lengths, splits that change engines,
and groups of every size.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import recollect as rc
from recollect.blocks.cost import cost
from recollect.choices.memory import LinearMap
from recollect.engines.deep.engine import DeepEngine
from recollect.engines.deep.structure import execution_mode

memory, bias, retention = rc.memory, rc.bias, rc.retention
algorithm, context, features = rc.algorithm, rc.context, rc.features

# Equal float64 sums in another order. If p < 2, |e|^(p − 2) amplifies rounding near e = 0.
EXACT, ROUGH = 1e-10, 1e-8
# If the definition moves by more when its inputs move by their last digit, no order of sums is more
# accurate. Five Newton–Schulz iterations after a proximal step move a gradient of draw 93 by
# 1.4e-9. The largest of four moves estimates the condition and does not bound it.
AMPLIFIED = 4
CI, ALL = 25, 240

MEMORIES = (
    memory.Matrix(),
    memory.MLP(),
    memory.MLP(depth=3, activation="silu", expansion=2),
    memory.MLP(activation="gelu_tanh", bias=True, expansion=2),
    memory.MLP(depth=1, norm="layer", bias=True),
    memory.MLP(norm="rms", activation="tanh", residual=False),
    memory.MLP(norm="layer"),
    memory.GatedMLP(expansion=2),
    memory.GatedMLP(norm="layer", bias=True, expansion=1),
    memory.MLP(static_weights=True, expansion=2),
    memory.GatedMLP(static_weights=True, bias=True, expansion=1),
)
BIASES = (
    bias.L2(),
    bias.DotProduct(),
    bias.Lp(p=3.0),
    bias.Lp(p=1.5, smooth="tanh"),
    bias.Huber(),
    bias.Huber(form="coordinate", per="value"),
    bias.Huber(form="norm", threshold="learned"),
    bias.ValueRobust(),
)


def _decay(rng: random.Random) -> retention.Decay | None:
    per = rng.choice((None, "head", "head", "key", "value", "key_value"))
    rate = rng.choice(("input", "learned")) if per != "key_value" else "input"
    return None if per is None else retention.Decay(per=per, alpha=rate)


def _retention(rng: random.Random) -> Any:
    decay, update_every = _decay(rng), rng.choice(("token", "batch"))
    plain = retention.Keep() if decay is None else decay
    linked = {"decay": decay, "link_every": update_every}
    return rng.choice(
        (
            *(plain,) * 5,
            retention.Lq(q=4.0, **linked),
            retention.Lq(q=3.0, form="as_published", **linked),
            retention.Simplex(axis=rng.choice(("in", "out")), **linked),
            retention.ElasticNet(smooth=rng.random() < 0.5, **linked),
            retention.ElasticNet(form="proximal", **linked),
            retention.Bregman(link_function=rng.choice(("sigmoid", "tanh")), **linked),
            retention.FDivergence(kind="kl", **linked),
            retention.Ball(radius="input", **linked),
        )
    )


def _algorithm(rng: random.Random) -> Any:
    b = rng.choice((1, 2, 3, 4, 8))
    per, share = rng.choice(("head", "head", "value")), rng.random() < 0.3
    offset = rng.choice((0.0, "learned"))
    limit = rng.choice(("worst_case", "measured")) if share else "worst_case"
    result = [
        algorithm.GradientDescent(
            batch_size=b, per=per, normalized_steps=share, batch_overlap=limit
        ),
        algorithm.GradientDescent(
            batch_size=b, reduction="mean", offset=offset, normalized_steps=share
        ),
        *(algorithm.Momentum(batch_size=b, per=per, normalized_steps=share, batch_overlap=limit),)
        * 2,
        algorithm.Momentum(
            batch_size=b, momentum_on="value", normalized_steps=share, batch_overlap=limit
        ),
        algorithm.Muon(batch_size=b, lr_position=rng.choice(("outside", "inside"))),
        algorithm.Muon(batch_size=b, normalized_steps=share),
        algorithm.RMSProp(batch_size=b),
        algorithm.Adam(batch_size=b),
    ]
    if b > 1:
        steps = rng.choice((0, 5))
        result.append(
            algorithm.Muon(
                batch_size=b, update_every="batch", ns_steps=steps, normalized_steps=share
            )
        )
    return rng.choice(result)


def recipes(count: int) -> Iterator[tuple[int, rc.Recipe]]:
    """Return the first ``count`` valid combinations of the engine, with their index."""
    for index in itertools.count():
        rng = random.Random(index)
        window = rng.choice((None, None, 1, 3))
        try:
            recipe = rc.Recipe(
                memory=rng.choice(MEMORIES),
                features=rng.choice((*(features.Identity(),) * 3, features.Polynomial())),
                bias=rng.choice(BIASES),
                context=context.Online() if window is None else context.Window(size=window),
                retention=_retention(rng),
                algorithm=_algorithm(rng),
            )
        except rc.RecipeError:
            continue
        if DeepEngine().unsupported_reasons(recipe):
            continue
        yield index, recipe
        count -= 1
        if not count:
            return


def condition(recipe: rc.Recipe, x: generate.Inputs) -> float:
    """Return the change of the reference's results when every input moves by its last digit."""
    y, state, slopes = generate.gradients(recipe, x, engine="reference")
    maximum = 0.0
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)

        def nudged(a: Tensor, g: torch.Generator = g) -> Tensor:
            digit = torch.randint(-1, 2, a.shape, generator=g).to(a)
            return a * (1 + torch.finfo(a.dtype).eps * digit)

        near = dataclasses.replace(
            x,
            q=nudged(x.q),
            k=nudged(x.k),
            v=nudged(x.v),
            gates={name: nudged(gate) for name, gate in x.gates.items()},
        )
        y2, state2, slopes2 = generate.gradients(recipe, near, engine="reference")
        maximum = max(
            maximum,
            generate.relative_error(y2, y),
            generate.largest_error(generate.flatten_state(state2), generate.flatten_state(state))[
                0
            ],
            generate.largest_error(slopes2, slopes)[0],
        )
    return maximum


def check(recipe: rc.Recipe, index: int) -> None:
    """Compare outputs, state and gradients with the reference, also split over engines."""
    x = generate.small_inputs(recipe, index, longest=15)
    expected, expected_state, slopes = generate.gradients(recipe, x, engine="reference")
    if not expected.abs().amax() < 1e6:
        x = generate.scaled_down(recipe, x)
        expected, expected_state, slopes = generate.gradients(recipe, x, engine="reference")
    # A power below 2, and a division by the root of moments, amplify rounding.
    moments = isinstance(recipe.algorithm, algorithm.Adam | algorithm.RMSProp)
    rough = getattr(recipe.bias, "p", 2.0) < 2 or moments
    tolerance = ROUGH if rough else EXACT
    chunk = 1 + index % 9
    y, state, grads = generate.gradients(recipe, x, engine="deep", chunk_size=chunk)
    wrong = max(generate.relative_error(y, expected), generate.largest_error(grads, slopes)[0])
    # Measured only if it decides, because it takes four runs of the reference.
    if tolerance <= wrong < ROUGH:
        tolerance = max(tolerance, AMPLIFIED * condition(recipe, x))
    assert generate.relative_error(y, expected) < tolerance
    for what, a, b in (
        ("state", generate.flatten_state(state), generate.flatten_state(expected_state)),
        ("gradient", grads, slopes),
    ):
        wrong, name = generate.largest_error(a, b)
        assert wrong < tolerance, f"{what} {name}: {wrong:.1e}"
    cuts = generate.random_cuts(x.T, index)
    with torch.no_grad():
        for order in (["deep"], ["deep", "reference"], ["reference", "deep"]):
            y, state = generate.run_in_pieces(recipe, x, cuts, order)
            assert generate.relative_error(y, expected) < tolerance, f"split at {cuts} by {order}"
            wrong, name = generate.largest_error(
                generate.flatten_state(state), generate.flatten_state(expected_state)
            )
            assert wrong < tolerance, f"state {name} after {cuts} by {order}: {wrong:.1e}"


def sweep(count: int) -> set[str]:
    failures: list[str] = []
    modes: set[str] = set()
    for index, recipe in recipes(count):
        modes.add(execution_mode(recipe))
        try:
            check(recipe, index)
        except AssertionError as error:
            failures.append(f"draw {index}: {error}\n    {recipe}")
    assert not failures, f"{len(failures)} of {count} fail:\n" + "\n".join(failures[:20])
    return modes


def test_drawn_recipes() -> None:
    sweep(CI)


@pytest.mark.slow
def test_many_drawn_recipes() -> None:
    assert sweep(ALL) == {"table", "border", "tokens"}


# -- two code paths ------------------------------------------------------------------------------


@rc.member
class Unchained(memory.Stack):
    """x + W_1 gelu(W_2 x) of a user, which is not declared as a chain."""

    residual = True

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return memory.MLP().maps(F, V)

    def compute(self, apply: Any, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return raw + apply(1, torch.nn.functional.gelu(apply(0, x)))


@rc.member
class Twice(memory.Stack):
    """x + W (σ(W x) ⊙ V x): one map applied twice, and one unused."""

    residual = True

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return (
            LinearMap(name="W", out_features=V, in_features=F, reads_features=True, is_output=True),
            LinearMap(
                name="V", out_features=V, in_features=F, reads_features=True, is_output=False
            ),
            LinearMap(
                name="U", out_features=V, in_features=F, reads_features=False, is_output=False
            ),
        )

    def compute(self, apply: Any, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return raw + apply(0, torch.tanh(apply(0, x)) * apply(1, x))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("rule", [algorithm.GradientDescent, algorithm.Momentum])
def test_chains_equal_programs(rule: Any, window: int) -> None:
    """The path for chains and the path for any program give equal results."""
    recipe = rc.Recipe(
        memory=memory.MLP(),
        context=context.Window(size=window),
        retention=retention.Decay(),
        algorithm=rule(batch_size=4),
    )
    assert recipe.memory.chain_activation == "gelu"
    other = recipe.replace(memory=Unchained())
    assert other.memory.chain_activation is None
    x = generate.inputs(recipe, B=2, T=11, H=2, G=2)
    y, state, slopes = generate.gradients(recipe, x, engine="deep")
    y2, state2, slopes2 = generate.gradients(other, x, engine="deep")
    assert generate.relative_error(y2, y) < 1e-12
    # A user's memory has no read, so no constant for it in the open tokens.
    result, expected = generate.flatten_state(state2), generate.flatten_state(state)
    shared = result.keys() & expected.keys()
    assert expected.keys() - shared <= {"buffer.rates.bonus"}
    for name in shared:
        assert generate.relative_error(result[name], expected[name]) < 1e-12, name
    assert generate.largest_error(slopes2, slopes)[0] < 1e-12


@pytest.mark.parametrize("mode", ["table", "tokens", "border"])
def test_a_program_may_apply_a_map_twice_or_never(mode: str) -> None:
    rule = {
        "table": algorithm.Momentum(batch_size=3),
        "tokens": algorithm.Muon(batch_size=3),
        "border": algorithm.Muon(batch_size=3, update_every="batch"),
    }[mode]
    recipe = rc.Recipe(memory=Twice(), context=context.Window(size=2), algorithm=rule)
    assert execution_mode(recipe) == mode
    check(recipe, 5)


# -- graphs and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk_size", "base"),
    [
        (1, True),
        (64, False),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(1, False), (64, True)]),
    ],
)
def test_gradcheck(chunk_size: int, base: bool) -> None:
    """First and second derivatives against finite differences, in one group and in several."""
    recipe = rc.Recipe(
        memory=memory.MLP(expansion=1, activation="tanh", static_weights=base),
        retention=retention.Decay(),
        algorithm=algorithm.Momentum(batch_size=2),
    )
    x = generate.inputs(recipe, B=1, T=3, H=1, K=2, V=2).with_grad()
    names = list(x.tensors())

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, state = generate.run_recall(
            recipe, x.replace_tensors(dict(zip(names, tensors, strict=True))), chunk_size=chunk_size
        )
        return y, *state.weights

    tensors = tuple(x.tensors().values())
    assert torch.autograd.gradcheck(outputs, tensors)
    assert torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True)


class Largest(TorchDispatchMode):
    """The shapes of all tensors that are created."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.shapes.add(tuple(x.shape))
        return result


@pytest.mark.parametrize(
    "recipe",
    [
        rc.Recipe(memory=m, context=c, retention=r, algorithm=a)
        for m, c, r, a in (
            (memory.MLP(), context.Online(), retention.Decay(), algorithm.Momentum(batch_size=16)),
            (
                memory.GatedMLP(norm="layer"),
                context.Window(size=3),
                retention.Decay(per="key"),
                algorithm.GradientDescent(batch_size=16),
            ),
            (
                memory.MLP(norm="layer"),
                context.Online(),
                retention.Lq(link_every="batch", decay=retention.Decay()),
                algorithm.Momentum(batch_size=16),
            ),
        )
    ],
    ids=["momentum", "window, channels", "link at borders"],
)
def test_no_weights_per_token(recipe: rc.Recipe) -> None:
    """If A is linear, weights are built per boundary (A and S), never per token."""
    assert execution_mode(recipe) == "table"
    x = generate.inputs(recipe, B=1, T=64, H=1, K=16, V=16)
    generate.run_recall(recipe, x, engine="deep")  # one-time work of a process
    with Largest() as recorded:
        generate.gradients(recipe, x, engine="deep")
    smallest = min(out * inp for out, inp in recipe.shapes(16, 16))
    batches = 64 // 16
    largest = max(recipe.shapes(16, 16), key=lambda s: s[0] * s[1])
    assert any(len(s) >= 2 and s[-2:] == largest for s in recorded.shapes)  # weights are recorded
    for shape in recorded.shapes:
        if len(shape) >= 3 and shape[-2:] in {*recipe.shapes(16, 16)}:
            lead = 1
            for size in shape[:-2]:
                lead *= size
            assert lead <= 2 * batches * len(recipe.shapes(16, 16)), shape
    assert max(_numel(s) for s in recorded.shapes) < 64 * smallest


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


_LONG = """
import resource, sys, torch, recollect as rc
torch.manual_seed(0)
B, T, H, d = 1, int(sys.argv[1]), 8, 64
recipe = rc.Recipe(memory=rc.memory.MLP(), retention=rc.retention.Decay(),
                   algorithm=rc.algorithm.Momentum(batch_size=16))
def run(T):
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, d), dim=-1).requires_grad_()
            for _ in range(2))
    v = torch.randn(B, T, H, d).requires_grad_()
    gates = {n: (f * torch.rand(B, T, H)).requires_grad_()
             for n, f in (("lr", 0.1), ("log_decay", -0.01), ("momentum", 0.9))}
    init = [(torch.randn(H, *s) / s[-1] ** 0.5).requires_grad_() for s in recipe.shapes(d, d)]
    y, _ = rc.recall(recipe, q, k, v, gates, initial_memory=init, engine="deep")
    y.square().mean().backward()
    assert torch.isfinite(k.grad).all()
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(T)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_training_memory_of_a_long_sequence() -> None:
    """B1 H8 d64 ×4, T = 8192, b = 16, forward and backward in float32: under 1.5 GB."""
    done = subprocess.run(
        [sys.executable, "-c", _LONG, "8192"], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1500, done.stdout


# -- the state -----------------------------------------------------------------------------------


def test_the_state_does_not_grow() -> None:
    recipe = rc.Recipe(
        memory=memory.MLP(),
        context=context.Window(size=3),
        algorithm=algorithm.Momentum(batch_size=4),
    )
    sizes = set()
    for T in (1, 4, 7, 50):
        _, state = generate.run_recall(recipe, generate.inputs(recipe, T=T), engine="deep")
        # A cache for the next token is not part of the state.
        sizes.add(dataclasses.replace(state, cache={}).nbytes)
    assert len(sizes) == 1


def test_simplex_sums_to_one_at_every_token() -> None:
    """Every row that is read sums to 1: M(W; 1) of a matrix of such rows is 1."""
    for update_every, batch in (("token", 4), ("token", 1)):
        recipe = rc.Recipe(
            bias=bias.Lp(p=3.0),
            retention=retention.Simplex(link_every=update_every, decay=retention.Decay()),
            algorithm=algorithm.GradientDescent(batch_size=batch),
        )
        assert DeepEngine().unsupported_reasons(recipe) == []
        x = generate.inputs(recipe, B=2, T=50, H=2, dtype=torch.float32)
        ones = x.replace_tensors({"q": torch.ones_like(x.q)})
        y, _ = generate.run_recall(recipe, ones, engine="deep")
        assert (y - 1).abs().amax() < 1e-6


def test_orthogonalised_steps_depend_on_the_rate() -> None:
    """Doubling η doubles an outer step; inside Newton–Schulz it would cancel (D.4)."""
    outputs = {}
    for scale, lr in itertools.product(("outside", "inside"), (0.05, 0.1)):
        recipe = rc.Recipe(
            memory=memory.MLP(), algorithm=algorithm.Muon(batch_size=4, lr_position=scale, lr=lr)
        )
        x = generate.inputs(recipe, T=9)
        outputs[scale, lr] = generate.run_recall(recipe, x, engine="deep")[0]
    assert generate.relative_error(outputs["outside", 0.1], outputs["outside", 0.05]) > 1e-3
    assert generate.relative_error(outputs["inside", 0.1], outputs["inside", 0.05]) < 1e-5


# -- costs ---------------------------------------------------------------------------------------

COSTS = {
    "chain": rc.Recipe(
        memory=memory.MLP(), retention=retention.Decay(), algorithm=algorithm.Momentum(batch_size=8)
    ),
    "gated, no decay": rc.Recipe(
        memory=memory.GatedMLP(), algorithm=algorithm.Momentum(batch_size=8)
    ),
    "window": rc.Recipe(
        memory=memory.MLP(norm="layer"),
        context=context.Window(size=3),
        retention=retention.Decay(),
        algorithm=algorithm.GradientDescent(batch_size=8),
    ),
    "muon": rc.Recipe(memory=memory.MLP(), algorithm=algorithm.Muon(batch_size=8)),
    "muon at borders": rc.Recipe(
        memory=memory.MLP(), algorithm=algorithm.Muon(batch_size=8, update_every="batch")
    ),
    "sums at borders": rc.Recipe(
        memory=memory.GatedMLP(expansion=1),
        context=context.Window(size=3),
        retention=retention.RowNorm(decay=retention.Decay()),
        algorithm=algorithm.Muon(batch_size=8, update_every="batch", momentum_every="batch"),
    ),
    "plain steps at borders": rc.Recipe(
        retention=retention.Decay(),
        algorithm=algorithm.GradientDescent(batch_size=8, update_every="batch"),
    ),
    "link": rc.Recipe(bias=bias.Lp(), retention=retention.Ball(), algorithm=algorithm.Momentum()),
    "searched": rc.Recipe(
        memory=memory.MLP(), algorithm=algorithm.Muon(batch_size=8, normalized_steps=True)
    ),
    "searched at borders": rc.Recipe(
        memory=memory.MLP(),
        algorithm=algorithm.Muon(batch_size=8, update_every="batch", normalized_steps=True),
    ),
    "normalised": rc.Recipe(
        memory=memory.MLP(), algorithm=algorithm.Momentum(batch_size=8, normalized_steps=True)
    ),
    "normalised under a link": rc.Recipe(
        memory=memory.MLP(),
        retention=retention.Simplex(link_every="batch"),
        algorithm=algorithm.Momentum(batch_size=8, normalized_steps=True),
    ),
    "base": rc.Recipe(
        memory=memory.MLP(static_weights=True),
        retention=retention.Decay(),
        algorithm=algorithm.Momentum(batch_size=8, normalized_steps=True),
    ),
    "base, no decay": rc.Recipe(
        memory=memory.MLP(static_weights=True), algorithm=algorithm.Momentum(batch_size=8)
    ),
    "base, no momentum": rc.Recipe(
        memory=memory.MLP(static_weights=True, depth=3),
        retention=retention.Decay(),
        algorithm=algorithm.GradientDescent(batch_size=8),
    ),
    "base, searched": rc.Recipe(
        memory=memory.GatedMLP(static_weights=True),
        algorithm=algorithm.Muon(batch_size=8, normalized_steps=True),
    ),
    "base, searched at borders": rc.Recipe(
        memory=memory.MLP(static_weights=True),
        context=context.Window(size=3),
        algorithm=algorithm.Muon(batch_size=8, update_every="batch", normalized_steps=True),
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_flops_equal_the_count_of_torch(name: str) -> None:
    """Products of full inner batches, within two percent, without matrix–vector products."""

    def add(x: list[int], a: list[int], b: list[int], *_: object, **__: object) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    recipe = COSTS[name]
    x = generate.inputs(recipe, B=2, T=32, H=2, G=2, K=16, V=16, dtype=torch.float32)
    mapping = {torch.ops.aten.baddbmm_: add}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.no_grad():
        generate.run_recall(recipe, x, engine="deep")
    expected = cost(recipe, B=2, T=32, H=2, G=2, K=16, V=16, engine="deep").total
    rel = 1e-3 if "base" in name else 0.02
    assert counter.get_total_flops() == pytest.approx(expected, rel=rel)


def test_cost_of_orthogonalising() -> None:
    """(8m + 28) d³ per map of width m·d, in addition to the cost of plain descent."""
    recipe = rc.Recipe(memory=memory.MLP(), algorithm=algorithm.Muon(batch_size=16))
    price = cost(recipe, K=64, V=64, T=1024)
    assert price.forward_flops["Newton–Schulz"] == 1024 * 2 * (8 * 4 + 28) * 64**3
    (note,) = (note for note in price.notes if "orthogonalising" in note)
    assert "times plain descent's" in note
    assert "orthogonalising takes" in str(rc.explain(recipe))
