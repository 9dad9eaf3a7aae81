"""Least squares against dense solves over the full past of every prefix.

The oracle forms the weighted normal equations of each prefix from the tokens and solves them
densely. It shares neither a recursion nor a state with the code. The tolerance of 1e-9 in float64
allows for two solves of condition up to 1e3.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.engines.common.linalg import inverse_power
from recollect.engines.least_squares.inputs import RidgeProblem

Prefix, LeastSquares = rc.context.Prefix, rc.algorithm.LeastSquares
Preconditioned, GD = rc.algorithm.Preconditioned, rc.algorithm.GradientDescent
B, T, H, G, K, V = 2, 70, 2, 2, 5, 3
TOL = 1e-9


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def uniform(low: float, high: float, *shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


Q, KEYS, VALUES = (normal(B, T, H * G, K, seed=1), normal(B, T, H, K, seed=2),
                   normal(B, T, H, V, seed=3))  # fmt: skip
LOGS = uniform(-0.2, 0.0, B, T, H, seed=4)
WEIGHT = uniform(0.0, 2.0, B, T, H, seed=5)
INIT = normal(H, V, K, seed=6)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


def rho(form: str, logs: Tensor, t: int, refresh_every: int) -> Tensor:
    """Return ρ_t/λ ``[B, H]`` by its definition."""
    if form == "constant":
        return torch.ones_like(logs[:, 0])
    first = 0 if form == "decaying" else t // refresh_every * refresh_every
    return logs[:, first : t + 1].sum(1).exp()


def oracle(
    form: str, *, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, weight: Tensor, ridge: Tensor,
    init: Tensor, refresh_every: int = 64
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and the last memory (Σ γ w v kᵀ + ρ W_0)(Σ γ w k kᵀ + ρ I)⁻¹ per prefix."""
    outputs, W = [], init.expand(k.shape[0], *init.shape)
    for t in range(k.shape[1]):
        later = logs[:, : t + 1].flip(1).cumsum(1).flip(1) - logs[:, : t + 1]
        gamma = (later.exp() * weight[:, : t + 1]).unsqueeze(-1)
        keys, values = k[:, : t + 1], v[:, : t + 1]
        penalty = rho(form, logs, t, refresh_every)[..., None, None] * torch.diag_embed(ridge)
        gram = torch.einsum("bthi,bthj->bhij", gamma * keys, keys) + penalty
        cross = torch.einsum("bthv,bthj->bhvj", gamma * values, keys) + init @ penalty
        W = torch.linalg.solve(gram, cross.mT).mT
        queries = q[:, t].unflatten(1, (H, -1))
        outputs.append((queries @ W.mT).flatten(1, 2))
    return torch.stack(outputs, dim=1), W


FORMS = {
    "refreshed": LeastSquares(ridge="learned", ridge_per="key"),
    "refreshed every 16": LeastSquares(ridge="learned", ridge_per="key", refresh_every=16),
    "decaying": LeastSquares(ridge="learned", ridge_per="key", ridge_schedule="decaying"),
    "constant": LeastSquares(ridge="learned", ridge_per="key", ridge_schedule="constant"),
}


