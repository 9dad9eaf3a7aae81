"""Layers and language models along several ranks against one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.ranks import on_ranks
from torch import Tensor, nn

import recollect as rc
from recollect.parallel.segment import local_pieces

pytest.importorskip("transformers")

from tests.lm.families import enable_checkpointing

T, WIDTH = 13, 16
CUTS = {2: (0, 5, 13), 4: (0, 4, 5, 10, 13)}
BORDERS = (0, 3, 5, 9, 13)
EXACT = 1e-10


def _tensors(state: Any) -> list[Tensor]:
    """Return the tensors of a state without its cache."""
    flat = state.to_dict()
    return [flat[name] for name in sorted(flat) if flat[name].is_floating_point()]


def _size(state: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for x in _tensors(state):
        if x.requires_grad:
            total = total + 0.5 * x.square().sum()
    return total


def _check_layer(name: str, mode: str, strategy: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cuts = CUTS[ranks]
    span = slice(cuts[rank], cuts[rank + 1])
    torch.manual_seed(0)
    layer = rc.blocks.build(name, d_model=WIDTH, num_heads=2).double()
    x = torch.randn(1 if mode == "documents" else 2, T, WIDTH, dtype=torch.float64)
    full: dict[str, Any] = {}
    local: dict[str, Any] = {}
    if mode == "documents":
        tokens = tuple(b - a for a, b in pairwise(cuts))
        full["cu_seqlens"] = torch.tensor(BORDERS)
        local["cu_seqlens"] = local_pieces(full["cu_seqlens"], tokens, rank)[0]
    if mode == "padding":
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :3] = mask[1, 10:] = 0
        full["attention_mask"], local["attention_mask"] = mask, mask[:, span]
    if mode == "state":
        initial = layer(torch.randn(2, 3, WIDTH, dtype=torch.float64))[1]
        full["state"] = local["state"] = initial.detach()
    states = mode != "documents"
    inputs = x.clone().requires_grad_()
    y, later = layer(inputs, **full)
    weights = torch.randn_like(y)
    loss = (y * weights).sum()
    (loss + _size(later) if states else loss).backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in _named(layer)}
    layer.zero_grad()
    piece = x[:, span].clone().requires_grad_()
    with rc.parallel.context(layer, strategy=strategy) as along:
        outputs, final = layer(piece, **local, output_final_state=states)
        loss = (outputs * weights[:, span]).sum()
        (loss + (rank == 0) * _size(final) if states else loss).backward()
        along.reduce_gradients()
    wrong = {"y": _off(outputs, y[:, span])}
    assert piece.grad is not None and inputs.grad is not None
    wrong["gradient of x"] = _off(piece.grad, inputs.grad[:, span])
    for n, p in _named(layer):
        assert p.grad is not None
        wrong[f"gradient of {n}"] = _off(p.grad, expected[n])
    if states:
        pairs = zip(_tensors(final), _tensors(later), strict=True)
        wrong |= {f"state {i}": _off(a, b, grows=True) for i, (a, b) in enumerate(pairs)}
        assert torch.equal(final.position, later.position)
    what = max(wrong, key=lambda key: wrong[key])
    assert wrong[what] < EXACT, f"{name}, {mode}, {strategy}, rank {rank}: {what} {wrong[what]}"


def _named(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in layer.named_parameters() if p.numel()]


def _off(actual: Tensor, expected: Tensor, *, grows: bool = False) -> float:
    if grows and actual.shape[1:2] != expected.shape[1:2]:  # empty slots on the left
        n = max(actual.shape[1], expected.shape[1])
        actual, expected = (
            torch.cat([x.new_zeros(x.shape[0], n - x.shape[1], *x.shape[2:]), x], 1)
            for x in (actual, expected)
        )
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0


def _check_layers(rank: int, cases: list[tuple[str, str, str]]) -> None:
    for case in cases:
        _check_layer(*case)


MODES = ("rows", "documents", "padding", "state")
LAYERS = (
    "gated_delta_net",  # a short convolution
    "rwkv6",  # a token shift of the input
    "rwkv7",  # a learned one
    "gateloop",  # an angle of the input
    "lru",  # a learned one
    "preconditioned_gated_delta_net",  # a recurrence of keys
    "mamba3",  # an angle that follows a gate
    "gated_delta_net_2",  # a probe, and a rate per value channel
    "sliding_window_attention",  # a window and rotary positions
    "softmax_attention",
    "titans",
    "ffn_relu",  # without a memory
    "titans_mag",  # parts that are summed
    "titans_mac",  # handed over in full
    "residual_delta_net",
    "gated_slot_attention",
    "memory_caching",
)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_are_exact(ranks: int) -> None:
    """Convolutions, shifts, angles, positions and compositions, with documents across ranks."""
    cases: list[tuple[str, str, str]] = []
    for index, name in enumerate(LAYERS):
        for more in range(2 if ranks == 2 else 1):
            mode = MODES[(index + 2 * more + ranks // 2) % 4]
            cases.append((name, mode, "auto"))
    if ranks == 2:
        cases += [
            ("gated_delta_net", mode, strategy)
            for mode in MODES
            for strategy in ("auto", "sequential")
        ]
    on_ranks(ranks, _check_layers, cases)


# -- training -------------------------------------------------------------------------------------

MODELS = (
    "gated_delta_net",
    "mamba2",
    "titans",
    "atlas",
    "rls",
    "softmax_attention",
    "delta_former",
    "samba",
)


def _model(name: str) -> Any:
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        name, vocab_size=32, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2
    )
    return rc.lm.RecollectForCausalLM(config).train()


def _train(model: Any, along: Any, batches: list[dict[str, Tensor]]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for batch in batches:
        ids = batch["input_ids"] if along is None else along.split(batch["input_ids"])
        loss = model(**{**batch, "input_ids": ids, "labels": ids}).loss
        optimizer.zero_grad()
        loss.backward()
        if along is not None:
            along.reduce_gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _check_training(rank: int, cases: list[tuple[str, str, bool]]) -> None:
    """Five AdamW steps in float32."""
    for name, method, documents in cases:
        g = torch.Generator().manual_seed(1)
        shape = (1, 57) if documents else (2, 27)
        batches = [{"input_ids": torch.randint(0, 32, shape, generator=g)} for _ in range(5)]
        if documents:
            batches = [{**batch, "cu_seqlens": torch.tensor([0, 20, 29, 57])} for batch in batches]
        one, several = _model(name), _model(name)
        expected = _train(one, None, batches)
        if documents:
            enable_checkpointing(several)
        with rc.parallel.context(several, strategy=method) as along:
            result = _train(several, along, batches)
        assert max(abs(a - b) for a, b in zip(result, expected, strict=True)) < 1e-5, (name, method)
        for (key, p), q in zip(one.named_parameters(), several.parameters(), strict=True):
            assert (p - q).abs().max() < 1e-5, (name, method, documents, key)


@pytest.mark.slow
def test_training_along_two_ranks_is_training_on_one() -> None:
    """Every model in all its modes; one of them in documents, with activations recomputed."""
    cases: list[tuple[str, str, bool]] = []
    for index, name in enumerate(MODELS):
        leaf = (
            name != "samba"
            and rc.parallel.strategy_for(rc.zoo.get(name).recipe).name == "sequential"
        )
        strategies = ("auto",) if leaf else ("auto", "sequential")
        cases += [(name, strategy, (index + i) % 2 == 0) for i, strategy in enumerate(strategies)]
    on_ranks(2, _check_training, cases)


class _Wrapper(nn.Module):
    """Forwards calls, and attributes of its module, like adapters."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "base" else getattr(self.base, name)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.base(*args, **named)


