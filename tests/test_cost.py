"""Costs: exact state bytes, FLOPs against torch's counter, decoding against a real token."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from tests.contracts import generate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import recollect as rc
from recollect.benchmarks.suites import MEASURED_RECIPES
from recollect.blocks.cost import cost
from recollect.engines.base import Engine
from recollect.engines.linear.chunked import chunk_length
from recollect.engines.linear.engine import LinearEngine
from recollect.engines.select import ENGINES
from recollect.report.formatting import format_si

RESULTS = Path(__file__).parents[1] / "results" / "bench"
CHUNK = chunk_length(solves=True)

R, algorithm, bias, context = rc.Recipe, rc.algorithm, rc.bias, rc.context
features, memory, retention = rc.features, rc.memory, rc.retention

DOT, CODES = bias.DotProduct(), memory.Matrix(read=memory.Read(transposed=True))
LONG = 960  # full chunks of any length
PRESETS = {name: rc.zoo.get(name).recipe for name in rc.zoo.names()}
LINEAR: dict[str, rc.Recipe] = {
    **{name: recipe for name, recipe in PRESETS.items() if cost(recipe).engine == "linear"},
    "linear_attention": rc.zoo.get("linear_attention").recipe,
    "normalized": rc.zoo.get("normalized_linear_attention").recipe,
    "momentum": R(algorithm=algorithm.Momentum(), retention=retention.Decay()),
    "momentum of a dot product": R(bias=DOT, algorithm=algorithm.Momentum()),
    "window": R(context=context.Window(size=3)),
    "window and momentum": R(context=context.Window(size=3), algorithm=algorithm.Momentum()),
    "window of a dot product": R(bias=DOT, context=context.Window(size=3)),
    "probe": R(bias=bias.L2(probe=bias.Probe())),
    "a system per value channel": R(retention=retention.Decay(per="value")),
    "a decay per entry": R(bias=DOT, retention=retention.Decay(per="entry", alpha="input_scaled")),
    "a system per entry decay": R(retention=retention.Decay(per="entry")),
    "sub-steps": R(algorithm=algorithm.GradientDescent(updates_per_token=2)),
    "sub-steps without an error": R(
        bias=bias.DotProduct(), algorithm=algorithm.GradientDescent(updates_per_token=2)
    ),
    "sub-steps in a window": R(
        bias=bias.DotProduct(),
        context=context.Window(size=2),
        algorithm=algorithm.GradientDescent(updates_per_token=4),
    ),
    "vector": R(memory=memory.Vector()),
    "scan": R(retention=retention.Decay(per="key"), algorithm=algorithm.Momentum()),
    "transposed": R(memory=CODES, retention=retention.Decay()),
    "transposed sum": R(memory=CODES, bias=DOT, retention=retention.Decay(per="value")),
    "transposed before": R(memory=memory.Matrix(read=memory.Read(transposed=True, when="before"))),
    "transposed sub-steps": R(
        memory=CODES, algorithm=algorithm.GradientDescent(updates_per_token=2)
    ),
    "polynomial": R(features=features.Polynomial(degree=2)),
}
# Decays per channel that cannot be absorbed skip blocks above the diagonal: the count is a bound.
BOUNDED = {"gla", "both channels", "dfw", "gateloop", "hgrn2", "retnet_xpos", "rwkv6"}
BOUNDED |= {"kalman_linear_attention", "oja", "transposed sum"}
LINEAR["both channels"] = R(bias=DOT, retention=retention.Decay(per="key_value"))


def flops(recipe: rc.Recipe, x: generate.Inputs, **options: object) -> int:
    """Return torch's count, of matrix products without triangular inverses."""

    def in_place(x: list[int], a: list[int], b: list[int], *_: object, **__: object) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    def attention(q: list[int], k: list[int], v: list[int], *_: object, **__: object) -> int:
        return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])

    def outer(a: list[int], u: list[int], k: list[int], *_: object, **__: object) -> int:
        # A rank-one update of a matrix; other sums of products are elementwise.
        return 2 * math.prod(a) if len(u) >= 3 and u[-1] == k[-2] == 1 else 0

    mapping = {
        torch.ops.aten.baddbmm_: in_place,
        torch.ops.aten.addcmul: outer,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.no_grad():
        generate.run_recall(recipe, x, **options)
    return counter.get_total_flops()


def inputs(recipe: rc.Recipe, *, T: int, B: int = 2, G: int = 2) -> generate.Inputs:
    memory = recipe.memory
    is_square = memory.is_elementwise or memory.residual or memory.read.transposed
    V = 16 if is_square else 24
    return unpaired(
        recipe, generate.inputs(recipe, B=B, T=T, H=2, G=G, K=16, V=V, dtype=torch.float32)
    )


def unpaired(recipe: rc.Recipe, x: generate.Inputs) -> generate.Inputs:
    """Drop the initial pairs of a memory of rows, since cost counts the pairs that tokens write."""
    if not recipe.uses_kernel_rows or x.init is None:
        return x
    first = 1 + len(recipe.row_widths(x.v.shape[-1]))
    none = tuple(a[:, :0] for a in x.init[:first])
    return dataclasses.replace(x, init=(*none, *x.init[first:]))


def estimated(recipe: rc.Recipe, x: generate.Inputs, **options: object) -> rc.Cost:
    B, T, Hq, K = x.q.shape
    H = x.k.shape[2]
    return cost(recipe, B=B, T=T, H=H, G=Hq // H, K=K, V=x.v.shape[-1], **options)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_engine(name: str) -> None:
    recipe = LINEAR[name]
    x = inputs(recipe, T=200)
    result = estimated(recipe, x)
    assert result.engine == "linear"
    counted = flops(recipe, x)
    products = result.total - result.forward_flops.get("inverse", 0)
    assert products == pytest.approx(counted, rel=0.01) or (
        name in BOUNDED and counted < products < 1.5 * counted
    )


@pytest.mark.parametrize("name", LINEAR)
def test_one_more_token(name: str) -> None:
    recipe = LINEAR[name]
    x = inputs(recipe, T=41, B=1)
    _, state = generate.run_recall(recipe, x.slice_tokens(0, 40))
    counted = flops(recipe, x.slice_tokens(40, 41), state=state)
    assert estimated(recipe, x).decode == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", ["rls", "geometric_rls"])
def test_least_squares(name: str) -> None:
    """Matrix products of full spans, without LAPACK's factors, which torch does not count."""
    recipe = rc.zoo.get(name).recipe
    x = inputs(recipe, T=640)
    # Strong decays make chunks shorter than the estimate assumes.
    weak = {gate: 0.01 * g for gate, g in x.gates.items()}
    # One attempt: float32 may be followed by float64.
    x = dataclasses.replace(x, gates=weak).map_tensors(torch.Tensor.double)
    result = estimated(recipe, x)
    products = result.total - result.forward_flops["factor"]
    assert result.engine == "least_squares"
    assert products == pytest.approx(flops(recipe, x), rel=0.35)


def test_attention() -> None:
    recipe = rc.zoo.get("softmax_attention").recipe
    x = inputs(recipe, T=64)
    # The count of scaled dot-product attention is that of all pairs; a causal kernel does half of
    # them and the diagonal.
    assert 2 * estimated(recipe, x).total == pytest.approx(flops(recipe, x), rel=2 / 64)
    for name in ("sliding_window_attention", "fox", "moba", "bilinear_gated_attention"):
        masked = rc.zoo.get(name).recipe
        x = inputs(masked, T=300)
        # Strong decays skip distant keys, and the cost is that of all keys.
        x = dataclasses.replace(x, gates={gate: 0.01 * g for gate, g in x.gates.items()})
        # Block scores take a few more products per query.
        assert estimated(masked, x).total == pytest.approx(flops(masked, x), rel=0.03), name
    total = rc.Recipe(
        memory=memory.LocalConstant(),
        bias=DOT,
        context=context.KernelWeighted(kernel=features.ReluKernel()),
        algorithm=algorithm.Analytic(),
    )
    x = inputs(total, T=300)
    assert estimated(total, x).total == flops(total, x)


def test_local_polynomials() -> None:
    for degree, K in ((1, 8), (1, 40), (2, 8)):
        recipe = rc.Recipe(
            memory=memory.LocalPolynomial(degree=degree),
            context=context.KernelWeighted(),
            algorithm=algorithm.Analytic(ridge=1.0),
        )
        x = generate.inputs(recipe, B=1, T=150, H=2, K=K, V=K, dtype=torch.float32)
        result, counted = estimated(recipe, x), flops(recipe, x)
        # The number of conjugate gradient steps is an estimate and marked as such.
        slack = 0.15 if "dense" in result.notes[0] else 0.6
        assert abs(math.log(result.total / counted)) < slack, (degree, K)


REFERENCE: dict[str, rc.Recipe] = {
    "matrix": R(bias=bias.Huber()),
    "perceptron": R(memory=memory.MLP()),
    "gated": R(memory=memory.GatedMLP(residual=False), algorithm=algorithm.Momentum(batch_size=4)),
    "window": R(memory=memory.MLP(), context=context.Window(size=3)),
    "base": R(memory=memory.MLP(static_weights=True), algorithm=algorithm.Momentum(batch_size=4)),
    "muon": R(bias=bias.Lp(p=3), algorithm=algorithm.Muon()),
    "muon at the border": R(algorithm=algorithm.Muon(batch_size=4, update_every="batch")),
    "all of the past": R(
        memory=memory.MLP(),
        context=context.Prefix(),
        algorithm=algorithm.GradientDescent(updates_per_token=2),
    ),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_engine(name: str) -> None:
    recipe = REFERENCE[name]
    x = generate.inputs(recipe, B=1, T=30, H=2, G=2, K=16, V=16, dtype=torch.float32)
    price = estimated(recipe, x, engine="reference")
    assert price.engine == "reference"
    # The first tokens of a window have fewer than c associations.
    assert price.total == pytest.approx(flops(recipe, x, engine="reference"), rel=0.1)


def test_cost_depends_on_the_engine() -> None:
    muon, perceptron = REFERENCE["muon"], REFERENCE["perceptron"]
    # For single tokens both engines run equal products.
    assert cost(muon).engine == "deep"
    assert cost(muon).total == cost(muon, engine="reference").total
    # A read by coefficients includes the batch's associations: 2 Σ (in + out) per token.
    more = cost(perceptron).total - cost(perceptron, engine="reference").total
    assert more == 2 * 2 * (64 + 256) * cost(perceptron).sizes["T"]
    # larger chunks use more FLOPs for parallel work
    assert cost(R()).total > cost(R(), engine="reference").total


def test_engine_without_a_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(type(engine).count_flops is not Engine.count_flops for engine in ENGINES)

    class Mine(LinearEngine):
        name = "mine"
        count_flops = Engine.count_flops

    monkeypatch.setattr("recollect.engines.select.ENGINES", (Mine(), *ENGINES))
    with pytest.raises(rc.RecipeError, match=r"no price for the engine 'mine'.*engine='linear' or"):
        cost(R())
    with pytest.raises(rc.RecipeError, match="no price for the engine 'mine'"):
        cost(R(), engine="mine")
    assert cost(R(), engine="linear").engine == "linear"
    explanation = rc.explain(R())
    assert (explanation.engine, explanation.cost) == ("mine", None)
    assert "no price for the engine 'mine'" in explanation.state[0]


# -- sequential steps and time ---------------------------------------------------------------------

HUBER = R(bias=bias.Huber())
WINDOWED = R(
    bias=bias.Huber(), context=context.Window(size=4), retention=retention.Decay(when="before")
)
PER_KEY = R(retention=retention.Decay(per="key"), algorithm=algorithm.Momentum())
STEPS: dict[str, tuple[rc.Recipe, str, float]] = {
    "attention": (PRESETS["softmax_attention"], "auto", 0),
    "chunks": (PRESETS["gated_delta_net"], "auto", 1 / CHUNK),
    "token by token": (HUBER, "auto", 1),
    "inner batches": (
        HUBER.replace(algorithm=algorithm.GradientDescent(batch_size=16)),
        "auto",
        1 / 16,
    ),
    "a first token that settles": (PRESETS["memora"], "auto", 2 / 16),
    "weights of every token": (PRESETS["moneta_exact"], "auto", 1),
    "momentum and a decay per key": (PER_KEY, "auto", 1),
    "the reference": (R(), "reference", 1),
    "sub-steps": (
        R(bias=bias.Huber(), algorithm=algorithm.GradientDescent(updates_per_token=2)),
        "reference",
        2,
    ),
}


def operations(recipe: rc.Recipe, T: int, **options: object) -> int:
    """Return the operations that a call dispatches to torch, without views."""

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, function: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            if not any(x.alias_info and not x.alias_info.is_write for x in schema(function)):
                self.count += 1
            return function(*args, **(kwargs or {}))  # type: ignore[operator]

    def schema(function: object) -> list[torch.Argument]:
        return function._schema.returns  # type: ignore[attr-defined]

    x = generate.inputs(recipe, B=1, T=T, H=1, G=1, K=8, V=8, dtype=torch.float32)
    with Counter() as counter, torch.no_grad():
        generate.run_recall(recipe, x, **options)
    return counter.count


@pytest.mark.parametrize("name", STEPS)
def test_operations_grow_with_the_sequential_steps(name: str) -> None:
    recipe, method, per_token = STEPS[name]
    T = CHUNK
    steps = [cost(recipe, T=n, K=8, V=8, engine=method).sequential_steps for n in (T, 2 * T)]
    assert steps[1] - steps[0] == per_token * T
    counts = [operations(recipe, n, engine=method) for n in (T, 2 * T)]
    if per_token:
        assert 1 <= (counts[1] - counts[0]) / (per_token * T) < 500
    else:
        assert (counts[0], steps[0]) == (counts[1], 1)


@pytest.mark.parametrize(
    ("recipe", "changes", "steps"),
    [
        (HUBER, ("algorithm.batch_size=16",), 256),
        (WINDOWED, ("algorithm.batch_size=16", "retention.when='after'"), 256),
        (PER_KEY, ("retention.per='head'",), 4096 // CHUNK),
        (
            R(algorithm=algorithm.Muon()),
            ("algorithm.batch_size=16", "algorithm.update_every='batch'"),
            256,
        ),
        (PRESETS["moneta_exact"], ("retention.link_every='batch'",), 256),
    ],
)
def test_the_change_that_makes_a_recipe_parallel(
    recipe: rc.Recipe, changes: tuple[str, ...], steps: int
) -> None:
    price = cost(recipe)
    assert price.sequential_steps == 4096
    form = price.parallel_form
    assert form is not None
    assert (form.changes, form.sequential_steps) == (changes, steps)
    assert form.relative_time < price.relative_time / 4
    # The change as a user writes it in a file.
    data = recipe.to_dict()
    for change in changes:
        choice, _, field = change.partition(".")
        name, _, value = field.partition("=")
        data[choice] = {**data[choice], name: ast.literal_eval(value)}
    changed = rc.Recipe.from_dict(data)
    assert 3 * operations(changed, 64) < operations(recipe, 64)


def test_parallel_recipes_have_no_change_to_make() -> None:
    for name in ("gated_delta_net", "softmax_attention", "titans", "rls"):
        assert cost(PRESETS[name]).parallel_form is None
    assert cost(HUBER, T=1).parallel_form is None
    # The engine runs its tokens one after another, not the recipe.
    assert cost(R(), engine="reference").parallel_form is None
    assert cost(HUBER, engine=cost(HUBER).engine).parallel_form is not None
    assert cost(HUBER, T=0).sequential_steps == 0


def test_the_pace_in_words() -> None:
    assert cost(R(retention=retention.Decay(when="before"))).relative_time == 1.0
    lines = cost(WINDOWED).pace
    assert lines[0] == "4096 sequential steps: one token after another"
    assert re.fullmatch(r"about \d+ × the time of Gated DeltaNet on a CPU .an estimate.", lines[1])
    assert re.fullmatch(
        r"256 steps and about [\d.]+ × with algorithm.batch_size=16, retention.when='after', which "
        "is another layer",
        lines[2],
    )
    assert all(line in str(rc.explain(WINDOWED)) for line in lines)
    assert cost(PRESETS["softmax_attention"]).pace[0] == "1 sequential step: all tokens at once"
    assert cost(PRESETS["titans"]).pace[0] == "256 sequential steps for 4096 tokens"
    assert "sequential steps" in str(rc.explain("titans_mac"))
    parts = [cost(PRESETS["titans"]), rc.cost("titans_mac")]
    assert parts[0].sequential_steps < parts[1].sequential_steps


@pytest.mark.parametrize("heads", ["", "-one-head"])
def test_estimated_times_against_measured_times(heads: str) -> None:
    errors: list[float] = []
    for name in ("presets", "presets-2025"):  # of two machines; ratios are of single runs
        data = json.loads((RESULTS / f"{name}{heads}-cpu.json").read_text(encoding="utf-8"))
        assert (data["baseline"], data["timer"]) == ("gated_delta_net", "process_time")
        sizes = {size: data["shape"][size] for size in "BTHKV"}
        errors += [
            abs(math.log(cost(recipe, engine=method, **sizes).relative_time / one["ratio"]))
            for one in data["timings"]
            for recipe, method in [MEASURED_RECIPES[one["name"]]]
        ]
    errors.sort()
    assert len(errors) > 0.9 * len(PRESETS)
    assert math.exp(errors[len(errors) // 2]) < 1.35
    assert sum(error < math.log(2) for error in errors) > 0.8 * len(errors)
    assert sum(error < math.log(4) for error in errors) >= len(errors) - 1


# -- state ---------------------------------------------------------------------------------------


def test_state_bytes_are_exact() -> None:
    for index, recipe in generate.valid(120):
        x = unpaired(recipe, generate.small_inputs(recipe, index))
        for dtype in (torch.float32, torch.float64)[: 1 + (index % 4 == 0)]:
            typed = x.map_tensors(lambda t, dtype=dtype: t.to(dtype))
            _, state = generate.run_recall(recipe, typed)
            result = estimated(recipe, typed, dtype_bytes=dtype.itemsize)
            assert result.state_bytes == state.nbytes, recipe


@pytest.mark.parametrize(
    "recipe",
    [
        R(),
        rc.zoo.get("softmax_attention").recipe,
        R(context=context.Window(size=3), algorithm=algorithm.Momentum()),
        R(memory=memory.MLP(), algorithm=algorithm.GradientDescent(batch_size=4)),
    ],
)
def test_state_bytes_under_half_precision(recipe: rc.Recipe) -> None:
    x = generate.inputs(recipe, T=11, dtype=torch.bfloat16)
    _, state = generate.run_recall(recipe, x)
    assert estimated(recipe, x, dtype_bytes=2).state_bytes == state.nbytes


@pytest.mark.parametrize("name", generate.presets())
def test_state_of_presets(name: str) -> None:
    recipe = rc.zoo.get(name).recipe
    sizes = []
    for T in (130, 131):
        x = inputs(recipe, T=T)
        _, state = generate.run_recall(recipe, x)
        result = estimated(recipe, x)
        assert result.state_bytes == state.nbytes
        sizes.append(state.nbytes)
    if recipe.uses_kernel_rows and recipe.algorithm.batch_size > 1:
        return  # rows are added by batches
    # A Cholesky factor's rows grow by one number from token to token.
    rel = 0.01 if recipe.solves_from_gram else 0
    assert result.state_bytes_per_token == pytest.approx(sizes[1] - sizes[0], rel=rel)
    assert result.cache_grows == (recipe.buffer_size is None or recipe.uses_kernel_rows)


# -- the rest ------------------------------------------------------------------------------------


def test_scaling() -> None:
    T = LONG
    single, double = cost(R(), T=T), cost(R(), T=2 * T)
    assert double.total == 2 * single.total
    assert double.state == single.state
    assert cost(R(), T=T, H=3, B=2).total == 6 * single.total
    assert cost(R(), T=T, B=2).state_bytes == 2 * single.state_bytes
    assert single.training == 3 * single.total
    assert cost(R(), T=0).total == 0
    attention = rc.zoo.get("softmax_attention").recipe
    assert cost(attention, T=1024).total > 3.9 * cost(attention, T=512).total


def test_moved_bytes_include_inputs_and_outputs() -> None:
    result = cost(R(), T=LONG, K=32, V=16)
    inputs_and_outputs = LONG * (32 + 16 + 32 + 16 + 1) * 4
    borders, rest = divmod(result.min_bytes_moved - inputs_and_outputs, 2 * 32 * 16 * 4)
    assert rest == 0
    assert LONG / 128 <= borders <= LONG / 16  # states are written and read once per chunk
    assert cost(R(), T=LONG, K=32, V=16, dtype_bytes=2).min_bytes_moved < result.min_bytes_moved


def test_expensive_recipes_are_marked() -> None:
    def notes(**choices: object) -> str:
        return " ".join(cost(R(**choices)).notes)

    assert "one triangular system per value channel: 64" in notes(
        retention=retention.Decay(per="value")
    )
    assert "orthogonalising" in notes(algorithm=algorithm.Muon())
    assert "token by token" in notes(
        retention=retention.Decay(per="key"), algorithm=algorithm.Momentum()
    )
    assert notes() == ""


def test_data_and_table() -> None:
    result = cost(R(), H=4)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["forward_total"] == sum(data["forward"].values())
    assert data["state_bytes"] == sum(data["state"].values())
    table = str(result).split("\n")
    assert table[0].split(maxsplit=1) == ["engine", "linear (triangular solve)"]
    assert len({line.index(line.split("  ")[-1].lstrip()) for line in table}) == 1


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="K must be a whole number >= 1, not 0"):
        cost(R(), K=0)
    with pytest.raises(ValueError, match="T must be a whole number >= 0, not -1"):
        cost(R(), T=-1)
    with pytest.raises(rc.RecipeError, match="K = V"):
        cost(R(memory=memory.MLP()), K=8, V=16)
    with pytest.raises(ValueError, match="unknown"):
        cost(R(), engine="fast")


def test_readable() -> None:
    assert format_si(0, "B") == "0 B"
    assert format_si(1536, "B") == "1.5 KiB"
    assert format_si(999, "FLOP") == "999 FLOP"
    assert format_si(61400, "FLOP") == "61.4 kFLOP"
    assert format_si(2.5e9, "FLOP") == "2.5 GFLOP"
