"""`ResidualMemory` and `MixtureOfMemories` around every kind of memory, against their parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.blocks import loops
from torch import Tensor

import recollect as rc
from recollect.blocks import MixtureOfMemories, ResidualMemory, Sequential, build
from recollect.blocks.routed import record_routing

TOL = {"atol": 1e-9, "rtol": 1e-9}  # float64, sums of order 1


def tokens(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, 8, dtype=torch.float64)


def boosted_by_recall(layer: Any, x: Tensor) -> Tensor:
    """Run one token at a time: `rc.read` of the key, then `rc.recall` of both memories."""
    first, second = layer.first, layer.second
    inputs = first.memory_inputs(x)
    started = first(x[:, :0])[1].memory
    learned, outputs = None, []
    for t in range(x.shape[1]):
        at = slice(t, t + 1)
        q, k, v = inputs.q[:, at], inputs.k[:, at], inputs.v[:, at]
        gates = {name: gate[:, at] for name, gate in inputs.gates.items()}
        params = inputs.params or None
        r = v - rc.read(first.recipe, k, state=started, params=params)
        y, started = rc.recall(first.recipe, q, k, v, gates, params=params, state=started)
        values, of_params = second.gates_and_params(x[:, at], k, {})
        init = second.initial_memory if learned is None else None
        more, learned = rc.recall(
            second.recipe,
            q,
            k,
            r,
            values,
            params=of_params or None,
            initial_memory=init,
            state=learned,
        )
        outputs.append(y + more)
    return first.output(torch.cat(outputs, 1), inputs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("titans", "gla"),
        ("gated_delta_net", "titans"),
        ("softmax_attention", "delta_net"),
        ("sliding_window_attention", "retnet"),
        ("delta_net", "softmax_attention"),
        ("rls", "delta_net"),
        ("normalized_linear_attention", "linear_attention"),
        ("ttt_linear", "delta_net"),
    ],
)
def test_second_memory_learns_the_residual_before_the_write(first: str, second: str) -> None:
    layer = build(ResidualMemory(first, second), 8, 2).double()
    x = tokens(2, 21).requires_grad_()
    y, expected = layer(x)[0], boosted_by_recall(layer, x)
    torch.testing.assert_close(y, expected, **TOL)
    weights, leaves = torch.randn_like(y), [x, *layer.parameters()]
    ours = torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None or not a.any()) if b is None else True
        if b is not None:
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def test_second_memory_of_rate_0_changes_nothing() -> None:
    silent = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=0.0))
    layer = build(ResidualMemory("gated_delta_net", silent), 8, 2).double()
    x = tokens(2, 13)
    torch.testing.assert_close(layer(x)[0], layer.first(x)[0], **TOL)


def test_stored_association_has_no_residual() -> None:
    """An association that is fully written, and repeats, leaves no residual for the second memory.

    With a rate of 1 and a key of norm 1, W k = v after one write.
    """
    exact = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=1.0))
    layer = build(ResidualMemory((exact, loops.MEMORY), (exact, loops.MEMORY)), 8, 2).double()
    token = tokens(1, 1)
    _, first = layer(token)
    _, often = layer(token.expand(1, 6, 8))
    torch.testing.assert_close(
        often.parts["second"].memory.weights[0], torch.zeros(1, 2, 4, 4).double(), **TOL
    )
    assert first.parts["second"].memory.weights[0].abs().max() > 1e-3


ROUTED = ["gated_delta_net", "titans", "softmax_attention", "sliding_window_attention", "rwkv7"]


@pytest.mark.parametrize("shared", [None, "gla"])
def test_memory_runs_over_its_tokens_only(shared: str | None) -> None:
    """With convolutions, positions, windows, token shifts and inner batches of all kinds."""
    layer = build(MixtureOfMemories(ROUTED, top=2, shared=shared), 8, 2).double()
    x = tokens(3, 40)
    with record_routing(layer) as routes:
        y, state = layer(x)
    (routing,) = routes
    p = (x @ layer.router.scores.weight.T).softmax(-1)
    expected = torch.zeros_like(x) if shared is None else layer.parts["shared"](x)[0]
    counts = torch.zeros(3, len(ROUTED), dtype=torch.long)
    for row in range(3):
        best = p[row].topk(2, dim=-1)
        for index in range(len(ROUTED)):
            at = (best.indices == index).any(-1).nonzero().squeeze(1)
            counts[row, index] = len(at)
            single = layer.parts[str(index)](x[row : row + 1, at])[0][0]
            share = p[row, at, index] / best.values[at].sum(-1)
            expected[row, at] += share[:, None] * single
    assert counts.min() >= 1, "every memory is to be tried"
    torch.testing.assert_close(y, expected, **TOL)
    for index in range(len(ROUTED)):
        assert torch.equal(state.parts[str(index)].position, counts[:, index])
    assert torch.equal(state.position, torch.full((3,), 40))
    f, P = counts.sum(0).double() / 120, p.mean((0, 1))
    torch.testing.assert_close(routing.balance_loss, len(ROUTED) * (f * P).sum(), **TOL)


def test_a_mixture_of_all_memories_is_their_weighted_sum() -> None:
    layer = build(MixtureOfMemories(["gla", "delta_net"], top=2), 8, 2).double()
    x = tokens(2, 9)
    p = (x @ layer.router.scores.weight.T).softmax(-1)
    parts = [layer.parts[name](x)[0] for name in ("0", "1")]
    torch.testing.assert_close(layer(x)[0], p[..., :1] * parts[0] + p[..., 1:] * parts[1], **TOL)


def test_the_balance_loss_is_k_when_balanced_and_more_when_not() -> None:
    layer = build(MixtureOfMemories(["gla"] * 4, top=1), 8, 2).double()
    x = torch.eye(8, dtype=torch.float64)[:4].repeat(3, 1)[None]
    with torch.no_grad():
        layer.router.scores.weight.copy_(50 * torch.eye(4, 8))  # token j to memory j
    with record_routing(layer) as routes:
        layer(x)
        layer(x[:, :1].expand(1, 12, 8))
        layer(x, None, (torch.arange(12) < 8)[None])
        layer(x, None, (torch.arange(12) % 4 == 0)[None])
    losses = [routing.balance_loss.item() for routing in routes]
    for loss, known in zip(losses, (1.0, 4.0, 1.0, 4.0), strict=True):
        assert math.isclose(loss, known, rel_tol=1e-12)


def test_empty_slots_do_not_accumulate() -> None:
    """Rows with few tokens leave empty slots in a cache of associations, which are cut off."""
    layer = build(MixtureOfMemories(["softmax_attention"] * 4, top=1), 8, 2)
    state = None
    with torch.no_grad():
        for _ in range(40):
            _, state = layer(torch.randn(3, 1, 8), state)
    for part in state.parts.values():
        assert part.memory.buffer.k.shape[1] <= int(part.position.max())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MixtureOfMemories(["gla"], top=2),
            "MixtureOfMemories(top=2) chooses among 1 memories",
        ),
        (lambda: MixtureOfMemories(["gla"], top=0), "must be a whole number >= 1, not 0"),
        (lambda: MixtureOfMemories([], top=1), "needs at least one mixer"),
        (lambda: MixtureOfMemories(top=1), "needs at least one mixer"),
        (lambda: MixtureOfMemories(("gla",), "gla", top=1), "gla"),
        (
            lambda: ResidualMemory("rwkv6", "gla"),
            "reads the token's own association with a bonus: take another first memory",
        ),
        (
            lambda: ResidualMemory("elastic_net", "gla"),
            "depends on the gates tau of the reading token",
        ),
        (
            lambda: ResidualMemory(Sequential("gla"), "gla"),
            "rc.blocks.Sequential is not a single memory",
        ),
        (lambda: ResidualMemory("gla", Sequential("gla")), "needs one recipe that is written"),
        (
            lambda: ResidualMemory("delta_product", "gla"),
            "ResidualMemory takes one association per token",
        ),
        (
            lambda: ResidualMemory("gla", "delta_product"),
            "ResidualMemory takes one association per token",
        ),
        (lambda: ResidualMemory("oja", "gla"), "reads Mᵀ q and not M k: take another first memory"),
        (lambda: ResidualMemory("gla", "rg_lru"), "must have one weight per channel"),
        (lambda: ResidualMemory("gla", "gla", clip=0), "must be a finite number > 0, not 0"),
        (
            lambda: ResidualMemory("gla", "gla", share=["lr"]),
            "which is not a gate of both memories",
        ),
        (lambda: ResidualMemory("gla", "gla", share="lr"), "must be a list of names of gates"),
        (
            lambda: ResidualMemory("gla", "delta_net", weigh_first="log_decay"),
            "not a gate of that memory with one number per head; it has: none",
        ),
        (lambda: ResidualMemory("gla", "gla", read="never"), "must be one of 'after', 'before'"),
    ],
)
def test_invalid_compositions_give_one_sentence(make: Any, message: str) -> None:
    with pytest.raises(rc.RecipeError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_second_memory_with_separate_keys_is_refused() -> None:
    with pytest.raises(rc.RecipeError, match="second memory of ResidualMemory receives its keys"):
        build(ResidualMemory("gla", "hgrn2"), 8, 2)
    with pytest.raises(rc.RecipeError, match="compute a value of q"):
        rc.blocks.build(rc.blocks.ResidualMemory("delta_net", "q_delta"), 16, 2)


def test_memories_are_named_one_by_one_or_in_a_list() -> None:
    assert MixtureOfMemories("gla", "delta_net", top=1) == MixtureOfMemories(
        ["gla", "delta_net"], top=1
    )
