"""Delta gradient descent: every linear map erases its output at its own input."""

from __future__ import annotations

import pytest
import torch
from tests.contracts import generate
from tests.engines.test_deep import check
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.engines.deep.chain import engine as chain_engine
from recollect.engines.deep.structure import chain_of, execution_mode
from recollect.testing.sequences import check_masks, check_packing

memory, bias, retention = rc.memory, rc.bias, rc.retention
algorithm, context = rc.algorithm, rc.context

EXACT, GRADIENT = 1e-10, 1e-8
MOMENTUM = algorithm.Momentum(batch_size=3, erasure=1.0)
DEEP = rc.Recipe(memory=memory.MLP(expansion=2), retention=retention.Decay(), algorithm=MOMENTUM)
RECIPES = {
    "chain": DEEP,
    "half": DEEP.replace(algorithm=algorithm.GradientDescent(batch_size=4, erasure=0.5)),
    "token": DEEP.replace(algorithm=algorithm.GradientDescent(erasure=1.0)),
    "several per token": DEEP.replace(
        algorithm=algorithm.GradientDescent(updates_per_token=2, erasure=1.0)
    ),
    "window": DEEP.replace(bias=bias.Huber(), context=context.Window(size=3)),
    "mean": DEEP.replace(
        retention=retention.Keep(),
        algorithm=algorithm.GradientDescent(batch_size=3, reduction="mean", erasure=1.0),
    ),
    "gated": DEEP.replace(memory=memory.GatedMLP(expansion=2, bias=True)),
    "base": DEEP.replace(memory=memory.MLP(expansion=2, static_weights=True)),
    "matrix, write only": DEEP.replace(
        memory=memory.Matrix(),
        algorithm=algorithm.Momentum(batch_size=3, momentum_on="value", erasure=1.0),
    ),
    "rates per channel": DEEP.replace(
        retention=retention.Decay(per="key"),
        algorithm=algorithm.GradientDescent(batch_size=3, per="value", erasure=1.0),
    ),
    "decay first": DEEP.replace(
        retention=retention.Decay(per="value", when="before"),
        algorithm=algorithm.GradientDescent(erasure=1.0),
    ),
    "one update per batch": DEEP.replace(
        algorithm=algorithm.GradientDescent(batch_size=3, update_every="batch", erasure=1.0)
    ),
    "link": DEEP.replace(retention=retention.Lq(q=4.0, decay=retention.Decay())),
    "link of a batch": DEEP.replace(retention=retention.Lq(q=4.0, link_every="batch")),
}


def derivative(z: Tensor) -> Tensor:
    """Return the derivative of the GELU."""
    density = torch.exp(-0.5 * z * z) / (2 * torch.pi) ** 0.5
    return 0.5 * (1 + torch.erf(z / 2**0.5)) + z * density


