"""Every engine against the reference: outputs, final state, and every gradient.

`select.ENGINES` lists the engines and `RECIPES` the recipes. For an unsupported pair the test
checks the stated reason.

Tolerances: in float64 both sides compute equal sums in another order, a few hundred terms of order
1, so 1e-10 is a norm-wise rounding error with a margin for the condition of a triangular solve. In
float32 the tolerance is 1e-5 (gradients 1e-4), in bf16 (8 bits of mantissa, 4e-3 per input) 2e-2.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.engines.base import Engine
from recollect.engines.select import ENGINES
from recollect.testing.engines import (
    MASKS,
    PACKED,
    check_agrees,
    check_chunks_and_splits,
    check_handover,
    check_lengths,
    check_refusal,
    check_single_gradients,
    check_strides,
    inputs_for,
)
from recollect.testing.sequences import (
    EXACT,
    check_gradients_across_splits,
    check_masks,
    check_packing,
)

SINGLE, SINGLE_GRADIENT, HALF = 1e-5, 1e-4, 2e-2

L2, Dot = rc.bias.L2(), rc.bias.DotProduct()
Read, Matrix, Vector, MLP = rc.memory.Read, rc.memory.Matrix, rc.memory.Vector, rc.memory.MLP
Decay, Window, Probe = rc.retention.Decay, rc.context.Window, rc.bias.Probe
GD, Momentum = rc.algorithm.GradientDescent, rc.algorithm.Momentum
Implicit, Normalized = rc.algorithm.Implicit, rc.algorithm.NLMS
SOFTMAX = rc.Recipe(
    memory=rc.memory.LocalConstant(),
    context=rc.context.KernelWeighted(),
    algorithm=rc.algorithm.Analytic(),
)
ONE = GD(lr=1.0)
Prefix, LeastSquares = rc.context.Prefix, rc.algorithm.LeastSquares
Preconditioned = rc.algorithm.Preconditioned

# The named systems of the zoo, written out.
ZOO: dict[str, rc.Recipe] = {
    "softmax_attention": SOFTMAX,
    "qk_norm_attention": SOFTMAX.replace(
        context=rc.context.KernelWeighted(kernel=rc.features.Exponential(temperature=0.25))
    ),
    "sliding_window_attention": SOFTMAX.replace(
        context=rc.context.KernelWeighted(restrictions=(Window(size=4, gated=False),))
    ),
    "fox": SOFTMAX.replace(
        context=rc.context.KernelWeighted(restrictions=(rc.context.Prefix(decay="input"),))
    ),
    "bilinear_gated_attention": SOFTMAX.replace(
        context=rc.context.KernelWeighted(
            restrictions=(rc.context.Bilinear(link="sigmoid", temperature=None),)
        )
    ),
    "moba": SOFTMAX.replace(
        context=rc.context.KernelWeighted(restrictions=(rc.context.TopBlocks(size=3, top_k=2),))
    ),
    "local_linear_attention": SOFTMAX.replace(
        memory=rc.memory.LocalPolynomial(), algorithm=rc.algorithm.Analytic(ridge=0.2)
    ),
    "kernel_regression_attention": rc.Recipe(
        features=rc.features.Gaussian(),
        context=rc.context.Prefix(),
        algorithm=rc.algorithm.Analytic(ridge=1.0),
    ),
    "linear_attention": rc.Recipe(bias=Dot, algorithm=ONE),
    "normalized_linear_attention": rc.Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=rc.features.EluPlusOne(),
        bias=Dot,
        algorithm=ONE,
    ),
    "retnet": rc.Recipe(bias=Dot, retention=Decay(alpha="learned"), algorithm=ONE),
    "lightning_attention": rc.Recipe(bias=Dot, retention=Decay(alpha=0.9), algorithm=ONE),
    "gla": rc.Recipe(bias=Dot, retention=Decay(per="key"), algorithm=ONE),
    "delta_net": rc.Recipe(),
    "momentum_delta_net": rc.Recipe(algorithm=Momentum(momentum_on="value")),
    "gated_delta_net": rc.Recipe(retention=Decay(when="before")),
    "leaky_lms": rc.Recipe(retention=Decay(when="after")),
    "longhorn": rc.Recipe(algorithm=Implicit()),
    "nlms": rc.Recipe(algorithm=Normalized()),
    "rls": rc.Recipe(context=Prefix(), algorithm=LeastSquares(ridge="learned")),
    "geometric_rls": rc.Recipe(
        context=Prefix(decay="input"), algorithm=LeastSquares(ridge="learned", refresh_every=5)
    ),
    "gated_kalmanet": rc.zoo.get("gated_kalmanet").recipe,
    "mesa_net": rc.Recipe(
        context=Prefix(decay="input", weight="input"),
        algorithm=LeastSquares(ridge="learned", ridge_per="key", ridge_schedule="constant"),
    ),
    "retnet_xpos": rc.Recipe(bias=Dot, retention=Decay(per="key", alpha="learned"), algorithm=ONE),
    "dfw": rc.Recipe(bias=Dot, retention=Decay(per="key_value"), algorithm=ONE),
    "lru": rc.Recipe(
        memory=Vector(),
        bias=Dot,
        retention=Decay(per="value", alpha="learned"),
        algorithm=GD(lr="learned", per="value"),
    ),
    "rg_lru": rc.Recipe(
        memory=Vector(),
        bias=Dot,
        retention=Decay(per="value", alpha="input_scaled"),
        algorithm=GD(per="value"),
    ),
    "mamba": rc.Recipe(
        bias=Dot, retention=Decay(per="entry", alpha="input_scaled"), algorithm=GD(per="value")
    ),
    "mamba2": rc.Recipe(bias=Dot, retention=Decay()),
    "longhorn_diagonal": rc.Recipe(
        bias=Dot, retention=Decay(per="entry"), algorithm=GD(per="value")
    ),
    "rwkv6": rc.Recipe(
        memory=Matrix(read=Read(when="before", bonus="learned")),
        bias=Dot,
        retention=Decay(per="key"),
        algorithm=ONE,
    ),
    "rwkv7": rc.Recipe(
        memory=Matrix(read=Read(bonus="learned")),
        bias=rc.bias.L2(probe=Probe(write="probe", per="key")),
        retention=Decay(per="key"),
        algorithm=ONE,
    ),
    "mlstm": rc.Recipe(
        memory=Matrix(read=Read(normalize="floor")),
        bias=Dot,
        retention=Decay(),
        algorithm=GD(lr="log_input"),
    ),
    "delta_product": rc.Recipe(algorithm=GD(updates_per_token=2)),
    "gated_delta_product": rc.Recipe(
        algorithm=GD(updates_per_token=2), retention=Decay(when="before")
    ),
}

LIFTED: dict[str, rc.features.Features] = {
    "performer": rc.features.PositiveRandom(),
    "rfa": rc.features.RandomFourier(kernel="gaussian", temperature=1.0),
    "cosformer": rc.features.Cosine(),
    "hedgehog": rc.features.Hedgehog(),
    "based": rc.features.Taylor(),
    "rebased": rc.features.Quadratic(),
    "dijiang": rc.features.FrequencyDomain(),
    "polysketchformer": rc.features.PolynomialSketch(),
}
for name, lifted in LIFTED.items():
    ZOO[name] = ZOO["normalized_linear_attention"].replace(features=lifted)
ZOO["dpfp"] = rc.Recipe(features=rc.features.Dpfp(normalize=True))


def _decay_name(retention: rc.retention.Retention) -> str:
    decay = retention.decay
    return "keep" if decay is None else f"{decay.per}, {decay.when}"


def _structures() -> dict[str, rc.Recipe]:
    """Return recipes for every combination of the parts of the linear recursion."""
    result: dict[str, rc.Recipe] = {}
    decays = [None, *itertools.product(("head", "key", "value", "key_value"), ("after", "before"))]
    rules = (GD(), Momentum(), Momentum(momentum_on="value"))
    for bias, decay, rule, c in itertools.product((L2, Dot), decays, rules, (1, 3)):
        gate = rc.retention.Keep() if decay is None else Decay(per=decay[0], when=decay[1])
        name = "-".join(
            [
                type(bias).__name__,
                *(decay or ("keep",)),
                getattr(rule, "momentum_on", "plain"),
                f"c{c}",
            ]
        )
        context = rc.context.Online() if c == 1 else Window(size=c)
        result[name] = rc.Recipe(bias=bias, retention=gate, algorithm=rule, context=context)
    initial, key = Decay(when="before"), Decay(per="key")
    for name, rule in (
        ("implicit", Implicit()),
        ("flow", rc.algorithm.Flow()),
        ("normalized", Normalized(lr="input")),
        ("rate per value", GD(per="value")),
        ("momentum, rate per value", Momentum(per="value")),
        ("momentum, outer rate", Momentum(outer_lr="input")),
        ("momentum of the value, outer rate", Momentum(momentum_on="value", outer_lr=0.7)),
        ("static rate", GD(lr="learned")),
        ("log rate", GD(lr="log_input")),
    ):
        for gate in (rc.retention.Keep(), Decay(), initial, Decay(per="key_value", when="before")):
            result[f"{name}, {_decay_name(gate)}"] = rc.Recipe(algorithm=rule, retention=gate)
    result["window of one"] = rc.Recipe(context=Window(size=1))
    result["window of one, value momentum"] = rc.Recipe(
        context=Window(size=1), algorithm=Momentum(momentum_on="value"), retention=initial
    )
    result["ungated window"] = rc.Recipe(context=Window(size=4, gated=False), retention=initial)
    result["dot, rate per value, window"] = rc.Recipe(
        bias=Dot, context=Window(size=3), algorithm=GD(per="value"), retention=Decay(per="value")
    )
    result["static decay per key_value"] = rc.Recipe(
        retention=Decay(per="key_value", alpha="learned", when="before")
    )
    for rule in (GD(per="value"), Momentum(per="value")):
        result[f"dot, rate per value, {type(rule).__name__}"] = rc.Recipe(bias=Dot, algorithm=rule)
    for cls in generate.members("features"):
        features = cls()
        if isinstance(features, rc.features.Features) and features.finite:
            result[features.title] = rc.Recipe(features=features, retention=Decay(per="key"))
    for decay in (None, "head", "key", "value"):
        for bias, rule in itertools.product((L2, Dot), (GD(per="value"), Momentum())):
            gate = rc.retention.Keep() if decay is None else Decay(per=decay)
            name = f"vector, {type(bias).__name__}, {decay}, {type(rule).__name__}"
            result[name] = rc.Recipe(memory=Vector(), bias=bias, retention=gate, algorithm=rule)
    result["vector, window"] = rc.Recipe(memory=Vector(), context=Window(size=2), retention=initial)
    for at, write, per in itertools.product(("token", "key"), ("key", "probe"), ("head", "key")):
        probe = Probe(at=at, write=write, per=per)
        for gate in (rc.retention.Keep(), key, initial):
            name = f"probe at {at}, written at {write}, {per}, {_decay_name(gate)}"
            result[name] = rc.Recipe(bias=rc.bias.L2(probe=probe), retention=gate)
    for rate, bias, order in itertools.product(
        ("input", "input_scaled", "learned", 0.9), (L2, Dot), ("after", "before")
    ):
        gate = Decay(per="entry", alpha=rate, when=order)
        result[f"entry, {rate}, {type(bias).__name__}, {order}"] = rc.Recipe(
            bias=bias, retention=gate
        )
    for bias, order in itertools.product((L2, Dot), ("after", "before")):
        gate = Decay(alpha="input_scaled", when=order)
        result[f"head, input_scaled, {type(bias).__name__}, {order}"] = rc.Recipe(
            bias=bias, retention=gate
        )
    entry = Decay(per="entry", alpha="input_scaled")
    for name, changes in (
        ("rate per value", {"algorithm": GD(per="value")}),
        ("momentum", {"algorithm": Momentum()}),
        ("window", {"context": Window(size=3)}),
        ("bonus", {"memory": Matrix(read=Read(when="before", bonus="learned"))}),
    ):
        result[f"entry, {name}"] = rc.Recipe(**{"bias": Dot, "retention": entry, **changes})
    result["vector, read before"] = rc.Recipe(
        memory=Vector(read=Read(when="before")), bias=Dot, retention=Decay(per="value")
    )
    result["probe, rate per value"] = rc.Recipe(
        bias=rc.bias.L2(probe=Probe(write="probe")), algorithm=GD(per="value")
    )
    for gate in (rc.retention.Keep(), initial, key):
        result[f"two steps, {_decay_name(gate)}"] = rc.Recipe(
            algorithm=GD(updates_per_token=2), retention=gate
        )
    for per in ("head", "key", "value"):
        result[f"two steps, dot product, {per}"] = rc.Recipe(
            bias=Dot, algorithm=GD(updates_per_token=2), retention=Decay(per=per)
        )
    spaced: dict[str, dict[str, Any]] = {
        "dot product": {"bias": Dot, "retention": Decay()},
        "dot product, key": {"bias": Dot, "retention": key},
        "delta rule": {"retention": Decay()},
        "delta rule, before": {"retention": initial},
        "delta rule, key": {"retention": key},
        "rate per value": {"bias": Dot, "algorithm": GD(updates_per_token=2, per="value")},
        "vector": {"memory": Vector(), "retention": Decay(per="value")},
        "entry": {"bias": Dot, "retention": entry},
        "lifted": {"bias": Dot, "features": rc.features.EluPlusOne(), "retention": Decay()},
    }
    for name, changes in spaced.items():
        base = {"context": Window(size=3), "algorithm": GD(updates_per_token=2)}
        result[f"two steps, window, {name}"] = rc.Recipe(**{**base, **changes})
    result["two steps, equal window, normalised"] = rc.Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=rc.features.Relu(),
        bias=Dot,
        context=Window(size=2, gated=False),
        algorithm=GD(updates_per_token=2),
    )
    result["three steps, one rate"] = rc.Recipe(algorithm=GD(updates_per_token=3, lr=0.3))
    result["two steps, rate per value"] = rc.Recipe(algorithm=GD(updates_per_token=2, per="value"))
    for read in (
        Read(when="before", bonus="learned"),
        Read(when="before"),
        Read(bonus=0.5),
        Read(normalize="sum", when="before"),
        Read(normalize="sum"),
        Read(normalize="floor"),
        Read(normalize="floor", when="before"),
    ):
        rule = GD(lr="log_input") if read.normalize == "floor" else GD()
        name = f"read {read.normalize}, {read.when}, {read.bonus}"
        features = rc.features.EluPlusOne()
        result[name] = rc.Recipe(
            memory=Matrix(read=read), bias=Dot, retention=Decay(), algorithm=rule, features=features
        )
    result["read before, delta rule"] = rc.Recipe(
        memory=Matrix(read=Read(when="before", bonus="learned")), retention=Decay(per="value")
    )
    result["normalised, momentum, window"] = rc.Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=rc.features.Relu(),
        bias=Dot,
        retention=Decay(per="key"),
        context=Window(size=2),
        algorithm=Momentum(),
    )
    return result


def _solvers() -> dict[str, rc.Recipe]:
    """Return all forms of least squares, and the recipes between them and linear attention."""
    result: dict[str, rc.Recipe] = {}
    pasts = {
        "all": Prefix(),
        "gated": Prefix(decay="input", weight="input"),
        "static": Prefix(decay="learned"),
        "constant": Prefix(decay=0.9),
    }
    rules = {
        "refreshed": LeastSquares(refresh_every=6, ridge="learned"),
        "refreshed every token": LeastSquares(refresh_every=1),
        "refreshed in one span": LeastSquares(refresh_every=100, ridge=0.1),
        "decaying": LeastSquares(ridge_schedule="decaying", ridge="learned", ridge_per="key"),
        "constant": LeastSquares(ridge_schedule="constant", ridge="learned"),
        "identity": Preconditioned(kind="identity"),
        "diagonal": Preconditioned(kind="diagonal", power=0.5, ridge="learned"),
        "spectral": Preconditioned(kind="spectral", power=0.5, ridge="learned"),
        "conjugate gradients": Preconditioned(steps=2, ridge="learned", ridge_per="key"),
    }
    for past, rule in itertools.product(pasts, rules):
        name = f"{rule}, {past}"
        result[name] = rc.Recipe(context=pasts[past], algorithm=rules[rule])
    per_token: dict[str, Any] = {
        "constant": LeastSquares(ridge_schedule="constant", ridge="input"),
        "relative": LeastSquares(ridge_schedule="relative", ridge="input", ridge_per="key"),
        "spectral": Preconditioned(kind="spectral", power=0.5, ridge="input"),
        "diagonal": Preconditioned(kind="diagonal", power=0.5, ridge="input"),
        "conjugate gradients": Preconditioned(steps=2, ridge="input"),
    }
    for name, rule in per_token.items():
        context = pasts["gated"]
        result[f"{name}, ridge per token"] = rc.Recipe(context=context, algorithm=rule)
    result["lifted least squares"] = rc.Recipe(
        features=rc.features.Polynomial(),
        context=pasts["gated"],
        algorithm=LeastSquares(refresh_every=4),
    )
    return result


STRUCTURES = _structures()

# Recipes beyond the linear recursion, for the engines that support them.
DEEP: dict[str, rc.Recipe] = {
    "titans": rc.Recipe(memory=MLP(), retention=Decay(), algorithm=Momentum(batch_size=4)),
    "moneta": rc.Recipe(
        memory=MLP(norm="layer"),
        bias=rc.bias.Lp(p=3.0),
        retention=rc.retention.Lq(q=4.0, link_every="batch", decay=Decay(per="value")),
        algorithm=GD(batch_size=4),
    ),
    "yaad": rc.Recipe(
        memory=MLP(norm="layer"),
        bias=rc.bias.Huber(),
        retention=Decay(per="value"),
        algorithm=GD(batch_size=4),
    ),
    "memora": rc.Recipe(
        memory=MLP(norm="layer"),
        retention=rc.retention.Simplex(link_every="batch"),
        algorithm=GD(batch_size=4),
    ),
    "omega_net": rc.Recipe(
        memory=rc.memory.GatedMLP(),
        context=Window(size=3),
        retention=Decay(),
        algorithm=GD(batch_size=4),
    ),
    "atlas": rc.Recipe(
        memory=MLP(),
        features=rc.features.Polynomial(),
        context=Window(size=3),
        retention=Decay(),
        algorithm=rc.algorithm.Muon(batch_size=4, update_every="batch"),
    ),
    "one plain step a batch": rc.Recipe(
        memory=MLP(),
        context=Window(size=3),
        retention=Decay(per="value"),
        algorithm=GD(batch_size=4, per="value", update_every="batch"),
    ),
    "matrix, one plain step a batch": rc.Recipe(
        bias=rc.bias.DotProduct(), algorithm=GD(batch_size=3, update_every="batch")
    ),
    "lact": rc.Recipe(
        memory=rc.memory.GatedMLP(expansion=1, residual=False),
        bias=rc.bias.DotProduct(),
        retention=rc.retention.RowNorm(),
        algorithm=rc.algorithm.Muon(
            batch_size=4, lr_position="inside", update_every="batch", momentum_every="batch"
        ),
    ),
    "one step a batch behind a link": rc.Recipe(
        retention=rc.retention.Ball(radius=0.7),
        algorithm=rc.algorithm.Muon(batch_size=2, update_every="batch"),
    ),
    "ttt_linear": rc.Recipe(
        memory=MLP(depth=1, norm="layer", bias=True), algorithm=GD(batch_size=4, reduction="mean")
    ),
    "matrix, inner batches": rc.Recipe(algorithm=GD(batch_size=4)),
    "prefix": rc.Recipe(context=rc.context.Prefix(), algorithm=GD(updates_per_token=2)),
    "sigmoid": rc.Recipe(retention=rc.retention.Bregman()),
}
SOLVERS = _solvers()
RECIPES = {**ZOO, **STRUCTURES, **DEEP, **SOLVERS}
FAST = [engine for engine in ENGINES if engine.name != "reference"]


def pairs(recipes: dict[str, rc.Recipe]) -> list[pytest.param]:
    """Return the (engine, recipe) pairs that run.

    A recipe is fast in the engine that is selected for it, and slow in other engines, mostly the
    deep engine with a linear memory.
    """
    pairs, selected = [], set()
    for engine in FAST:
        for name, recipe in recipes.items():
            if not engine.unsupported_reasons(recipe):
                marks = [pytest.mark.slow] * (name in selected)
                pairs.append(
                    pytest.param(engine.name, recipe, id=f"{engine.name}: {name}", marks=marks)
                )
                selected.add(name)
    return pairs


def test_recipes_cover_every_engine() -> None:
    reached = {parameter.values[0] for parameter in pairs(RECIPES)}
    assert reached == {engine.name for engine in FAST}


def test_named_systems_equal_the_zoo() -> None:
    for name in rc.zoo.names():
        if name in ZOO:
            assert rc.zoo.get(name).recipe.canonical() == ZOO[name].canonical() or name in (
                "lightning_attention", "sliding_window_attention", "qk_norm_attention", "moba",
                "geometric_rls", "local_linear_attention",
            ), name  # other sizes, equal structure  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_named_systems_run_on_a_fast_engine(name: str) -> None:
    assert any(not engine.unsupported_reasons(ZOO[name]) for engine in FAST)


@pytest.mark.parametrize(("method", "recipe"), pairs(RECIPES))
def test_equals_the_reference(method: str, recipe: rc.Recipe) -> None:
    """13 tokens in chunks of 4: three full chunks and a remainder of one."""
    check_agrees(recipe, inputs_for(recipe, B=1, T=13, H=2), method, chunk_size=4)


# 65 tokens are a chunk and a remainder of one.
@pytest.mark.parametrize(
    "T", [1, 65, *(pytest.param(T, marks=pytest.mark.slow) for T in (2, 63, 64, 200))]
)
@pytest.mark.parametrize(("method", "recipe"), pairs(ZOO))
def test_lengths(method: str, recipe: rc.Recipe, T: int) -> None:
    check_lengths(recipe, inputs_for(recipe, B=1, T=T, H=1), method)


LONG = {
    name: RECIPES[name]
    for name in (
        "gated_delta_net", "gla", "longhorn", "L2-key-before-gradient-c3", "softmax_attention",
        "rls", "geometric_rls", "mesa_net", "gated_kalmanet",
    )
}  # fmt: skip


@pytest.mark.parametrize("T", [1, 2, 65])
@pytest.mark.parametrize(("method", "recipe"), pairs(LONG))
def test_gradients_at_lengths(method: str, recipe: rc.Recipe, T: int) -> None:
    check_agrees(recipe, inputs_for(recipe, B=1, T=T, H=1), method)


@pytest.mark.slow
@pytest.mark.parametrize("T", [63, 64, 200])
@pytest.mark.parametrize(("method", "recipe"), pairs(ZOO))
def test_gradients_at_all_lengths(method: str, recipe: rc.Recipe, T: int) -> None:
    check_agrees(recipe, inputs_for(recipe, B=1, T=T, H=1), method)


SAMPLE = {**ZOO, **dict(list(STRUCTURES.items())[::4]), **dict(list(SOLVERS.items())[::3])}


@pytest.mark.parametrize(("method", "recipe"), pairs(SAMPLE))
def test_any_split_and_chunk(method: str, recipe: rc.Recipe) -> None:
    """Pieces of 0, 1 and more tokens, single tokens, and chunks of any size."""
    check_chunks_and_splits(recipe, inputs_for(recipe, B=2, T=19, H=2), method)


@pytest.mark.parametrize(("method", "recipe"), pairs(SAMPLE))
def test_engines_continue_each_others_states(method: str, recipe: rc.Recipe) -> None:
    check_handover(recipe, inputs_for(recipe, B=1, T=11, H=2), method)


@pytest.mark.parametrize(("method", "recipe"), pairs(LONG))
def test_gradients_cross_splits(method: str, recipe: rc.Recipe) -> None:
    check_gradients_across_splits(recipe, inputs_for(recipe, B=1, T=11, H=1), method, [4, 5])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("method", "recipe"), pairs(SAMPLE))
def test_masked_rows_run_separately(method: str, recipe: rc.Recipe, mask: str) -> None:
    check_masks(recipe, inputs_for(recipe, B=2, T=9), method, MASKS[mask], chunk_size=4)


@pytest.mark.parametrize(("method", "recipe"), pairs(SAMPLE))
def test_packed_documents_run_separately(method: str, recipe: rc.Recipe) -> None:
    """Lengths 1, 0, 7 and 4, in two calls: the second call continues the first."""
    check_packing(recipe, inputs_for(recipe, B=1, T=12), PACKED, method)


@pytest.mark.parametrize(("method", "recipe"), pairs(SAMPLE))
def test_grouped_heads(method: str, recipe: rc.Recipe) -> None:
    check_agrees(recipe, inputs_for(recipe, B=1, T=6, H=2, G=3), method, chunk_size=4)


@pytest.mark.parametrize(("method", "recipe"), pairs(ZOO))
def test_strides_do_not_matter(method: str, recipe: rc.Recipe) -> None:
    """Every second channel of a wider tensor, as from a fused projection."""
    check_strides(recipe, inputs_for(recipe, B=2, T=9, H=2), method)


@pytest.mark.parametrize(("method", "recipe"), pairs(ZOO))
def test_gradients_of_single_inputs(method: str, recipe: rc.Recipe) -> None:
    """A gradient does not depend on the other inputs that require gradients."""
    x = inputs_for(recipe, B=1, T=6, H=2)
    check_single_gradients(recipe, x, engine=method, chunk_size=4)


@pytest.mark.parametrize(("method", "recipe"), pairs(ZOO))
def test_single_precision(method: str, recipe: rc.Recipe) -> None:
    """float32 against float64 of the engine, which the tests above compare with the reference."""
    x = inputs_for(recipe, B=1, T=200, H=2, K=16, V=16)
    expected, expected_state, slopes = generate.gradients(recipe, x, engine=method)
    y, state, grads = generate.gradients(recipe, x.map_tensors(Tensor.float), engine=method)
    assert y.dtype == torch.float32
    assert generate.relative_error(y, expected) < SINGLE
    assert (
        generate.largest_error(
            generate.flatten_state(state), generate.flatten_state(expected_state)
        )[0]
        < SINGLE
    )
    wrong, name = generate.largest_error(grads, slopes)
    assert wrong < SINGLE_GRADIENT, f"gradient of {name}: {wrong:.1e}"


# The selected blocks can change with the last bit of a half-precision score.
SMOOTH = {name: recipe for name, recipe in ZOO.items() if name != "moba"}


@pytest.mark.parametrize(("method", "recipe"), pairs(SMOOTH))
def test_half_precision(method: str, recipe: rc.Recipe) -> None:
    x = inputs_for(recipe, B=1, T=200, H=2, K=16, V=16)
    expected, _ = generate.run_recall(recipe, x, engine=method)
    low = x.map_tensors(Tensor.bfloat16)
    y, state = generate.run_recall(recipe, low, engine=method)
    assert y.dtype == torch.bfloat16
    assert all(w.dtype == torch.float32 for w in state.weights)
    # A kernel of degree p multiplies the relative errors of its inputs by p.
    degree = max(1, getattr(recipe.features, "degree", 1))
    assert generate.relative_error(y, expected) < HALF * degree


DECAYING = {
    "dot, head": rc.Recipe(bias=Dot, retention=Decay()),
    "dot, key": rc.Recipe(bias=Dot, retention=Decay(per="key")),
    "dot, value": rc.Recipe(bias=Dot, retention=Decay(per="value")),
    "gated delta": rc.Recipe(retention=Decay(when="before")),
    "delta, key": rc.Recipe(retention=Decay(per="key", when="before")),
    "delta, key, after": rc.Recipe(retention=Decay(per="key")),
    "momentum": rc.Recipe(retention=Decay(), algorithm=Momentum()),
    "momentum, key": rc.Recipe(retention=Decay(per="key"), algorithm=Momentum()),
    "window, key": rc.Recipe(retention=Decay(per="key"), context=Window(size=2)),
}


@pytest.mark.parametrize("T", [300, pytest.param(8192, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "recipe"), pairs(DECAYING))
def test_extreme_decays_are_finite(method: str, recipe: rc.Recipe, T: int) -> None:
    """−50 per token, mixed with 0 and −1e-3, in float32: no NaN and no overflow in any gradient."""
    x = inputs_for(recipe, B=1, T=T, H=1, K=8, V=8).map_tensors(Tensor.float)
    x.gates["log_decay"].copy_(_mixed(x.gates["log_decay"], -50.0))
    y, state, slopes = generate.gradients(recipe, x, engine=method)
    for name, tensor in {"y": y, **generate.flatten_state(state), **slopes}.items():
        assert torch.isfinite(tensor).all(), name


def _mixed(like: Tensor, extreme: float) -> Tensor:
    g = torch.Generator().manual_seed(3)
    pick = torch.randint(0, 4, like.shape, generator=g)
    return torch.tensor([extreme, 0.0, -1e-3, 0.2 * extreme], dtype=like.dtype)[pick]


@pytest.mark.parametrize("spread", ["mixed", "all"])
@pytest.mark.parametrize(("method", "recipe"), pairs(DECAYING))
def test_strong_decays_keep_their_digits(method: str, recipe: rc.Recipe, spread: str) -> None:
    """Per-channel decays down to −20 per token: float32 within 1e-5 of the float64 reference."""
    x = inputs_for(recipe, B=1, T=70, H=1, K=8, V=8)
    decay = x.gates["log_decay"]
    strong = -20 * torch.rand(decay.shape, generator=torch.Generator().manual_seed(4)).to(decay)
    decay.copy_(_mixed(decay, -20.0) if spread == "mixed" else strong)
    expected, _ = generate.run_recall(recipe, x, engine="reference")
    exact, _ = generate.run_recall(recipe, x, engine=method)
    assert generate.relative_error(exact, expected) < EXACT
    single, _ = generate.run_recall(recipe, x.map_tensors(Tensor.float), engine=method)
    assert generate.relative_error(single, expected) < SINGLE


@pytest.mark.parametrize("engine", FAST, ids=lambda engine: engine.name)
def test_errors_of_unsupported_pairs_state_the_reason(engine: Engine) -> None:
    """The error of a requested engine states the reason and the engines that run."""
    refused = [recipe for recipe in RECIPES.values() if engine.unsupported_reasons(recipe)]
    assert refused
    for recipe in refused:
        check_refusal(recipe, engine)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("titans", "not linear in its parameters"),
        ("matrix, inner batches", "inner batches of 4"),
        ("prefix", "all of the past"),
        ("sigmoid", "a link between"),
        ("softmax_attention", "not linear in its parameters"),
    ],
)
def test_the_linear_engine_names_the_structure_it_lacks(name: str, reason: str) -> None:
    (linear,) = (engine for engine in ENGINES if engine.name == "linear")
    reasons = linear.unsupported_reasons(RECIPES[name])
    assert any(reason in why for why in reasons), reasons
