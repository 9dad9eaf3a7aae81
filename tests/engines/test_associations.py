"""Memories that store associations: engine against reference, precision, and memory use."""

from __future__ import annotations

import dataclasses
import math
import resource

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.choices.memory import LocalPolynomial
from recollect.engines.kernel import local_regression, moved_keys, pieces
from recollect.engines.kernel import regression as kernel_regression
from recollect.engines.kernel.local_conjugate_gradient import Shift, conjugate_gradients

EXACT = 1e-9  # the contract's tolerance for another order of sums and a solve in float64
C, F = rc.context, rc.features
LOCAL = rc.Recipe(
    memory=rc.memory.LocalConstant(), context=C.KernelWeighted(), algorithm=rc.algorithm.Analytic()
)
DOT = LOCAL.replace(bias=rc.bias.DotProduct())
WINDOW, FORGET = C.Window(size=4, gated=False), C.Prefix(decay="input")


def within(*parts: rc.context.Context, kernel: F.Kernel | None = None) -> rc.context.Context:
    return C.KernelWeighted(kernel=kernel or F.Exponential(), restrictions=parts)


def polynomial(degree: int, ridge: float, *parts: rc.context.Context) -> rc.Recipe:
    return rc.Recipe(
        memory=LocalPolynomial(degree=degree),
        context=within(*parts),
        algorithm=rc.algorithm.Analytic(ridge=ridge),
    )


RECIPES: dict[str, rc.Recipe] = {
    "gaussian": LOCAL.replace(context=within(kernel=F.Gaussian())),
    "gaussian, static decay": LOCAL.replace(
        context=within(C.Prefix(decay="learned"), kernel=F.Gaussian())
    ),
    "window, gaussian": LOCAL.replace(context=within(WINDOW, kernel=F.Gaussian())),
    "decay": LOCAL.replace(context=within(FORGET)),
    "decay, weight and window": LOCAL.replace(
        context=within(C.Prefix(decay="input", weight="input"), C.Window(size=5, gated=False))
    ),
    "bilinear": LOCAL.replace(context=within(C.Bilinear(link="sigmoid"))),
    "blocks": LOCAL.replace(context=within(C.TopBlocks(size=3, top_k=2))),
    "blocks by router": LOCAL.replace(
        context=within(C.TopBlocks(size=2, top_k=1, score="router", include_current=False))
    ),
    "shared blocks": LOCAL.replace(
        context=within(C.TopBlocks(size=2, top_k=2, weighting="softmax"))
    ),
    "shared blocks, decay": LOCAL.replace(
        context=within(
            C.TopBlocks(size=3, top_k=2, weighting="softmax", include_current=False), FORGET
        )
    ),
    "relu mean": LOCAL.replace(context=within(kernel=F.ReluKernel())),
    "sum": DOT,
    "gated sum": DOT.replace(context=within(C.Bilinear(), kernel=F.SwishKernel())),
    "sum, decay, weight, window": DOT.replace(
        context=within(C.Prefix(decay="input", weight="input"), WINDOW, kernel=F.LinearKernel())
    ),
    "sum over blocks": DOT.replace(
        context=within(C.TopBlocks(size=3, top_k=2, score="router"), kernel=F.ReluKernel())
    ),
    "key decay": LOCAL.replace(context=within(C.KeyDecay())),
    "key decay, decay and window": LOCAL.replace(context=within(C.KeyDecay(), FORGET, WINDOW)),
    "constant key decay, sum": DOT.replace(context=within(C.KeyDecay(alpha=0.7))),
    "key reflection": LOCAL.replace(context=within(C.KeyReflection())),
    "key reflection, decay and window": LOCAL.replace(
        context=within(C.KeyReflection(), FORGET, WINDOW)
    ),
    "key projection, sum": DOT.replace(context=within(C.KeyReflection(beta=1.0))),
    "stick breaking": DOT.replace(context=within(C.StickBreaking())),
    "stick breaking, mean": LOCAL.replace(
        context=within(C.StickBreaking(include_current=True), FORGET, kernel=F.Gaussian())
    ),
    "stick breaking, key reflection and window": DOT.replace(
        context=within(C.KeyReflection(), C.StickBreaking(), WINDOW)
    ),
    "linear": polynomial(1, 0.05),
    "given slope": polynomial(1, 0.0).replace(memory=LocalPolynomial(slope="input")),
    "given slope, decay and window": polynomial(1, 0.0, FORGET, WINDOW).replace(
        memory=LocalPolynomial(slope="input")
    ),
    "linear, decay": polynomial(1, 0.05, FORGET),
    "linear, window": polynomial(1, 0.05, WINDOW),
    "quadratic": polynomial(2, 0.05),
    "quadratic, blocks": polynomial(2, 0.05, C.TopBlocks(size=4, top_k=2)),
    "cubic": polynomial(3, 0.05),
    "gram": rc.Recipe(
        features=F.Gaussian(), context=C.Prefix(), algorithm=rc.algorithm.Analytic(ridge=0.3)
    ),
    "gram, weighted": rc.Recipe(
        features=F.Exponential(),
        context=C.Prefix(weight="input"),
        algorithm=rc.algorithm.Analytic(ridge=0.3),
    ),
}


