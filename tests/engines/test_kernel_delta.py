"""The kernel delta rule by blocks against the reference, and its limits against other layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.contracts import generate
from torch.nn import functional

import recollect as rc
from recollect.engines.kernel.delta_rule import KernelDeltaRule
from recollect.engines.select import select_engine
from recollect.testing.compare import assert_states_equal
from recollect.testing.engines import check_agrees

F, Read, Matrix = rc.features, rc.memory.Read, rc.memory.Matrix
Probe, L2, Dot = rc.bias.Probe, rc.bias.L2, rc.bias.DotProduct
GD, Keep, Decay = rc.algorithm.GradientDescent, rc.retention.Keep, rc.retention.Decay
LIMIT = 1e-10


def _recipes() -> dict[str, rc.Recipe]:
    """Return recipes of both kernels and normalisers, one or several probe keys, and each decay."""
    result: dict[str, rc.Recipe] = {}
    firsts = (
        F.LinearKernel(), F.Round(decimals=1), F.ReluKernel(), F.Exponential(), F.Solu(),
        F.Gaussian(),
    )  # fmt: skip
    seconds = (F.Exponential(), F.ReluKernel(), F.Gaussian(bandwidth=3.0))
    retentions = (Keep(), Decay(), Decay(when="before"))
    combinations = itertools.product(
        firsts, seconds, ("none", "sum"), ("none", "sum"), (1, 3), retentions
    )
    for index, (one, two, n1, n2, heads, retention) in enumerate(combinations):
        if (n1 == "sum" and not one.positive) or (n2 == "sum" and not two.positive):
            continue
        if n1 == n2 == "none" and index % 4:
            continue
        probe = Probe(at="token", kernel=one, heads=heads, normalize=n1)
        decay = "keep" if retention.decay is None else retention.decay.when
        name = f"{one.brief} {n1}, {two.brief} {n2}, {heads} keys, {decay}"
        result[name] = rc.Recipe(
            memory=Matrix(read=Read(normalize=n2)),
            features=two,
            bias=L2(probe=probe),
            retention=retention,
        )
    for features, read in itertools.product(
        (F.LinearKernel(), F.Exponential()), (Read(), Read(normalize="sum"))
    ):
        if read.normalize == "sum" and not features.positive:
            continue
        for what, rest in {
            "dot": {"bias": Dot(), "retention": Decay()},
            "delta rule": {"retention": Decay(when="before")},
            "implicit": {"algorithm": rc.algorithm.Implicit()},
            "normalized": {"algorithm": rc.algorithm.NLMS()},
            "log rate": {"algorithm": GD(lr="log_input")},
            "static rate": {"algorithm": GD(lr="learned")},
            "two steps": {"algorithm": GD(updates_per_token=2), "retention": Decay()},
            "gated": {"context": rc.context.Window(size=1)},
            "probe at key": {"bias": L2(probe=Probe(at="key"))},
        }.items():
            result[f"{what}, {features.brief}, {read.normalize}"] = rc.Recipe(
                memory=Matrix(read=read), features=features, **rest
            )
    return result


RECIPES = _recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_reference(name: str) -> None:
    """13 tokens in blocks of 4 with two queries per memory, with and without initial pairs."""
    recipe = RECIPES[name]
    assert select_engine(recipe).engine.name == "kernel"
    x = generate.inputs(recipe, B=1, T=13, H=2, G=2, K=4, V=3, zero=len(name) % 2 == 0)
    check_agrees(recipe, x, "kernel", chunk_size=4)


SAMPLE = dict(list(RECIPES.items())[::5])


@pytest.mark.parametrize("name", SAMPLE)
def test_splits_blocks_and_other_engines(name: str) -> None:
    recipe = SAMPLE[name]
    x = generate.inputs(recipe, B=2, T=11, H=2, K=4, V=3)
    with torch.no_grad():
        complete = generate.run_recall(recipe, x, engine="reference")
        assert_states_equal(generate.run_in_pieces(recipe, x, [1, 1, 6, 9], ["kernel"]), complete)
        assert_states_equal(
            generate.run_in_pieces(recipe, x, list(range(1, 11)), ["kernel"]), complete
        )
        assert_states_equal(
            generate.run_in_pieces(recipe, x, [3, 4, 8], ["reference", "kernel"]), complete
        )
        for block in (1, 2, 5, 16):
            assert_states_equal(
                generate.run_recall(recipe, x, engine="kernel", chunk_size=block), complete
            )


@pytest.mark.parametrize("name", SAMPLE)
def test_gradients_cross_splits(name: str) -> None:
    recipe = SAMPLE[name]
    x = generate.inputs(recipe, B=1, T=9, H=1, K=4, V=3)
    slopes = []
    for cuts in ([], [4, 5]):
        leaves = x.with_grad()
        y, _ = generate.run_in_pieces(recipe, leaves, cuts, ["kernel"], chunk_size=3)
        named = leaves.tensors()
        result = torch.autograd.grad(
            y.square().sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        slopes.append(dict(zip(named, result, strict=True)))
    assert generate.largest_error(slopes[1], slopes[0])[0] < LIMIT


MASK = torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", SAMPLE)
def test_masked_rows_and_packed_documents_run_separately(name: str) -> None:
    """Masked tokens hold NaN; states are compared by their reads."""
    recipe = SAMPLE[name]
    x = generate.inputs(recipe, B=2, T=9, H=2, K=4, V=3)
    hidden = x.map_token_tensors(
        lambda a: torch.where(MASK.bool().view(2, 9, *(1,) * (a.dim() - 2)), a, torch.nan)
    )
    with torch.no_grad():
        y, state = generate.run_recall(recipe, hidden, attention_mask=MASK, engine="kernel")
        read = rc.read(recipe, x.q, state=state, params=x.params)
        for row in range(2):
            real = MASK[row].bool()
            single = x.select_row(row).map_token_tensors(lambda a, real=real: a[:, real])
            z, final_state = generate.run_recall(recipe, single, engine="reference")
            assert generate.relative_error(y[row : row + 1, real], z) < LIMIT
            assert not y[row, ~real].any()
            answer = rc.read(recipe, x.q[row : row + 1], state=final_state, params=x.params)
            assert generate.relative_error(read[row : row + 1], answer) < LIMIT
        one, borders = x.select_row(0), [0, 4, 4, 5, 9]
        packed, _ = generate.run_recall(
            recipe, one, cu_seqlens=torch.tensor(borders), engine="kernel"
        )
        for start, stop in itertools.pairwise(borders):
            z, _ = generate.run_recall(recipe, one.slice_tokens(start, stop), engine="reference")
            assert generate.relative_error(packed[:, start:stop], z) < LIMIT


def test_gradients_of_gradients() -> None:
    recipe = rc.zoo.get("delta_former").recipe
    x = generate.inputs(recipe, B=1, T=4, H=1, K=3, V=2, zero=True).with_grad()
    named = x.tensors()

    def f(*values: torch.Tensor) -> torch.Tensor:
        changed = x.replace_tensors(dict(zip(named, values, strict=True)))
        return rc.recall(
            recipe, changed.q, changed.k, changed.v, changed.gates, engine="kernel", chunk_size=2
        )[0]

    values = tuple(a for n, a in named.items() if not n.startswith("init"))
    names = [n for n in named if not n.startswith("init")]

    def g(*values: torch.Tensor) -> torch.Tensor:
        return f(*[*values, *(named[n] for n in named if n not in names)])

    assert torch.autograd.gradgradcheck(g, values)


@pytest.mark.parametrize("T", [1, 2, 65, 200])
def test_lengths_in_single_precision(T: int) -> None:
    """Rows of a softmax sum to one, so the system is well conditioned in float32."""
    recipe = rc.zoo.get("delta_former").recipe
    x = generate.inputs(recipe, B=1, T=T, H=2, K=8, V=6)
    with torch.no_grad():
        y, _ = generate.run_recall(recipe, x, engine="reference")
        z, _ = generate.run_recall(recipe, x.map_tensors(lambda a: a.float()), engine="kernel")
    assert generate.relative_error(z, y) < 1e-5


def test_large_logits_do_not_overflow() -> None:
    recipe = rc.zoo.get("delta_former").recipe
    x = generate.inputs(recipe, B=1, T=30, H=1, K=8, V=6, dtype=torch.float32)
    x = x.map_token_tensors(lambda a: 100 * a if a.shape[-1] == 8 else a)
    y, _, slopes = generate.gradients(recipe, x, engine="kernel")
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(slope).all() for slope in slopes.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": rc.bias.Huber()}, "not affine"),
        ({"bias": L2(probe=Probe(normalize="rms"))}, "not linear in the rows"),
        ({"algorithm": GD(batch_size=2)}, "inner batch"),
        ({"algorithm": rc.algorithm.Momentum()}, "momentum"),
        ({"context": rc.context.Window(size=2)}, "more than once"),
        ({"memory": rc.memory.MLP()}, "not linear in its weights"),
    ],
)
def test_errors_state_the_reason(change: dict[str, object], reason: str) -> None:
    recipe = rc.Recipe(features=F.Exponential()).replace(**change)
    assert any(reason in text for text in KernelDeltaRule().unsupported_reasons(recipe))


def test_finite_memory_stores_no_rows() -> None:
    reasons = KernelDeltaRule().unsupported_reasons(rc.Recipe())
    assert reasons == ["the memory stores no row per key"]


# -- limits (2-zoo row 64) -----------------------------------------------------------------------


def _delta_former(one: F.Kernel, two: F.Kernel, norms: tuple[str, str]) -> rc.Recipe:
    return rc.Recipe(
        memory=Matrix(read=Read(normalize=norms[1])),
        features=two,
        bias=L2(probe=Probe(at="token", kernel=one, normalize=norms[0])),
    )


def test_without_erasure_it_is_softmax_attention() -> None:
    recipe = rc.zoo.get("delta_former").recipe
    x = generate.inputs(recipe, B=2, T=33, H=2, G=2, K=8, V=6, zero=True)
    ones = torch.ones_like(x.gates["lr"])
    gates = {**x.gates, "lr": ones, "erase": 0 * ones}
    y, _ = rc.recall(recipe, x.q, x.k, x.v, gates)
    expected = functional.scaled_dot_product_attention(
        x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2),
        is_causal=True, enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    assert generate.relative_error(y, expected) < LIMIT


def test_with_linear_kernels_it_is_the_delta_net() -> None:
    recipe = _delta_former(F.LinearKernel(), F.LinearKernel(), ("none", "none"))
    x = generate.inputs(recipe, B=2, T=33, H=2, K=8, V=6, zero=True)
    gates = {"lr": x.gates["lr"], "erase": x.gates["lr"], "probe": x.k}
    y, _ = rc.recall(recipe, x.q, x.k, x.v, gates)
    expected, _ = rc.recall(rc.Recipe(), x.q, x.k, x.v, {"lr": x.gates["lr"]}, engine="linear")
    assert generate.relative_error(y, expected) < LIMIT


def test_dot_with_a_linear_memory_and_one_association_is_delta_former() -> None:
    """ATLAS 27 at c = 1 and b = 1 against AM 41–42 with exponential kernels, w = k, α = β = η."""
    preset = rc.zoo.get("dot").recipe
    linear = preset.replace(
        memory=Matrix(), context=rc.context.Window(size=1, gated=False), algorithm=GD()
    )
    recipe = _delta_former(F.Exponential(), F.Exponential(), ("none", "none"))
    x = generate.inputs(recipe, B=2, T=21, H=2, K=8, V=6, zero=True)
    gates = {"lr": x.gates["lr"], "erase": x.gates["lr"], "probe": x.k}
    y, _ = rc.recall(recipe, x.q, x.k, x.v, gates, engine="kernel")
    expected, _ = rc.recall(linear, x.q, x.k, x.v, {"lr": x.gates["lr"]}, engine="reference")
    assert generate.relative_error(y, expected) < LIMIT


@pytest.mark.parametrize("normalize", ["none", "sum"])
def test_deep_transformer_with_a_linear_memory_is_attention(normalize: str) -> None:
    """Σ v exp(q·k/√K), and its softmax: ATLAS 26."""
    preset = rc.zoo.get("deep_transformer").recipe
    recipe = preset.replace(memory=Matrix(read=Read(normalize=normalize)), algorithm=GD(lr=1.0))
    x = generate.inputs(recipe, B=1, T=21, H=2, K=8, V=6, zero=True)
    for method in ("reference", "kernel"):
        y, _ = rc.recall(recipe, x.q, x.k, x.v, x.gates, engine=method)
        logits = torch.einsum("bthk,bshk->bhts", x.q, x.k) / 8**0.5
        weights = logits.exp().tril()
        if normalize == "sum":
            weights = weights / weights.sum(-1, keepdim=True)
        expected = torch.einsum("bhts,bshv->bthv", weights, x.v)
        assert generate.relative_error(y, expected) < LIMIT