def _check_calls() -> None:
    """A call's loss and gradients are equal with and without a wrapper, by position and by name."""
    model = _model("gated_delta_net")
    ids = torch.randint(0, 32, (2, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[1, 8:] = 0
    expected = model(ids, attention_mask=mask, labels=ids).loss
    expected.backward()
    gradient = model.lm_head.weight.grad.clone()
    packed = torch.tensor([0, 4, 11])
    documents = model(ids[:1], cu_seqlens=packed, labels=ids[:1]).loss
    wrappers = (model, _Wrapper(_Wrapper(model)), nn.parallel.DistributedDataParallel(model))
    for outer in wrappers:
        model.zero_grad()
        with rc.parallel.context(outer, gradient_reduction="mean") as along:
            assert ("forward" in vars(model) and "forward" not in vars(outer)) or outer is model
            own_ids, its = along.split(ids), along.split(mask)
            by_place = outer(own_ids, its, None, None, own_ids).loss
            assert abs(by_place - expected) < 1e-5
            loss = outer(own_ids, attention_mask=its, labels=own_ids).loss
            assert abs(loss - expected) < 1e-5
            loss.backward()
            if outer is not wrappers[-1]:  # DDP divides by it
                along.reduce_gradients()
            assert (model.lm_head.weight.grad - gradient).abs().max() < 1e-5
            own_ids = along.split(ids[:1])
            by_place = outer(own_ids, None, None, None, own_ids, None, packed).loss
            assert abs(by_place - documents) < 1e-5
        assert "forward" not in vars(model)
    compiled = _model("gated_delta_net")
    for outer in (torch.compile(model), _Wrapper(compiled)):
        compiled.compile()
        with pytest.raises(ValueError, match=r"give the module before torch\.compile"):
            rc.parallel.context(outer)
    with pytest.raises(ValueError, match="reads the last token"):
        rc.parallel.context(rc.lm.RecollectForSequenceClassification(model.config))


def _check_whole_rows() -> None:
    """The call divides full rows, and all ranks end if the rows differ."""
    net, rank = _model("gated_delta_net"), dist.get_rank()
    ids = torch.randint(0, 32, (2, 11), generator=torch.Generator().manual_seed(2))
    expected = net(ids, labels=ids).loss
    with pytest.raises(ValueError, match="shard_inputs=True is for language models"):
        rc.parallel.context(net.model.blocks[0].layer, shard_inputs=True)
    with rc.parallel.context(net, shard_inputs=True) as ranks:
        assert abs(net(ids, labels=ids).loss - expected) < 1e-5
        later = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        assert abs(net(ids, shift_labels=later).loss - expected) < 1e-5
        logits = net(ids).logits
        assert logits.shape[1] == ranks.split(ids).shape[1]
        other = ids.clone()
        if rank:
            other[0, :2] = other[0, :2].flip(0)  # equal tokens in another order
        assert bool((ids[0, 0] != ids[0, 1]).item())
        for inputs, message in (
            (other, "rank 1 of a sequence has other input_ids than rank 0"),
            (ids[:, : 11 - rank], "other tokens per row than rank 0"),
            (ids[:, :1], "sequences of 1 tokens are too short for 2 ranks"),
        ):
            with pytest.raises(ValueError, match=message):
                net(inputs)
        with pytest.raises(ValueError, match="has other labels than rank 0"):
            net(ids, **({"labels": ids} if rank else {}))


def _check_use(rank: int) -> None:
    """Prefill along ranks, mean gradients, errors, and the unchanged model."""
    _check_calls()
    _check_whole_rows()
    model = _model("gated_delta_net").eval()
    ids = torch.randint(0, 32, (2, 11), generator=torch.Generator().manual_seed(2))
    full = model(ids, use_cache=True)
    with rc.parallel.context(model) as along, torch.no_grad():
        part = model(along.split(ids), use_cache=True)
    assert (part.logits - along.split(full.logits)).abs().max() < 1e-5
    cache = rc.lm.cache_of(part)
    assert [state.position.tolist() for state in cache.states] == [[11, 11]] * 2
    logits = model(ids[:, :1], cache=rc.lm.cache_of(full)).logits
    cache.past_length = 11
    assert (model(ids[:, :1], cache=cache).logits - logits).abs().max() < 1e-5
    for gradients, factor in (("sum", 1.0), ("mean", 2.0)):
        model.zero_grad()
        with rc.parallel.context(model, gradient_reduction=gradients) as along:
            own_ids = along.split(ids)
            model(own_ids, labels=own_ids).loss.backward()
        total = model.lm_head.weight.grad.clone()
        dist.all_reduce(total)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert (total / factor - model.lm_head.weight.grad).abs().max() < 1e-5
    with rc.parallel.context(model) as along:
        with pytest.raises(ValueError, match="end the other context first"):
            rc.parallel.context(model)
        with pytest.raises(ValueError, match="must be packed in one sequence, not 2"):
            model(along.split(ids), cu_seqlens=torch.tensor([0, 11, 22]))
        with pytest.raises(ValueError, match="position_ids is not supported over several ranks"):
            model(along.split(ids), position_ids=torch.arange(6)[None])
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="no sequence layer of recollect"):
        rc.parallel.context(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="routes tokens to memories"):
        rc.parallel.context(rc.blocks.build("mixture_of_memories", d_model=16, num_heads=2))
    with pytest.raises(ValueError, match="strategy must be auto or sequential, not 'affine'"):
        rc.parallel.context(model, strategy="affine")
    with pytest.raises(ValueError, match="gradient_reduction must be sum or mean"):
        rc.parallel.context(model, gradient_reduction="none")


@pytest.mark.slow
def test_a_model_is_used_along_two_ranks() -> None:
    on_ranks(2, _check_use)