@pytest.mark.parametrize("method", ["reference", "least_squares"])
@pytest.mark.parametrize("name", FORMS)
def test_equals_a_dense_solve_per_prefix(name: str, method: str) -> None:
    """Outputs, the final memory, and the gradients of both by every input."""
    algorithm = FORMS[name]
    recipe = rc.Recipe(context=Prefix(decay="input", weight="input"), algorithm=algorithm)
    tokens = 40
    arguments = {
        "q": Q[:, :tokens], "k": KEYS[:, :tokens], "v": VALUES[:, :tokens],
        "logs": LOGS[:, :tokens], "weight": WEIGHT[:, :tokens],
        "ridge": uniform(0.2, 2.0, H, K, seed=7), "init": INIT,
    }  # fmt: skip
    results = []
    for run in ("oracle", method):
        x = {n: a.clone().requires_grad_() for n, a in arguments.items()}
        if run == "oracle":
            y, W = oracle(algorithm.ridge_schedule, refresh_every=algorithm.refresh_every, **x)
        else:
            y, state = rc.recall(
                recipe, x["q"], x["k"], x["v"], {"log_decay": x["logs"], "weight": x["weight"]},
                params={"ridge": x["ridge"]}, initial_memory=x["init"], engine=method,
            )  # fmt: skip
            assert state is not None
            W = state.weights[0]
        if algorithm.ridge_schedule == "constant" and run != "oracle":
            # The state stores E, and the memory is computed from E.
            eye = torch.eye(K, dtype=torch.float64)[None, :, None].expand(B, K, H, K)
            W = rc.read(recipe, eye, state=state, params={"ridge": x["ridge"]}).permute(0, 2, 3, 1)
        total = (y * normal(*y.shape, seed=8)).sum() + (W * normal(*W.shape, seed=9)).sum()
        results.append((y, W, torch.autograd.grad(total, list(x.values()))))
    (y0, W0, g0), (y1, W1, g1) = results
    assert error(y1, y0) < TOL
    assert error(W1, W0) < TOL
    for name, a, b in zip(arguments, g1, g0, strict=True):
        assert error(a, b) < TOL, name


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 33, None])
def test_spans_change_the_model_and_chunks_do_not(chunk_size: int | None) -> None:
    def run(refresh_every: int) -> Tensor:
        recipe = rc.Recipe(
            context=Prefix(decay="input"), algorithm=LeastSquares(refresh_every=refresh_every)
        )
        return rc.recall(
            recipe, Q, KEYS, VALUES, {"log_decay": LOGS}, chunk_size=chunk_size
        )[0]  # fmt: skip

    ones = torch.ones(B, T, H, dtype=torch.float64)
    expected = oracle(
        "refreshed", q=Q, k=KEYS, v=VALUES, logs=LOGS, weight=ones,
        ridge=torch.ones(H, K, dtype=torch.float64), init=torch.zeros_like(INIT), refresh_every=33
    )[0]  # fmt: skip
    assert error(run(33), expected) < TOL
    assert error(run(20), expected) > 1e-4


def test_decoding_equals_one_call() -> None:
    """Sherman–Morrison steps across boundaries, with a state of constant size."""
    for form in ("refreshed", "decaying"):
        recipe = rc.Recipe(
            context=Prefix(decay="input", weight="input"),
            algorithm=LeastSquares(ridge_schedule=form, refresh_every=16),
        )
        gates = {"log_decay": LOGS, "weight": WEIGHT}
        complete, last = rc.recall(recipe, Q, KEYS, VALUES, gates, initial_memory=INIT)
        state, outputs, sizes = None, [], set()
        for t in range(T):
            now = slice(t, t + 1)
            y, state = rc.recall(
                recipe, Q[:, now], KEYS[:, now], VALUES[:, now],
                {name: x[:, now] for name, x in gates.items()},
                initial_memory=INIT if state is None else None, state=state,
            )  # fmt: skip
            assert state is not None
            outputs.append(y)
            sizes.add(state.nbytes)
        assert error(torch.cat(outputs, dim=1), complete) < TOL
        assert last is not None and state is not None
        for name, x in last.to_dict().items():
            if x.is_floating_point():
                assert error(state.to_dict()[name], x) < TOL, name
        assert len(sizes) == 1


def test_gradients_of_all_inputs_by_finite_differences() -> None:
    recipe = rc.Recipe(
        context=Prefix(decay="input"), algorithm=LeastSquares(ridge="learned", refresh_every=3)
    )

    def f(q: Tensor, k: Tensor, v: Tensor, logs: Tensor, ridge: Tensor, init: Tensor) -> Tensor:
        y, state = rc.recall(
            recipe, q, k, v, {"log_decay": logs}, params={"ridge": ridge}, initial_memory=init,
            engine="least_squares",
        )  # fmt: skip
        assert state is not None
        return torch.cat([y.flatten(), *(x[0].flatten() for x in state.algorithm_state.values())])

    arguments = (
        normal(1, 7, 1, 2, seed=1), normal(1, 7, 1, 2, seed=2), normal(1, 7, 1, 2, seed=3),
        uniform(-0.5, -0.1, 1, 7, 1, seed=4), uniform(0.5, 1, 1, seed=5), normal(1, 2, 2, seed=6),
    )  # fmt: skip
    assert torch.autograd.gradcheck(f, tuple(x.requires_grad_() for x in arguments))


