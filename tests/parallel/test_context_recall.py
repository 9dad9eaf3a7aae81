"""`rc.parallel.recall` on several ranks against the reference on the full sequence, in float64."""

from __future__ import annotations

import datetime
import gc
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.ranks import on_ranks
from torch import Tensor

import recollect as rc
from recollect.engines.common.problem import Problem
from recollect.functional.binding import bind
from recollect.parallel import link, memorise
from recollect.parallel.link import rank_group
from recollect.parallel.pieces import pieces_for
from recollect.parallel.segment import local_pieces
from recollect.testing.inputs import Inputs, inputs, sizes

T = 13
CUTS = {2: (0, 5, 13), 4: (0, 4, 5, 10, 13)}
BORDERS = (0, 3, 5, 9, 13)
"""Document boundaries: on two ranks one ends with a rank, on four others cover several ranks."""

EXACT = 1e-10
NAMES = {
    "affine": (
        "gated_delta_net",  # a matrix over keys
        "momentum_delta_net",  # with momentum
        "gated_delta_product",  # several associations per token
        "rwkv7",  # a probe
        "gated_delta_net_2",  # a probe, and a rate per value channel
        "mamba2",  # a decay per head
        "gla",  # per key
        "mamba",  # per entry
        "rg_lru",  # a vector memory
        "swla",  # a window of weights
        "normalized_linear_attention",  # a memory of ones
        "retnet",
    ),
    "gather": ("softmax_attention", "sliding_window_attention", "fox", "local_linear_attention"),
    "sequential": ("titans", "atlas", "rls", "mesa_net", "mlstm", "delta_former", "dot"),
}


def _state_loss(state: rc.State) -> Tensor:
    """Return ½‖·‖² of the learned tensors of a state, to which empty slots add nothing."""
    total = torch.zeros((), dtype=torch.float64)
    for x in replace(state, cache={}).tensors():
        if x.is_floating_point() and x.requires_grad:
            total = total + 0.5 * x.square().sum()
    return total


def _off(actual: Tensor | None, expected: Tensor) -> float:
    actual = torch.zeros_like(expected) if actual is None else actual
    if actual.shape[1:2] != expected.shape[1:2]:  # empty slots on the left of a growing state
        n = max(actual.shape[1], expected.shape[1])
        actual, expected = (
            torch.cat([x.new_zeros(x.shape[0], n - x.shape[1], *x.shape[2:]), x], 1)
            for x in (actual, expected)
        )
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0


def _inputs(recipe: rc.Recipe, mode: str) -> tuple[Inputs, dict[str, Any]]:
    """Return the inputs of all ranks, and the boundaries of documents."""
    K, V = sizes(recipe, random.Random(0))
    x = inputs(recipe, B=1 if mode == "documents" else 2, T=T, H=2, K=K, V=V, seed=1)
    if mode == "documents":
        return x, {"cu_seqlens": torch.tensor(BORDERS)}
    if mode == "padding":
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :3] = mask[1, 10:] = 0
        return x, {"attention_mask": mask}
    return x, {}


