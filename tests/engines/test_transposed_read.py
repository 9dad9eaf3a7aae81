"""Reads y = Wᵀ q: a loop over tokens, both engines, single tokens, and refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import recollect as rc
from recollect.explanation.model_inputs import MemoryRun
from recollect.testing.compare import run_recall
from recollect.testing.engines import check_agrees
from recollect.testing.inputs import Inputs, inputs

Decay, GD = rc.retention.Decay, rc.algorithm.GradientDescent
TOL = {"atol": 1e-10, "rtol": 1e-10}
DECAYS = [
    None,
    *(
        Decay(per=per, when=order)
        for per, order in itertools.product(
            ("head", "key", "value", "key_value"), ("before", "after")
        )
    ),
]


def recipe(order: str = "after", **choices: object) -> rc.Recipe:
    memory = rc.memory.Matrix(read=rc.memory.Read(transposed=True, when=order))
    return rc.Recipe(memory=memory, **choices)  # type: ignore[arg-type]


def draw(problem: rc.Recipe, T: int = 37) -> Inputs:
    return inputs(problem, B=2, T=T, H=2, K=4, V=4, G=2)


def loop(x: Inputs, decay: Decay | None, *, is_sum: bool, order: str) -> tuple[Tensor, Tensor]:
    """W = D W + η (v − P k) kᵀ with P = W or D W; without P for a sum."""
    q = x.q.unflatten(2, (2, -1))
    W = torch.zeros(2, 2, 4, 4, dtype=x.q.dtype) + (0 if x.init is None else x.init[0])
    outputs: list[Tensor] = []
    for t in range(x.k.shape[1]):
        k, v = x.k[:, t].unsqueeze(-1), x.v[:, t].unsqueeze(-1)
        earlier, D = W, torch.ones_like(W)
        if decay is not None:
            factor = x.gates["log_decay"][:, t].exp()
            by_row = decay.per in ("head", "value")
            factor = factor.unsqueeze(-1) if decay.per == "head" else factor
            D = D * (factor.unsqueeze(-1) if by_row else factor.unsqueeze(-2))
            if decay.per == "key_value":
                D = D * x.gates["log_decay_value"][:, t].exp().unsqueeze(-1)
        P = D * W if decay is None or decay.when == "before" else W
        error = v if is_sum else v - P @ k
        W = D * W + x.gates["lr"][:, t][..., None, None] * error @ k.mT
        outputs.append(q[:, t] @ (earlier if order == "before" else W))
    return torch.stack(outputs, 1).flatten(2, 3), W


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("decay", DECAYS, ids=str)
def test_a_loop_over_tokens(decay: Decay | None, is_sum: bool, order: str) -> None:
    choices: dict[str, object] = {"bias": rc.bias.DotProduct()} if is_sum else {}
    problem = recipe(order, **choices, **({} if decay is None else {"retention": decay}))
    x = draw(problem)
    want, W = loop(x, decay, is_sum=is_sum, order=order)
    for engine in ("auto", "reference"):
        y, state = run_recall(problem, x, engine=engine)
        torch.testing.assert_close(y, want, **TOL)
        torch.testing.assert_close(state.weights[0], W, **TOL)
    is_split = decay is not None and decay.per in ("value", "key_value") and not is_sum
    assert rc.select_engine(problem).engine.name == ("reference" if is_split else "linear")
    if not is_split:
        check_agrees(problem, x, "linear", chunk_size=8)


@pytest.mark.parametrize("order", ["after", "before"])
def test_tokens_padding_and_reads(order: str) -> None:
    problem = recipe(order, retention=Decay(per="key", when="before"))
    x = draw(problem)
    y, state = run_recall(problem, x)
    parts, state_after = [], None
    for t in range(37):
        part, state_after = run_recall(problem, x.slice_tokens(t, t + 1), state=state_after)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
    torch.testing.assert_close(state_after.weights[0], state.weights[0], **TOL)
    mask = torch.ones(2, 37)
    mask[0, 20:], mask[1, :5] = 0, 0
    padded, end = run_recall(problem, x, attention_mask=mask)
    for row, tokens in enumerate((slice(0, 20), slice(5, 37))):
        expected, last = run_recall(
            problem, x.select_row(row).slice_tokens(tokens.start, tokens.stop)
        )
        torch.testing.assert_close(padded[row : row + 1, tokens], expected, **TOL)
        torch.testing.assert_close(end.weights[0][row : row + 1], last.weights[0], **TOL)
    read = rc.read(problem, x.q, state=state)
    W = state.weights[0].unsqueeze(1)
    torch.testing.assert_close(read, (x.q.unflatten(2, (2, -1)) @ W).flatten(2, 3), **TOL)


def test_eigenvector_is_stored_as_a_projection() -> None:
    """Equal codes and inputs are stored as a projection, which is its own transpose."""
    k = torch.eye(4, dtype=torch.float64)[:2].view(1, 2, 1, 4)
    q = torch.randn(1, 2, 1, 4, dtype=torch.float64)
    gates = {"lr": torch.ones(1, 2, 1, dtype=torch.float64)}
    y, _ = rc.recall(recipe(), q, k, k, gates)
    torch.testing.assert_close(y[0, 1, 0, :2], q[0, 1, 0, :2])
    assert not y[0, 1, 0, 2:].any()


@pytest.mark.parametrize(
    "choices",
    [
        {"algorithm": rc.algorithm.Momentum()},
        {"context": rc.context.Window(size=3)},
        {"bias": rc.bias.L2(probe=rc.bias.Probe())},
        {"algorithm": GD(per="value")},
        {"algorithm": GD(batch_size=4)},
        {"bias": rc.bias.Huber()},
    ],
    ids=str,
)
def test_other_recursions_run_on_the_reference(choices: dict[str, object]) -> None:
    problem = recipe(**choices)
    assert rc.select_engine(problem).engine.name == "reference"
    x = draw(problem, T=9)
    y, state = run_recall(problem, x)
    plain = problem.replace(memory=rc.memory.Matrix())
    read_all = run_recall(plain, x)[1]
    torch.testing.assert_close(state.weights[0], read_all.weights[0], **TOL)
    assert y.shape == x.q.shape


def test_sub_steps_and_value_rates_of_a_sum() -> None:
    for choices in (
        {"algorithm": GD(updates_per_token=2)},
        {"algorithm": GD(per="value"), "bias": rc.bias.DotProduct()},
    ):
        problem = recipe(**choices)
        assert rc.select_engine(problem).engine.name == "linear"
        check_agrees(problem, draw(problem), "linear")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"features": rc.features.EluPlusOne()}, "over .* does not give"),
        ({"features": rc.features.Exponential()}, "over .* does not give"),
        (
            {"context": rc.context.Prefix(), "algorithm": rc.algorithm.LeastSquares()},
            "of weights that change token by token",
        ),
        ({"retention": rc.retention.Ball()}, "earlier or transposed read"),
    ],
)
def test_refusals(choices: dict[str, object], message: str) -> None:
    with pytest.raises(rc.RecipeError, match=message):
        recipe(**choices)


def test_refusals_of_reads_and_sizes() -> None:
    read = rc.memory.Read(transposed=True, normalize="sum")
    with pytest.raises(rc.RecipeError, match="without a normaliser or bonus"):
        rc.Recipe(memory=rc.memory.Matrix(read=read), bias=rc.bias.DotProduct())
    with pytest.raises(rc.RecipeError, match=r"over .* does not give"):
        rc.Recipe(memory=rc.memory.Vector(read=rc.memory.Read(transposed=True)))
    with pytest.raises(rc.RecipeError, match="needs K = V, not K = 4 and V = 3"):
        rc.cost(recipe(), K=4, V=3)
    assert rc.parallel.strategy_for(recipe()).name == "sequential"


def test_predictions_of_keys() -> None:
    """Diagnosis reads the value of a key, not the transpose."""
    torch.manual_seed(0)
    layer = rc.zoo.get("oja").build(8, 2).double()
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    run = MemoryRun(layer, x)
    _, state = run.recall(slice(0, 9), None)
    want = torch.einsum("bhvk,bthk->bthv", state.weights[0], run.inputs.k)
    torch.testing.assert_close(run.read(run.inputs.k, {}, state), want, **TOL)