# -- theorems --------------------------------------------------------------------------------------


def test_the_error_against_the_pseudoinverse_falls_in_proportion_to_the_ridge() -> None:
    q, k, v = Q[:1, :40, :1], KEYS[:1, :40, :1], VALUES[:1, :40, :1]
    exact = torch.stack(
        [v[0, : t + 1, 0].T @ torch.linalg.pinv(k[0, : t + 1, 0].T) @ q[0, t, 0] for t in range(40)]
    )
    errors = []
    for ridge in (1e-2, 1e-3, 1e-4):
        recipe = rc.Recipe(context=Prefix(), algorithm=LeastSquares(ridge=ridge))
        errors.append(float((rc.recall(recipe, q, k, v)[0][0, :, 0] - exact).norm()))
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.05)


def test_weights_do_not_matter_while_the_past_can_be_interpolated() -> None:
    """TTR 15: with t < K pairs and a vanishing ridge, any decay gives an equal memory."""
    tokens = K - 1
    q, k, v = Q[:, :tokens, :H], KEYS[:, :tokens], VALUES[:, :tokens]
    recipe = rc.Recipe(context=Prefix(decay="input"), algorithm=LeastSquares(ridge=1e-9))
    flat = rc.recall(recipe, q, k, v, {"log_decay": torch.zeros(B, tokens, H).double()})[0]
    faded = rc.recall(recipe, q, k, v, {"log_decay": LOGS[:, :tokens]})[0]
    assert error(faded, flat) < 1e-6
    longer = rc.recall(recipe, Q[:, :, :H], KEYS, VALUES, {"log_decay": LOGS})[0]
    still = rc.recall(recipe, Q[:, :, :H], KEYS, VALUES, {"log_decay": 0 * LOGS})[0]
    assert error(longer, still) > 1e-2


def test_more_pairs_than_dimensions() -> None:
    """128 pairs in 64 dimensions with keys of condition 10: every read is nearest to its value.

    Linear attention sums the common part of keys, and the delta rule stores the latest pairs.
    """
    pairs, size, words, rows = 128, 64, 64, 8
    scale = torch.logspace(0, -1, size, dtype=torch.float64)
    keys = functional.normalize(normal(rows, pairs, 1, size, seed=1) * scale, dim=-1)
    g = torch.Generator().manual_seed(2)
    word = torch.randint(0, words, (rows, pairs), generator=g)
    values = functional.one_hot(word, words).double().unsqueeze(2)
    right: dict[str, float] = {}
    for name, recipe, gates in (
        ("rls", rc.Recipe(context=Prefix(), algorithm=LeastSquares(ridge=1e-3)), {}),
        ("linear", rc.zoo.get("linear_attention").recipe, {}),
        ("delta", rc.Recipe(), {"lr": torch.ones(rows, pairs, 1, dtype=torch.float64)}),
    ):
        _, state = rc.recall(recipe, keys, keys, values, gates)
        assert state is not None
        read = rc.read(recipe, keys, state=state)[:, :, 0]
        right[name] = float((read.argmax(-1) == word).double().mean())
    assert right["rls"] > 0.99
    assert right["linear"] < 0.9
    assert right["delta"] < 0.6


def test_forms_coincide_without_decay_and_differ_with_it() -> None:
    def run(form: str, decay: float) -> Tensor:
        recipe = rc.Recipe(context=Prefix(decay=decay), algorithm=LeastSquares(ridge_schedule=form))
        return rc.recall(recipe, Q, KEYS, VALUES)[0]

    for form in ("decaying", "constant"):
        assert error(run(form, 1.0), run("refreshed", 1.0)) < TOL
        assert error(run(form, 0.9), run("refreshed", 0.9)) > 1e-4