def _check(name: str, strategy: str, mode: str, method: str) -> None:
    """Check one recipe and method on this rank; gradients of shared tensors are summed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start, stop = CUTS[ranks][rank], CUTS[ranks][rank + 1]
    recipe = rc.zoo.get(name).recipe
    x, documents = _inputs(recipe, mode)
    full, own_inputs = x.with_grad(), x.with_grad()
    y, state = rc.recall(
        recipe, full.q, full.k, full.v, full.gates,
        params=full.params, initial_memory=full.init, engine=method, **documents
    )  # fmt: skip
    g = torch.Generator().manual_seed(3)
    weights = torch.randn(y.shape, generator=g, dtype=y.dtype)
    assert state is not None
    ((y * weights).sum() + _state_loss(state)).backward()
    if "attention_mask" in documents:
        documents = {"attention_mask": documents["attention_mask"][:, start:stop]}
    piece = own_inputs.slice_tokens(start, stop)
    outputs, later = rc.parallel.recall(
        recipe, piece.q, piece.k, piece.v, piece.gates,
        params=own_inputs.params, initial_memory=own_inputs.init, strategy=strategy, **documents
    )  # fmt: skip
    assert later is not None
    share = float(rank == 0)  # all ranks have the state, which counts once
    ((outputs * weights[:, start:stop]).sum() + share * _state_loss(later)).backward()
    wrong = {"y": _off(outputs, y[:, start:stop])}
    parts = zip(*(replace(s, cache={}).tensors() for s in (later, state)), strict=True)
    wrong |= {f"state {i}": _off(a, b) for i, (a, b) in enumerate(parts)}
    along = {"q", "k", "v", *(f"gate {gate}" for gate in x.gates)}
    for key, leaf in own_inputs.tensors().items():
        expected = full.tensors()[key].grad
        expected = torch.zeros_like(leaf) if expected is None else expected
        result = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if key in along:
            result, expected = result[:, start:stop], expected[:, start:stop]
        else:
            dist.all_reduce(result)
        wrong[f"gradient of {key}"] = _off(result, expected)
    what = max(wrong, key=lambda key: wrong[key])
    assert wrong[what] < EXACT, (
        f"{name} by {strategy} with {mode}, rank {rank}: {what} {wrong[what]}"
    )


def _check_all(rank: int, cases: list[tuple[str, str, str, str]]) -> None:
    for case in cases:
        _check(*case)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_segments_equal_the_full_sequence(ranks: int) -> None:
    """Every method, at lengths that do not divide evenly; one of four ranks has a single token."""
    modes = ("rows", "documents", "padding")
    cases: list[tuple[str, str, str, str]] = []
    for method, names in NAMES.items():
        for index, name in enumerate(names):
            assert rc.parallel.strategy_for(rc.zoo.get(name).recipe).name == method
            cases.append((name, method, modes[(index + ranks // 2) % 3], "reference"))
        for mode in modes:
            cases += [
                (names[0], one, mode, "reference") for one in dict.fromkeys((method, "sequential"))
            ]
    on_ranks(ranks, _check_all, cases)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_presets(ranks: int) -> None:
    """Every preset by its method and handed over, in rows and documents."""
    cases: list[tuple[str, str, str, str]] = []
    for name in rc.zoo.names():
        if name == "memora_per_token":  # loses 1e-9 to rounding, with and without ranks
            continue
        strategy = rc.parallel.strategy_for(rc.zoo.get(name).recipe).name
        for one in dict.fromkeys((strategy, "sequential")):
            cases += [(name, one, mode, "auto") for mode in ("rows", "documents")]
    on_ranks(ranks, _check_all, cases)


def _continue(rank: int) -> None:
    """A sequence continues from a state that all ranks have."""
    for name in ("gated_delta_net", "softmax_attention", "titans", "sliding_window_attention"):
        recipe = rc.zoo.get(name).recipe
        x = _inputs(recipe, "rows")[0]
        first, rest = x.slice_tokens(0, 4), x.slice_tokens(4, T)
        named: dict[str, Any] = {"params": x.params}
        y, expected_state = rc.recall(
            recipe, x.q, x.k, x.v, x.gates, initial_memory=x.init, **named
        )
        _, previous_state = rc.recall(
            recipe, first.q, first.k, first.v, first.gates, initial_memory=x.init, **named
        )
        own_inputs = rest.slice_tokens(2 * rank, 2 if rank == 0 else T)
        outputs, later = rc.parallel.recall(
            recipe,
            own_inputs.q,
            own_inputs.k,
            own_inputs.v,
            own_inputs.gates,
            state=previous_state,
            **named,
        )
        span = slice(4 + 2 * rank, 6 if rank == 0 else T)
        assert expected_state is not None and later is not None
        assert _off(outputs, y[:, span]) < EXACT
        assert later.host_position == expected_state.host_position == T
        for a, b in zip(later.weights, expected_state.weights, strict=True):
            assert _off(a, b) < EXACT


def test_sequence_continues_from_a_state() -> None:
    on_ranks(2, _continue)


def _in_turn(rank: int) -> None:
    """The second rank starts before the first one ends if, and only if, there are pieces."""
    recipe, x = rc.Recipe(), torch.zeros(2, 2, 2, 2)
    run = memorise.memorise
    store = dist.distributed_c10d._get_default_store()
    wait = datetime.timedelta(seconds=30)
    started: list[int] = []
    met: list[bool] = []

    def watched(call: Problem) -> Any:
        started.append(call.k.shape[0] * call.k.shape[2])
        if rank == 1:
            store.set(f"begun {pieces}", "")
        elif len(started) == pieces == 4:  # the last piece waits until the other rank has started
            store.wait([f"begun {pieces}"], wait)
        result = run(call)
        if rank == 0:
            met.append(store.check([f"begun {pieces}"]))
        return result

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(memorise, "memorise", watched)
        for pieces in (4, 1):
            started.clear()
            met.clear()
            rc.parallel.recall(
                recipe, x, x, x, {"lr": x[..., 0]}, strategy="sequential", microbatches=pieces
            )
            assert started == [4 // pieces] * pieces
            if rank == 0:
                assert not met[0]
                assert met[-1] == (pieces == 4)


def test_pieces_follow_each_other() -> None:
    on_ranks(2, _in_turn)


# -- which way ------------------------------------------------------------------------------------


def test_methods_follow_from_structure() -> None:
    L2, dot = rc.bias.L2(), rc.bias.DotProduct()
    decay = rc.retention.Decay
    expected = {
        "keys": rc.Recipe(bias=L2, retention=decay()),
        "decays": rc.Recipe(bias=dot, retention=decay(per="key")),
        "entries": rc.Recipe(bias=dot, retention=decay(per="entry")),
    }
    for transition, recipe in expected.items():
        assert rc.parallel.strategy_for(recipe).transition == transition
    per_value = rc.algorithm.GradientDescent(per="value")
    folded = rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe()), algorithm=per_value)
    assert rc.parallel.strategy_for(folded).transition == "keys"
    momentum = rc.Recipe(bias=dot, algorithm=rc.algorithm.Momentum(per="value"))
    assert rc.parallel.strategy_for(momentum).transition == "keys"
    for recipe in (
        rc.Recipe(bias=L2, retention=decay(per="value")),
        rc.Recipe(bias=L2, algorithm=per_value),
        momentum.replace(retention=decay(per="value")),
        momentum.replace(context=rc.context.Window(size=2)),
    ):
        assert rc.parallel.strategy_for(recipe).name == "sequential"
        assert "value channel" in rc.parallel.strategy_for(recipe).reason
    with pytest.raises(
        rc.RecipeError, match=r"strategy='affine' cannot run .* use strategy='auto'"
    ):
        rc.parallel.strategy_for(rc.zoo.get("titans").recipe, "affine")
    with pytest.raises(ValueError, match=r"strategy must be auto, affine, gather or sequential"):
        rc.parallel.strategy_for(rc.Recipe(), "ring")
    assert str(rc.parallel.strategy_for(rc.Recipe())) == rc.explain(rc.Recipe()).sequence_parallel


def test_pieces_cover_rows_and_heads_once() -> None:
    recipe = rc.Recipe()
    k = torch.zeros(3, 5, 4, 2)
    call = Problem(bound=bind(recipe, H=4, K=2, V=2), q=k, k=k, v=k, gates={}, params={})
    for count, expected in ((1, 1), (2, 2), (3, 3), (5, 3), (6, 6), (100, 12)):
        met = torch.zeros(3, 4)
        plan = [piece for row in pieces_for(call, count) for piece in row]
        for piece in plan:
            met[piece.rows, slice(None) if piece.heads is None else piece.heads] += 1
        assert len(plan) == expected
        assert bool((met == 1).all())


def test_documents_are_cut_at_the_borders_of_ranks() -> None:
    borders, tokens = torch.tensor([0, 5, 10, 18, 20]), (10, 3, 7)
    pieces = [local_pieces(borders, tokens, rank) for rank in range(3)]
    # The second document ends with the first rank, which hands on an empty third one.
    assert pieces[0][0].tolist() == [0, 5, 10, 10] and pieces[0][1] == [0, 1, 2]
    assert pieces[1][0].tolist() == [0, 3] and pieces[1][1] == [2]
    assert pieces[2][0].tolist() == [0, 5, 7] and pieces[2][1] == [2, 3]


# -- errors ---------------------------------------------------------------------------------------


def test_without_processes_there_is_one_sentence() -> None:
    x = torch.zeros(1, 2, 1, 2)
    with pytest.raises(ValueError, match="start the processes with torchrun"):
        rc.parallel.recall(rc.Recipe(), x, x, x, {"lr": x[..., 0]})
    with pytest.raises(ValueError, match="causal=False reads associations of later tokens"):
        rc.parallel.recall(rc.Recipe(), x, x, x, {"lr": x[..., 0]}, causal=False)


def _disagree(rank: int) -> None:
    """Differences between ranks are reported on all of them, and no rank waits."""
    recipe, x = rc.Recipe(), torch.zeros(1, 4, 2, 2)

    def run(x: Tensor = x, recipe: rc.Recipe = recipe, **how: Any) -> None:
        gates = {gate.name: x[..., 0] for gate in recipe.gates()}
        rc.parallel.recall(recipe, x, x, x, gates, **how)

    with pytest.raises(ValueError, match="rank 1 disagrees with rank 0 on rows"):
        run(x.expand(1 + rank, 4, 2, 2))
    other = rc.Recipe(retention=rc.retention.Decay())
    with pytest.raises(ValueError, match=r"disagrees with rank 0 on the recipe"):
        run(recipe=other if rank else recipe)
    with pytest.raises(ValueError, match="disagrees with rank 0 on the strategy"):
        run(strategy="sequential" if rank else "auto")
    with pytest.raises(ValueError, match="rank 1 has no token"):
        run(x[:, : 4 - 4 * rank])
    with pytest.raises(ValueError, match="must run from 0 to the 8 tokens of all ranks"):
        run(cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="at least one token"):
        run(cu_seqlens=torch.tensor([0, 4, 4, 8]))
    with pytest.raises(ValueError, match="microbatches must be a whole number"):
        run(microbatches=0)


def test_differences_between_ranks_are_reported() -> None:
    on_ranks(2, _disagree)


def _wait_for_missing_rank(rank: int) -> None:
    """A rank that waits for a missing one ends with an error of the group's time limit."""
    if rank == 0:
        x = torch.zeros(1, 4, 2, 2)
        with pytest.raises(RuntimeError):
            rc.parallel.recall(rc.Recipe(), x, x, x, {"lr": x[..., 0]})


@pytest.mark.slow
def test_waiting_has_a_time_limit() -> None:
    on_ranks(2, _wait_for_missing_rank, seconds=4, meet=False)


def test_destroyed_process_groups_are_released() -> None:
    for _ in range(3):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rank_group(None)
        dist.destroy_process_group()
    gc.collect()
    assert not link._links
