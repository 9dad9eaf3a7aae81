"""Memory Mosaics as a loop over pairs of tokens, and the ties and the restriction of its layer.

The loop follows the paper: the pair of token i has a leaky average of the past as its key and a
value that includes token i + 1. A token reads all pairs of earlier tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.zoo.test_equivalences import TOL, normal
from tests.zoo.test_systems import D, around, finish, layer
from torch import Tensor

import recollect as rc
from recollect import LayerOptions, MemoryLayer, Tie

N = 37


def tokens(rows: int = 2, count: int = N) -> Tensor:
    return normal(rows, count, D, seed=40)


def loop(module: MemoryLayer, x: Tensor) -> Tensor:
    """Outputs of the memory ``[B, T, H, V]``."""
    _, projected, v = around(module, x)
    factors = module.ties.factors
    decay = module.gates["log_average_decay"].bias.sigmoid()[:, None]  # λ
    key_length = math.e * factors["k"].exp()
    value_length = math.exp(-0.5) * factors["v_length"].exp()
    average, keys = torch.zeros_like(projected[:, 0]), []
    for t in range(x.shape[1]):
        average = projected[:, t] + decay * average
        keys.append(key_length * average / average.norm(dim=-1, keepdim=True))
    values = []
    for i in range(x.shape[1] - 1):
        mean = factors["v_mix"] * v[:, i] + (1 - factors["v_mix"]) * v[:, i + 1]
        values.append(value_length * mean / mean.norm(dim=-1, keepdim=True))
    outputs = [torch.zeros_like(v[:, 0])]
    for t in range(1, x.shape[1]):
        distances = torch.stack([(keys[t] - key).square().sum(-1) for key in keys[:t]])
        weights = (-distances / 2).exp().unsqueeze(-1)
        outputs.append((weights * torch.stack(values[:t])).sum(0) / weights.sum(0))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_the_layer_is_the_loop_of_the_paper(engine: str) -> None:
    module, x = layer("memory_mosaics", engine=engine), tokens()
    assert module.qkv.weight.shape == (2 * D, D)  # no projection of queries
    torch.testing.assert_close(module(x)[0], finish(module, loop(module, x), x), **TOL)


def test_gradients_are_those_of_the_loop() -> None:
    module, x = layer("memory_mosaics"), tokens().requires_grad_()
    weights = [x, *module.parameters()]
    gradients = torch.autograd.grad(module(x)[0].square().sum(), weights)
    want = torch.autograd.grad(finish(module, loop(module, x), x).square().sum(), weights)
    for one, other in zip(gradients, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def assert_states_equal(state: rc.LayerState, other: rc.LayerState) -> None:
    for one, two in zip(state.flatten()[1], other.flatten()[1], strict=True):
        torch.testing.assert_close(one, two, **TOL)


@pytest.mark.parametrize("split", [(1,) * 9 + (N - 9,), (17, 20), (36, 1)])
@pytest.mark.parametrize("value_dim", [None, 6])
def test_splits_and_tokens(split: tuple[int, ...], value_dim: int | None) -> None:
    module, x = layer("memory_mosaics", value_dim=value_dim), tokens()
    y, want = module(x)
    parts, state = [], None
    for piece in x.split(split, dim=1):
        part, state = module(piece, state)
        state = rc.LayerState.from_dict(state.to_dict())
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOL)
    assert_states_equal(state, want)


def test_padding_and_documents() -> None:
    module, x = layer("memory_mosaics"), tokens()
    mask = torch.ones(2, N)
    mask[0, :7], mask[1, 30:] = 0, 0
    for start in (None, module(tokens(2, 3))[1]):
        y, state = module(x, start, mask)
        for row, valid in enumerate(mask.bool()):
            initial = None if start is None else start.select(torch.tensor([row]))
            expected, end = module(x[row : row + 1, valid], initial)
            torch.testing.assert_close(y[row : row + 1, valid], expected, **TOL)
            outputs = [
                module(x[:1, :5], one)[0] for one in (state.select(torch.tensor([row])), end)
            ]
            torch.testing.assert_close(*outputs, **TOL)
    for start in (None, module(tokens(3, 3))[1]):
        y, state = module(x[:1], start, cu_seqlens=torch.tensor([0, 16, 16, N]))
        for row, (first, last) in enumerate(((0, 16), (16, 16), (16, N))):
            initial = None if start is None else start.select(torch.tensor([row]))
            expected, _ = module(x[:1, first:last], initial)
            torch.testing.assert_close(y[:, first:last], expected, **TOL)


def test_earlier_states_of_a_recorded_call() -> None:
    module, x = layer("memory_mosaics", value_dim=6), tokens()
    _, start = module(tokens(2, 3))
    calls: list[rc.layer.RecordedCall] = []
    module(x, start, calls=calls)
    assert_states_equal(calls[0].state_at(23), module(x[:, :23], start)[1])


def test_tokens_of_value_zero_and_one_token() -> None:
    module = layer("memory_mosaics")
    x = tokens()
    x[:, 5:8] = 0
    x.requires_grad_()
    y, _ = module(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert y.isfinite().all()
    assert gradient.isfinite().all()
    assert module(x[:, :1])[0].abs().max() == 0


# -- the ties and the restriction ------------------------------------------------------------------


def tied(*ties: Tie, **options: object) -> MemoryLayer:
    torch.manual_seed(0)
    recipe = rc.Recipe(retention=rc.retention.Decay())
    return MemoryLayer(D, 2, recipe, LayerOptions(ties=ties, **options)).double()  # type: ignore[arg-type]


def test_several_ties_of_one_target_apply_in_their_order() -> None:
    previous = Tie(target="k", source="k", rule="previous")
    length = Tie(target="k", source="k", rule="length", constant=3.0)
    average = Tie(target="k", source="k", rule="leaky_average")
    x = tokens()
    twice = tied(previous, previous).memory_inputs(x).k
    torch.testing.assert_close(twice[:, 2:], tied().memory_inputs(x).k[:, :-2])
    first, last = tied(average, length), tied(length, average)
    assert list(first.ties.factors) == ["k"]
    lengths = first.memory_inputs(x).k.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 3.0))
    assert last.memory_inputs(x).k.norm(dim=-1).max() > 3.1
    for bad in ((average, average), (previous, Tie(target="k", source="lr", rule="complement"))):
        with pytest.raises(rc.RecipeError, match="has one tie of rule"):
            LayerOptions(ties=bad)


def test_queries_that_are_keys() -> None:
    copy = Tie(target="q", source="k", rule="copy")
    for options in ({}, {"rope_theta": 100.0}, {"qk_affine": True}, {"token_shift": "input"}):
        module = tied(copy, **options)
        assert module.qkv_sizes[0] == 0
        inputs = module.memory_inputs(tokens())
        assert torch.equal(inputs.q, inputs.k)
    with pytest.raises(rc.RecipeError, match="needs one query head per memory"):
        MemoryLayer(D, 2, rc.Recipe(), LayerOptions(ties=(copy,)), num_kv_heads=1)
    with pytest.raises(rc.RecipeError, match="needs a projection of keys"):
        tied(copy, qk="ones")


def test_values_of_the_token_before() -> None:
    x = tokens()
    shifted = tied(Tie(target="v", source="v", rule="previous"), value_skip=True).memory_inputs(x)
    torch.testing.assert_close(shifted.v[:, 1:], tied().memory_inputs(x).v[:, :-1])
    assert torch.equal(shifted.unrotated_values, shifted.v)
    with pytest.raises(rc.RecipeError, match="needs complex_decay='none'"):
        tied(Tie(target="v", source="v", rule="mix"), complex_decay="input")
    with pytest.raises(rc.RecipeError, match="changes 'v' itself: set source='v'"):
        Tie(target="v", source="k", rule="previous")


def test_the_first_associations_are_left_out() -> None:
    """Softmax attention over all but two associations, in one call, in pieces, and in reads."""
    q, k, v = normal(3, 2, 21, 1, 4, seed=41)
    recipe = rc.Recipe(
        memory=rc.memory.LocalConstant(),
        context=rc.context.KernelWeighted(restrictions=(rc.context.SkipFirst(size=2),)),
        algorithm=rc.algorithm.Analytic(),
    )
    want = torch.zeros_like(v)
    for t in range(2, 21):
        logits = torch.einsum("bk,bnk->bn", q[:, t, 0], k[:, 2 : t + 1, 0]) / 2
        want[:, t, 0] = torch.einsum("bn,bnv->bv", logits.softmax(-1), v[:, 2 : t + 1, 0])
    y, state = rc.recall(recipe, q, k, v)
    torch.testing.assert_close(y, want, **TOL)
    parts, initial = [], None
    for a, b in ((0, 1), (1, 4), (4, 21)):
        part, initial = rc.recall(recipe, q[:, a:b], k[:, a:b], v[:, a:b], state=initial)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), want, **TOL)
    torch.testing.assert_close(rc.read(recipe, q[:, -1:], state=state), want[:, -1:], **TOL)