def test_full_batch_descent_runs_from_linear_attention_to_least_squares() -> None:
    """TTR 20–23: one step from 0 is linear attention, and many steps are the solution."""
    q, k, v = Q[:, :12, :H], KEYS[:, :12] / 3, VALUES[:, :12]
    one = rc.Recipe(context=Prefix(), algorithm=GD(updates_per_token=1, lr=1.0))
    linear = rc.zoo.get("linear_attention").recipe
    assert error(rc.recall(one, q, k, v)[0], rc.recall(linear, q, k, v)[0]) < TOL
    exact = torch.stack(
        [
            torch.einsum(
                "bhvk,bhk->bhv",
                v[:, : t + 1].permute(0, 2, 3, 1)
                @ torch.linalg.pinv(k[:, : t + 1].permute(0, 2, 3, 1)),
                q[:, t],
            )
            for t in range(12)
        ],
        dim=1,
    )
    errors = []
    for steps in (4, 64, 1024):
        many = rc.Recipe(context=Prefix(), algorithm=GD(updates_per_token=steps, lr=0.35))
        last = rc.recall(many, q, k, v)[0]
        errors.append(error(last[:, -1], exact[:, -1]))
    assert errors[0] > 5 * errors[1] > 5 * errors[2]
    assert errors[2] < 1e-3


# -- between linear attention and least squares ----------------------------------------------------


def past(kind: Preconditioned) -> Tensor:
    recipe = rc.Recipe(context=Prefix(decay="input"), algorithm=kind)
    return rc.recall(recipe, Q, KEYS, VALUES, {"log_decay": LOGS})[0]


def test_the_family_reaches_both_ends() -> None:
    exact = past(LeastSquares(ridge_schedule="constant"))  # type: ignore[arg-type]
    linear = rc.Recipe(
        bias=rc.bias.DotProduct(), retention=rc.retention.Decay(), algorithm=GD(lr=1.0)
    )
    plain = rc.recall(linear, Q, KEYS, VALUES, {"log_decay": LOGS})[0]
    assert error(past(Preconditioned(kind="identity")), plain) < TOL
    for kind in ("diagonal", "spectral"):
        assert error(past(Preconditioned(kind=kind, power=0.0)), plain) < TOL
    assert error(past(Preconditioned(kind="spectral")), exact) < TOL
    errors = [error(past(Preconditioned(steps=steps)), exact) for steps in range(1, K + 1)]
    assert all(a > b for a, b in itertools.pairwise(errors))
    assert errors[-1] < 1e-6  # K steps are exact up to rounding