def agree(recipe: rc.Recipe, x: generate.Inputs) -> None:
    """Compare outputs, state and gradients of the engine with the reference, also for splits."""
    y, state, slopes = generate.gradients(recipe, x, engine="reference")
    y2, state2, slopes2 = generate.gradients(recipe, x, engine="kernel")
    assert generate.relative_error(y2, y) < EXACT
    assert (
        generate.largest_error(generate.flatten_state(state2), generate.flatten_state(state))[0]
        < EXACT
    )
    wrong, name = generate.largest_error(slopes2, slopes)
    assert wrong < EXACT, f"gradient of {name}: {wrong:.1e}"
    with torch.no_grad():
        for cuts, methods in (
            ([1, 1, 6, 9], ["kernel", "reference"]),
            (list(range(1, x.T)), ["kernel"]),
        ):
            pieces, end = generate.run_in_pieces(recipe, x, cuts, methods)
            assert generate.relative_error(pieces, y) < EXACT, cuts
            assert (
                generate.largest_error(generate.flatten_state(end), generate.flatten_state(state))[
                    0
                ]
                < EXACT
            )


@pytest.mark.parametrize("G", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_reference(name: str, G: int) -> None:
    recipe = RECIPES[name]
    agree(recipe, generate.inputs(recipe, B=2, T=13, H=2, G=G, K=4, V=3))


@pytest.mark.parametrize("name", RECIPES)
def test_pieces_equal_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 5 queries stand for the pieces of 256 of a long sequence."""
    recipe = RECIPES[name]
    x = generate.inputs(recipe, B=1, T=17, H=2, K=4, V=5)
    y, _, slopes = generate.gradients(recipe, x, engine="kernel")
    monkeypatch.setattr(pieces, "ENTRIES", 5 * 2 * 17)
    monkeypatch.setattr(local_regression, "ENTRIES", 5 * 2 * 17 * 4)
    monkeypatch.setattr(moved_keys, "BLOCK", 4)
    y2, _, slopes2 = generate.gradients(recipe, x, engine="kernel")
    assert generate.relative_error(y2, y) < EXACT
    assert generate.largest_error(slopes2, slopes)[0] < EXACT


@pytest.mark.parametrize("name", RECIPES)
def test_masked_and_packed_rows_run_separately(name: str) -> None:
    recipe = RECIPES[name]
    x = generate.inputs(recipe, B=2, T=11, H=2, K=3, V=3)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :4], mask[1, [2, 3, 9, 10]] = False, False
    y, state, slopes = generate.gradients(recipe, x, engine="kernel", attention_mask=mask)
    assert all(slope.isfinite().all() for slope in slopes.values())
    more = generate.run_recall(recipe, x.slice_tokens(0, 3), state=state, engine="kernel")[0]
    for row in range(2):
        single = x.select_row(row).map_token_tensors(lambda a, row=row: a[:, mask[row]])
        want, end = generate.run_recall(recipe, single, engine="kernel")
        assert generate.relative_error(y[row : row + 1, mask[row]], want) < EXACT
        then = generate.run_recall(
            recipe, x.select_row(row).slice_tokens(0, 3), state=end, engine="kernel"
        )[0]
        assert generate.relative_error(more[row : row + 1], then) < EXACT
    one, borders = x.select_row(0), torch.tensor([0, 4, 4, 5, 11])
    packed, _ = generate.run_recall(recipe, one, cu_seqlens=borders, engine="kernel")
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        want, _ = generate.run_recall(recipe, one.slice_tokens(start, stop), engine="kernel")
        assert generate.relative_error(packed[:, start:stop], want) < EXACT


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [-0.02, -1.0, -50.0])
def test_decays_in_single_precision(low: float) -> None:
    """No decay loses more than 1e-5. Weak decays are a channel, strong ones float64 differences."""
    recipe = RECIPES["decay"]
    x = generate.inputs(recipe, B=1, T=700, H=2, K=8, V=8)
    g = torch.Generator().manual_seed(3)
    pick = torch.randint(0, 4, x.gates["log_decay"].shape, generator=g)
    x.gates["log_decay"].copy_(torch.tensor([low, 0.0, -1e-3, 0.2 * low]).double()[pick])
    y, _, slopes = generate.gradients(recipe, x, engine="kernel")
    single, _, grads = generate.gradients(recipe, x.map_tensors(Tensor.float), engine="kernel")
    assert generate.relative_error(single, y) < 1e-5
    wrong, name = generate.largest_error(grads, slopes)
    assert wrong < 1e-4, f"gradient of {name}: {wrong:.1e}"
    with torch.no_grad():
        want, _ = generate.run_recall(recipe, x.slice_tokens(0, 300), engine="reference")
    assert generate.relative_error(y[:, :300], want) < EXACT


def test_full_decay_is_finite() -> None:
    recipe = RECIPES["decay"]
    x = generate.inputs(recipe, B=1, T=9, H=1, K=3, V=3)
    x.gates["log_decay"][:, 4] = -torch.inf
    for method in ("kernel", "reference"):
        y, _ = generate.run_recall(recipe, x, engine=method)
        fresh, _ = generate.run_recall(recipe, x.slice_tokens(4, 9), engine=method)
        assert generate.relative_error(y[:, 4:], fresh) < EXACT


def test_weights_of_zero_hide_an_association() -> None:
    recipe = LOCAL.replace(context=within(C.Prefix(weight="input")))
    x = generate.inputs(recipe, B=1, T=8, H=1, K=3, V=3)
    x.gates["weight"][:, [0, 3]] = 0.0
    visible = [1, 2, 4, 5, 6, 7]
    for method in ("kernel", "reference"):
        y, _, slopes = generate.gradients(recipe, x, engine=method)
        assert not y[:, 0].any()  # no associations to average
        want, _ = generate.run_recall(
            recipe, x.map_token_tensors(lambda a: a[:, visible]), engine=method
        )
        assert generate.relative_error(y[:, visible], want) < EXACT
        assert all(slope.isfinite().all() for slope in slopes.values())


# -- local regression ------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2])
def test_conjugate_gradients_are_the_dense_solve(degree: int, monkeypatch: object) -> None:
    """Values and gradients in float64, also with a decay in the weights."""
    for recipe in (polynomial(degree, 0.02), polynomial(degree, 0.5, FORGET)):
        x = generate.inputs(recipe, B=2, T=31, H=2, G=2, K=5, V=3)
        result = []
        for limit in (0, 10**6):
            monkeypatch.setattr(local_regression, "DENSE", limit)  # type: ignore[attr-defined]
            result.append(generate.gradients(recipe, x, engine="kernel"))
        (y, _, slopes), (y2, _, slopes2) = result
        assert generate.relative_error(y2, y) < EXACT
        assert generate.largest_error(slopes2, slopes)[0] < EXACT


def test_the_shifted_basis_is_the_basis_of_the_difference() -> None:
    """S(q) φ(k) + s(q) = basis(k − q), and `apply` is the transpose of `apply_transpose`."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(7, 5, generator=g, dtype=torch.float64) for _ in range(2))
    for degree in (1, 2):
        shift = Shift.of(degree, k)
        want = LocalPolynomial(degree=degree).basis(k - q)[..., 1:]
        torch.testing.assert_close(shift.mean(q, shift.monomials(k)), want)
        x = torch.randn(want.shape, generator=g, dtype=torch.float64)
        f = torch.randn(want.shape, generator=g, dtype=torch.float64)
        first, second = (shift.apply_transpose(q, x) * f).sum(-1), (x * shift.apply(q, f)).sum(-1)
        torch.testing.assert_close(first, second)


def test_conjugate_gradients_solve_or_warn() -> None:
    g = torch.Generator().manual_seed(2)
    root = torch.randn(4, 9, 9, generator=g, dtype=torch.float64)
    A, b = root @ root.mT + torch.eye(9), torch.randn(4, 9, generator=g, dtype=torch.float64)
    b[2] = 0.0
    x = conjugate_gradients(lambda p: (A @ p.unsqueeze(-1)).squeeze(-1), b)
    torch.testing.assert_close(x, torch.linalg.solve(A, b), atol=1e-9, rtol=1e-9)
    hard = torch.logspace(0, 14, 200, dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="larger ridge"):
        conjugate_gradients(lambda p: hard * p, torch.ones(1, 200, dtype=torch.float64))


@pytest.mark.slow
def test_training_memory_of_local_linear_is_linear_in_tokens() -> None:
    """T = 8192, H = 4, K = V = 64: forward and backward raise the peak by less than 1 GB."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8192, 4, 64, requires_grad=True) for _ in range(3))
    recipe = rc.zoo.get("local_linear_attention").recipe
    initial = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    y, _ = rc.recall(recipe, q, k, v, output_final_state=False)
    y.sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - initial) / 2**20
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert grown < 1.0, f"{grown:.2f} GB"


# -- kernel regression -----------------------------------------------------------------------------


def test_decoding_extends_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES["gram, weighted"]
    x = generate.inputs(recipe, B=2, T=12, H=2, K=3, V=3)
    full, end = generate.run_recall(recipe, x)
    _, state = generate.run_recall(recipe, x.slice_tokens(0, 9))
    sizes: list[int] = []
    factor = kernel_regression._factor

    def noted(A: Tensor, recipe: rc.Recipe) -> Tensor:
        sizes.append(A.shape[-1])
        return factor(A, recipe)

    monkeypatch.setattr(kernel_regression, "_factor", noted)
    outputs = []
    for t in range(9, 12):
        y, state = generate.run_recall(recipe, x.slice_tokens(t, t + 1), state=state)
        outputs.append(y)
    assert sizes == [1, 1, 1]
    assert generate.relative_error(torch.cat(outputs, 1), full[:, 9:]) < EXACT
    for name in end.cache:
        assert generate.relative_error(state.cache[name], end.cache[name]) < EXACT
    # The cache is optional: without it, or with other rows, the outputs are equal.
    bare = rc.State.from_dict(state.to_dict())
    assert not bare.cache
    requested = generate.inputs(recipe, B=2, T=2, H=2, K=3, V=3, seed=5)
    y, _ = generate.run_recall(recipe, requested, state=state)
    assert generate.relative_error(generate.run_recall(recipe, requested, state=bare)[0], y) < EXACT
    swapped = state.select(torch.tensor([1, 0]))
    y2, _ = generate.run_recall(
        recipe, requested.map_token_tensors(lambda a: a.flip(0)), state=swapped
    )
    assert generate.relative_error(y2.flip(0), y) < EXACT


def test_a_gram_matrix_that_is_not_positive_is_named() -> None:
    recipe = rc.Recipe(
        features=F.Exponential(),
        context=C.Prefix(),
        algorithm=rc.algorithm.Analytic(ridge=1e-12),
    )
    x = generate.inputs(recipe, B=1, T=200, H=1, K=4, V=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="larger ridge"):
        generate.run_recall(recipe, x)


def test_the_cost_grows_with_the_past() -> None:
    for name, power in (("softmax_attention", 2), ("kernel_regression_attention", 3)):
        recipe = rc.zoo.get(name).recipe
        small, large = (rc.cost(recipe, T=T).total for T in (2048, 4096))
        assert math.log2(large / small) == pytest.approx(power, abs=0.25)
    window = rc.zoo.get("sliding_window_attention").recipe
    assert rc.cost(window, T=8192).total == 2 * rc.cost(window, T=4096).total
    assert not rc.cost(window).cache_grows
    text = str(rc.explain("softmax_attention"))
    assert "513 B per token, row and head" in text
    assert "the cost is quadratic" in text
    assert dataclasses.asdict(rc.cost(window))["state_bytes_per_token"] == 0


@pytest.mark.parametrize("name", ["blocks", "linear", "quadratic", "gram", "sum", "decay"])
def test_error_names_the_position_of_a_nan(name: str) -> None:
    x = generate.inputs(RECIPES[name], B=2, T=6, H=1, K=3, V=3)
    x.k[1, 4] = torch.nan
    with pytest.raises(ValueError, match="k has a NaN at row 1, token 4"):
        generate.run_recall(RECIPES[name], x)


def test_routed_blocks_without_a_ridge() -> None:
    """These fits use float64 keys, also in the router."""
    routed = rc.context.TopBlocks(size=2, top_k=2, score="router")
    recipe = rc.Recipe(
        memory=rc.memory.LocalPolynomial(degree=1),
        context=rc.context.KernelWeighted(restrictions=(routed,)),
        algorithm=rc.algorithm.Analytic(ridge=0.0),
    )
    x = generate.inputs(recipe, T=9, K=2, V=2)
    y, _ = generate.run_recall(recipe, x)
    single, _ = generate.run_recall(recipe, x.map_tensors(lambda t: t.float()))
    assert single.dtype == torch.float32
    assert generate.relative_error(single[:, 6:], y[:, 6:]) < 1e-3