def loop(x: generate.Inputs, b: int, c: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """W_l ← W_l (α I − c η h_l h_lᵀ) − η δ_l h_lᵀ for M(x) = x + W_1 gelu(W_2 x) and L2.

    The gradients and the erasures of b tokens are taken at equal weights.
    """
    assert x.init is not None
    W2, W1 = (w.expand(x.q.shape[0], *w.shape) for w in x.init)
    eta, alpha = x.gates["lr"][..., None, None], x.gates["log_decay"].exp()[..., None, None]
    outputs = []
    for t in range(x.T):
        if t % b == 0:
            U2, U1 = W2, W1
        k, v, q = (part[:, t].unsqueeze(-1) for part in (x.k, x.v, x.q))  # [B, H, ·, 1]
        z = U2 @ k
        h = functional.gelu(z)
        error = k + U1 @ h - v
        delta = derivative(z) * (U1.mT @ error)
        W1 = alpha[:, t] * W1 - eta[:, t] * (error + c * U1 @ h) @ h.mT
        W2 = alpha[:, t] * W2 - eta[:, t] * (delta + c * U2 @ k) @ k.mT
        outputs.append((q + W1 @ functional.gelu(W2 @ q)).squeeze(-1))
    return torch.stack(outputs, 1), (W2, W1)


@pytest.mark.parametrize("engine", ["reference", "deep"])
@pytest.mark.parametrize(("b", "c"), [(1, 1.0), (1, 0.5), (4, 1.0)])
def test_equals_a_loop(b: int, c: float, engine: str) -> None:
    recipe = DEEP.replace(algorithm=algorithm.GradientDescent(batch_size=b, erasure=c))
    x = generate.inputs(recipe, B=2, T=12, H=2).with_grad()
    expected, weights = loop(x, b, c)
    y, state = generate.run_recall(recipe, x, engine=engine)
    assert generate.relative_error(y, expected) < EXACT
    for result, value in zip(state.weights, weights, strict=True):
        assert generate.relative_error(result, value) < EXACT
    leaves = list(x.tensors().values())
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
    slopes, expected_slopes = (
        torch.autograd.grad((one * weight).sum() + sum(w.square().sum() for w in end), leaves)
        for one, end in ((y, state.weights), (expected, weights))
    )
    for result, value in zip(slopes, expected_slopes, strict=True):
        assert generate.relative_error(result, value) < GRADIENT


@pytest.mark.parametrize("name", RECIPES)
def test_the_engine_equals_the_reference(name: str) -> None:
    """Outputs, state and gradients, in one call and split over engines."""
    check(RECIPES[name], 5)


def test_an_erasure_runs_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the recurrence have no erasure, so a device runs the PyTorch recurrence."""
    calls: list[object] = []
    monkeypatch.setattr(chain_engine, "is_cpu", lambda _: False)
    monkeypatch.setattr(chain_engine, "select_runner", lambda *args: calls.append(args))
    for erasure, count in ((1.0, 0), (0.0, 1)):
        rule = algorithm.Momentum(batch_size=3, erasure=erasure)
        recipe = DEEP.replace(algorithm=rule)
        generate.run_recall(recipe, generate.inputs(recipe, T=7), engine="deep")
        assert len(calls) == count


def test_the_recipes_use_every_path() -> None:
    assert {execution_mode(recipe) for recipe in RECIPES.values()} == {"table", "border", "tokens"}
    assert {chain_of(recipe) is None for recipe in RECIPES.values()} == {True, False}


@pytest.mark.parametrize("name", ["chain", "base"])
def test_padded_and_packed(name: str) -> None:
    recipe = RECIPES[name]
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 7:], mask[1, :2] = False, False
    check_masks(recipe, generate.inputs(recipe, B=2, T=11, H=2), "deep", mask)
    packed = generate.inputs(recipe, B=1, T=11, H=2)
    check_packing(recipe, packed, (0, 4, 5, 11), "deep")


@pytest.mark.parametrize("create", [rc.algorithm.GradientDescent, rc.algorithm.Momentum])
@pytest.mark.parametrize("engine", ["reference", "linear", "deep"])
def test_a_matrix_follows_the_delta_rule(create: type[rc.algorithm.Algorithm], engine: str) -> None:
    """L2 with a second erasure is a probe at the key whose rate is twice that of the write."""
    erases = rc.Recipe(retention=retention.Decay(), algorithm=create(erasure=1.0))
    probes = rc.Recipe(
        bias=bias.L2(probe=bias.Probe(at="key")), retention=retention.Decay(), algorithm=create()
    )
    x = generate.inputs(erases, B=2, T=70, H=2)
    y, state = generate.run_recall(erases, x, engine=engine)
    gates = {**x.gates, "erase": 2 * x.gates["lr"]}
    expected, end = rc.recall(
        probes, x.q, x.k, x.v, gates, initial_memory=x.init, engine="reference"
    )
    assert end is not None
    assert generate.relative_error(y, expected) < EXACT
    assert generate.relative_error(state.weights[0], end.weights[0]) < EXACT


@pytest.mark.parametrize("on", ["gradient", "value"])
@pytest.mark.parametrize("engine", ["linear", "reference"])
def test_an_erased_dot_product_is_the_delta_rule(engine: str, on: str) -> None:
    recipe = rc.Recipe(
        bias=bias.DotProduct(), algorithm=algorithm.Momentum(momentum_on=on, erasure=1.0)
    )
    assert recipe.canonical() == rc.Recipe(algorithm=algorithm.Momentum(momentum_on=on)).canonical()
    x = generate.inputs(recipe, B=2, T=9, H=2)
    y, _ = generate.run_recall(recipe, x, engine=engine)
    expected, _ = generate.run_recall(recipe.canonical(), x, engine="reference")
    assert generate.relative_error(y, expected) < EXACT


def test_the_order_of_a_decay_matters_under_a_dot_product() -> None:
    recipe = rc.Recipe(
        bias=bias.DotProduct(),
        retention=retention.Decay(when="before"),
        algorithm=algorithm.GradientDescent(erasure=0.5),
    )
    assert recipe.canonical() == recipe


@pytest.mark.parametrize("static_weights", [False, True])
def test_second_derivatives(static_weights: bool) -> None:
    recipe = rc.Recipe(
        memory=memory.MLP(expansion=1, activation="tanh", static_weights=static_weights),
        retention=retention.Decay(),
        algorithm=algorithm.Momentum(batch_size=2, erasure=1.0),
    )
    assert (chain_of(recipe) is None) == static_weights
    x = generate.inputs(recipe, B=1, T=3, H=1, K=2, V=2).with_grad()
    names = list(x.tensors())

    def outputs(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, state = generate.run_recall(
            recipe, x.replace_tensors(dict(zip(names, tensors, strict=True))), engine="deep"
        )
        return y, *state.weights

    tensors = tuple(x.tensors().values())
    assert torch.autograd.gradcheck(outputs, tensors)
    assert torch.autograd.gradgradcheck(outputs, tensors, fast_mode=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": memory.Vector()}, "use memory.Matrix"),
        ({"features": rc.features.Exponential()}, "use features.Identity"),
        ({"bias": bias.L2(probe=bias.Probe()), "memory": memory.Matrix()}, "use one"),
        (
            {
                "memory": memory.Matrix(read=memory.Read(normalize="sum")),
                "features": rc.features.EluPlusOne(),
                "bias": bias.DotProduct(),
            },
            "use memory.Read",
        ),
        ({"context": context.Prefix()}, "use context.Online"),
        (
            {"algorithm": algorithm.Momentum(erasure=1.0, normalized_steps=True)},
            "use normalized_steps=False",
        ),
    ],
)
def test_refusals(change: dict[str, rc.Member], message: str) -> None:
    erases = algorithm.GradientDescent(erasure=1.0)
    with pytest.raises(rc.RecipeError, match=message):
        rc.Recipe(**{"algorithm": erases, **change})


def test_explain_states_the_penalty() -> None:
    explanation = rc.explain(DEEP)
    assert explanation.problem == "½‖k_t + W1 gelu(W2 k_t) − v_t‖² + ½‖W h_t‖²"
    assert any("η_t W° h_t h_tᵀ" in line for line in explanation.write_equations)
    matrix = rc.Recipe(algorithm=algorithm.GradientDescent(erasure=1.0))
    assert rc.explain(matrix).write_equations == (
        "W_t = W_(t−1) − 2 η_t (W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ",
    )