@pytest.mark.parametrize("method", ["reference", "least_squares"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_conjugate_gradient_steps_minimise_over_a_krylov_space(steps: int, method: str) -> None:
    """z = argmin ½ zᵀA z − qᵀz over the span of q, A q, …: the error has the smallest A-norm."""
    q, k, v = Q[:1, :9, :1], KEYS[:1, :9, :1], VALUES[:1, :9, :1]
    algorithm = Preconditioned(steps=steps, ridge=0.5)
    y = rc.recall(rc.Recipe(context=Prefix(), algorithm=algorithm), q, k, v, engine=method)[0]
    for t in range(9):
        keys, query = k[0, : t + 1, 0], q[0, t, 0]
        A = keys.T @ keys + 0.5 * torch.eye(K, dtype=torch.float64)
        powers = [torch.linalg.matrix_power(A, i) @ query for i in range(min(steps, t + 2))]
        basis = torch.linalg.qr(torch.stack(powers, dim=1))[0]
        z = basis @ torch.linalg.solve(basis.T @ A @ basis, basis.T @ query)
        assert error(y[0, t, 0], v[0, : t + 1, 0].T @ keys @ z) < TOL


def test_powers_against_an_eigendecomposition_of_each_prefix() -> None:
    q, k, v = Q[:1, :9, :1], KEYS[:1, :9, :1], VALUES[:1, :9, :1]
    for kind in ("diagonal", "spectral"):
        algorithm = Preconditioned(kind=kind, power=0.3, ridge=0.5)
        y = rc.recall(rc.Recipe(context=Prefix(), algorithm=algorithm), q, k, v)[0][0, :, 0]
        for t in range(9):
            keys = k[0, : t + 1, 0]
            gram = keys.T @ keys
            gram = gram if kind == "spectral" else gram.diagonal().diag()
            values, vectors = torch.linalg.eigh(gram + 0.5 * torch.eye(K, dtype=torch.float64))
            root = vectors @ values.pow(-0.3).diag() @ vectors.T
            assert error(y[t], v[0, : t + 1, 0].T @ keys @ root @ q[0, t, 0]) < TOL


def test_a_power_has_a_gradient_where_eigenvalues_coincide() -> None:
    S = torch.eye(3, dtype=torch.float64) * 2
    x = normal(3, 3, seed=1)
    S = (S + 1e-3 * torch.diag(torch.tensor([0.0, 0.0, 1.0]).double())).requires_grad_()
    slope = torch.autograd.grad((inverse_power(S, 0.5) * x).sum(), S)[0]
    assert slope.isfinite().all()
    step = 1e-6 * (y := normal(3, 3, seed=2) + normal(3, 3, seed=2).T)
    with torch.no_grad():
        rise = (inverse_power(S + step, 0.5) - inverse_power(S - step, 0.5)) * x
    assert float((slope * y).sum()) == pytest.approx(float(rise.sum() / 2e-6), rel=1e-5)


def test_conjugate_gradients_report_and_warn() -> None:
    short = LeastSquares(ridge_schedule="constant", ridge=1e-4)
    recipe = rc.Recipe(context=Prefix(decay="input"), algorithm=short)
    says = r"stopped after 2 iterations.*ridge_schedule='refreshed'"
    with pytest.warns(rc.ConvergenceWarning, match=says), rc.record_solver(limit=2) as reports:
        rc.recall(recipe, Q, KEYS, VALUES, {"log_decay": LOGS})
    assert reports[0].iterations == 2
    assert reports[0].unsolved > 0
    assert "2 iterations" in str(reports[0])
    for wrong in ({"tolerance": 0.0}, {"limit": 0}):
        with pytest.raises(ValueError, match="record_solver"), rc.record_solver(**wrong):
            pass
    enough = rc.Recipe(
        context=Prefix(decay="input"), algorithm=LeastSquares(ridge_schedule="constant")
    )
    with rc.record_solver() as reports, warnings.catch_warnings():
        warnings.simplefilter("error")
        rc.recall(enough, Q, KEYS, VALUES, {"log_decay": LOGS}, engine="least_squares")
    (report,) = reports
    assert report.unsolved == 0 and report.systems == B * T * H * G
    assert 1 <= report.iterations <= 2 * K and report.residual <= report.tolerance == 1e-12


# -- float32 ---------------------------------------------------------------------------------------


def single(recipe: rc.Recipe, q: Tensor, k: Tensor, v: Tensor, logs: Tensor | None) -> float:
    """Return the relative error of float32 to float64 on equal (rounded) numbers, one head."""
    outputs = []
    for dtype in (torch.float32, torch.float64):
        x = [a.float().to(dtype)[None, :, None] for a in (q, k, v)]
        gates = {} if logs is None else {"log_decay": logs.float().to(dtype)[None, :, None]}
        outputs.append(rc.recall(recipe, *x, gates, engine="least_squares")[0])
    assert outputs[0].isfinite().all()
    return error(outputs[0].double(), outputs[1])


def spanning(length: int, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    q, k = (functional.normalize(normal(length, size, seed=s), dim=-1) for s in (1, 2))
    return q, k, normal(length, size, seed=3)


@pytest.mark.parametrize("form", ["refreshed", "decaying"])
def test_float32_with_decay(form: str) -> None:
    q, k, v = spanning(4096)
    logs = uniform(0.98, 1.0, 4096, seed=4).log()
    recipe = rc.Recipe(context=Prefix(decay="input"), algorithm=LeastSquares(ridge_schedule=form))
    assert single(recipe, q, k, v, logs) < 1e-5


@pytest.mark.parametrize("form", ["refreshed", "decaying"])
@pytest.mark.parametrize("chunk_size", [None, 16, 64])
@pytest.mark.parametrize("decay", [0.9, 0.8, 0.5])
def test_strong_decay(decay: float, chunk_size: int | None, form: str) -> None:
    """The engine is as accurate as a dense solve per token in float32, for any chunk size."""
    x = [functional.normalize(normal(1, 256, 1, 8, seed=s), dim=-1) for s in (1, 2, 3)]
    recipe = rc.Recipe(context=Prefix(decay=decay), algorithm=LeastSquares(ridge_schedule=form))
    exact = rc.recall(recipe, *x, engine="reference")[0]
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-2 if decay < 0.6 else 1e-4)):
        y = rc.recall(recipe, *(a.to(dtype) for a in x), chunk_size=chunk_size)[0]
        assert error(y.double(), exact) < bound


@pytest.mark.parametrize("reset", [-15.0, -110.0, -math.inf])
@pytest.mark.parametrize("tokens", [10, 300])
def test_reset_is_finite(reset: float, tokens: int) -> None:
    """In an open span, before a zero key, at any chunk size: outputs are as large as the values."""
    q, k, v = (normal(1, tokens, 1, 64, seed=s, dtype=torch.float32) for s in (1, 2, 3))
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    k[:, 7] = 0
    logs = torch.full((1, tokens, 1), -0.03)
    logs[0, tokens // 2] = reset
    recipe = rc.Recipe(context=Prefix(decay="input"), algorithm=LeastSquares())
    for chunk_size in (None, 16, 1):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = rc.recall(recipe, *leaves, {"log_decay": logs}, chunk_size=chunk_size)[0]
        slopes = torch.autograd.grad(y.sum(), leaves)
        assert float(y.detach().abs().max()) < 30
        # The gradient of a zero key is of order 1/ρ, the ridge after a reset.
        assert all(x.isfinite().all() for x in slopes)


def test_no_rows() -> None:
    y, _ = rc.zoo.get("rls").build(64, 2)(torch.zeros(0, 5, 64))
    assert y.shape == (0, 5, 64)


@pytest.mark.parametrize("queries", ["of any direction", "like the keys"])
def test_float32_with_keys_of_condition_1e4(queries: str) -> None:
    basis = torch.linalg.qr(normal(64, 64, seed=5))[0]
    scale = torch.logspace(0, -4, 64, dtype=torch.float64)
    k = normal(4096, 64, seed=2) * scale @ basis.T
    q = normal(4096, 64, seed=1)
    q = q * scale @ basis.T if queries == "like the keys" else q
    recipe = rc.Recipe(context=Prefix(), algorithm=LeastSquares(ridge=1e-3))
    size = k.norm(dim=-1).mean()
    assert single(recipe, q, k / size, normal(4096, 64, seed=3), None) < 1e-3


@pytest.mark.slow
def test_float32_where_keys_leave_directions_unexcited() -> None:
    """8192 tokens in 48 of 64 dimensions: a ridge that only decays fails at token 832."""
    basis = torch.linalg.qr(normal(64, 48, seed=5))[0]
    q, k, _ = spanning(8192, 48)
    logs = torch.full((8192,), math.log(0.98), dtype=torch.float64)
    x = (q @ basis.T, k @ basis.T, normal(8192, 64, seed=3), logs)
    recipe = rc.Recipe(context=Prefix(decay="input"), algorithm=LeastSquares())
    assert single(recipe, *x) < 1e-4
    # A ridge that only decays leaves the rounding of the keys in these directions.
    wound = rc.Recipe(
        context=Prefix(decay="input"), algorithm=LeastSquares(ridge_schedule="decaying")
    )
    with pytest.raises(ValueError, match="is not determined at row 0, token"):
        single(wound, *x)


@pytest.mark.parametrize("form", ["refreshed", "decaying", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore::recollect.ConvergenceWarning")
def test_nothing_becomes_nan(form: str, dtype: torch.dtype) -> None:
    """Repeated keys, zero keys, strong decay and a tiny ridge, forward and backward."""
    k = normal(1, 200, 2, 8, seed=1, dtype=dtype)
    k[:, 20:60] = k[:, 20:21]
    k[:, 80:100] = 0
    logs = uniform(-0.1, 0, 1, 200, 2, seed=4).to(dtype)
    logs[:, 120:130] = -2.0
    logs[:, 150] = -math.inf
    for ridge in (1.0, 1e-6):
        recipe = rc.Recipe(
            context=Prefix(decay="input"), algorithm=LeastSquares(ridge_schedule=form, ridge=ridge)
        )
        leaves = [
            x.clone().requires_grad_() for x in (k, k, normal(1, 200, 2, 4, seed=3).to(dtype))
        ]
        y, state = rc.recall(recipe, *leaves, {"log_decay": logs}, engine="least_squares")
        assert y.isfinite().all() and state is not None
        assert all(x.isfinite().all() for x in state.tensors())
        assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), leaves))


# -- an independent implementation -----------------------------------------------------------------


def _naive_mesa_net() -> ModuleType:
    result = importlib.util.find_spec("fla")
    if result is None or result.submodule_search_locations is None:
        pytest.skip("flash-linear-attention is not installed")
    path = Path(next(iter(result.submodule_search_locations))) / "ops" / "mesa_net" / "naive.py"
    spec = importlib.util.spec_from_file_location("naive_mesa_net", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mesa_net_equals_flash_linear_attention() -> None:
    """flash-linear-attention's exact form solves G_t + Λ densely for every token, in float32."""
    naive = _naive_mesa_net()
    q, k = (functional.normalize(normal(B, T, H, K, seed=s), dim=-1) for s in (1, 2))
    v, ridge = normal(B, T, H, K, seed=3), uniform(0.3, 1.0, H, K, seed=4)
    beta = uniform(0, 1, B, T, H, seed=5)
    expected = naive.naive_mesa_net_exact(q, k, v, LOGS, ridge, beta)[0]
    recipe = rc.zoo.get("mesa_net").recipe
    gates = {"log_decay": LOGS, "weight": beta}
    y = rc.recall(recipe, q, k, v, gates, params={"ridge": ridge})[0]
    assert error(expected.double(), y) < 1e-5


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"algorithm": LeastSquares()}, "use context.Prefix()"),
        ({"algorithm": LeastSquares(), "context": Prefix(), "bias": rc.bias.DotProduct()},
         "use bias.L2()"),
        ({"algorithm": LeastSquares(), "context": Prefix(), "features": rc.features.Exponential()},
         "algorithm.Analytic"),
        ({"algorithm": LeastSquares(), "context": Prefix(), "memory": rc.memory.MLP()},
         "needs memory.Matrix"),
        ({"algorithm": Preconditioned(), "context": Prefix(), "memory": rc.memory.Vector()},
         "needs memory.Matrix"),
        ({"algorithm": LeastSquares(), "context": Prefix(), "retention": rc.retention.Decay()},
         "Prefix(decay=...)"),
    ],
)  # fmt: skip
def test_refusals(choices: dict[str, object], sentence: str) -> None:
    with pytest.raises(rc.RecipeError) as caught:
        rc.Recipe(**choices)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LeastSquares(ridge=0.0), "ridge"),
        (lambda: Preconditioned(kind="diagonal", steps=2), "only kind='conjugate_gradient'"),
        (lambda: Preconditioned(power=0.5), "only 'diagonal' and 'spectral'"),
    ],
)
def test_refused_members(make: object, sentence: str) -> None:
    with pytest.raises(rc.RecipeError) as caught:
        make()  # type: ignore[operator]
    assert sentence in str(caught.value)


def test_gradients_without_a_final_state() -> None:
    """Outputs do not depend on the Gram matrix, which is left out without a state."""
    recipe = rc.zoo.get("rls").recipe
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 6, generator=generator).requires_grad_() for _ in range(3))
    ridge = torch.tensor([0.5, 1.0], requires_grad=True)

    def grads(output_final_state: bool) -> tuple[torch.Tensor, ...]:
        y, _ = rc.recall(
            recipe, q, k, v, params={"ridge": ridge}, output_final_state=output_final_state
        )
        return torch.autograd.grad(y.sin().sum(), (q, k, v, ridge))

    torch.testing.assert_close(grads(False), grads(True), rtol=0, atol=0)


def test_flattened_problem_round_trips() -> None:
    """A row of tensors passes through autograd and gives the original problem back."""
    marks = [torch.full((), float(i)) for i in range(10)]
    problem = RidgeProblem.rebuild(tuple(marks))
    assert problem.tensors() == tuple(marks)
    rebuilt = RidgeProblem.rebuild(problem.tensors())
    for field in dataclasses.fields(RidgeProblem):
        assert getattr(rebuilt, field.name) == getattr(problem, field.name)
    assert problem.state.tensors() == tuple(marks[6:])
    assert problem.state.inverse is marks[-1]
    assert problem.log_decay is marks[3]
