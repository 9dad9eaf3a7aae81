"""The training loss in chunks of tokens, against logits of all tokens and autograd."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers")

import recollect as rc
from recollect.lm.memory_estimate.live_memory import LiveMemory
from recollect.lm.model.loss import IGNORE_INDEX, next_token_loss, next_token_targets

B, T, D, W = 2, 7, 5, 11


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
    head = nn.Linear(D, W, bias=False, dtype=dtype)
    targets = torch.randint(W, (B, T))
    targets[0, 2] = targets[1, -1] = IGNORE_INDEX
    return x, head, targets


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all targets except −100, token by token."""
    losses = [
        torch.logsumexp(weight @ x[b, t], 0) - weight[targets[b, t]] @ x[b, t]
        for b in range(B)
        for t in range(T)
        if targets[b, t] != IGNORE_INDEX
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 100])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_chunks_change_nothing(chunk: int, dtype: torch.dtype, close: float) -> None:
    x, head, targets = random_inputs(dtype)
    expected = plain(x, head.weight, targets)
    of_x, of_weight = torch.autograd.grad(expected, (x, head.weight))
    loss = next_token_loss(x, head, targets, chunk_size=chunk)
    loss.backward()
    assert loss.dtype == dtype and head.weight.grad is not None and x.grad is not None
    torch.testing.assert_close(loss, expected, atol=close, rtol=close)
    torch.testing.assert_close(x.grad, of_x, atol=close, rtol=close)
    torch.testing.assert_close(head.weight.grad, of_weight, atol=close, rtol=close)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
def test_positions_without_a_target_have_no_effect(value: float) -> None:
    """A non-finite hidden state at such a position changes neither the loss nor gradients."""
    x, head, targets = random_inputs()
    x = x.detach()
    x[0, 2] = value
    finite = x.clone()
    finite[0, 2] = 0.0
    results = []
    for states in (x, finite):
        states.requires_grad_()
        loss = next_token_loss(states, head, targets, chunk_size=4)
        results.append((loss, *torch.autograd.grad(loss, [states, head.weight])))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_without_gradients_and_with_one_of_them() -> None:
    x, head, targets = random_inputs()
    expected = plain(x, head.weight, targets)
    with torch.no_grad():
        loss = next_token_loss(x, head, targets, chunk_size=3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    (of_weight,) = torch.autograd.grad(expected, head.weight, retain_graph=True)
    (grad,) = torch.autograd.grad(
        next_token_loss(x.detach(), head, targets, chunk_size=3), head.weight
    )
    torch.testing.assert_close(grad, of_weight)
    (of_x,) = torch.autograd.grad(expected, x)
    head.weight.requires_grad_(False)
    (grad,) = torch.autograd.grad(next_token_loss(x, head, targets, chunk_size=3), x)
    torch.testing.assert_close(grad, of_x)


def test_second_derivatives_and_repeated_gradients() -> None:
    x, head, targets = random_inputs()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        other = nn.Linear(D, W, bias=False, dtype=torch.float64)
        del other.weight
        other.weight = weight  # type: ignore[assignment]
        return next_token_loss(x, other, targets, chunk_size=4)

    total = next_token_loss(x, head, targets, chunk_size=4)
    first = torch.autograd.grad(total, (x, head.weight), retain_graph=True)
    twice = torch.autograd.grad(total, (x, head.weight))
    torch.testing.assert_close(first, twice)
    total = next_token_loss(x, head, targets, chunk_size=4)
    (of_x,) = torch.autograd.grad(total, x, create_graph=True)
    (result,) = torch.autograd.grad(of_x.square().sum(), head.weight)
    (of_x,) = torch.autograd.grad(plain(x, head.weight, targets), x, create_graph=True)
    (expected,) = torch.autograd.grad(of_x.square().sum(), head.weight)
    torch.testing.assert_close(result, expected)


def test_a_head_with_an_adapter_is_called() -> None:
    x, head, targets = random_inputs()
    expected = plain(x, 2 * head.weight, targets)
    grads = torch.autograd.grad(expected, (x, head.weight))
    recorded: list[int] = []

    def doubled(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        recorded.append(len(output))
        return 2 * output

    head.register_forward_hook(doubled)
    loss = next_token_loss(x, head, targets, chunk_size=4)
    torch.testing.assert_close(loss, expected)
    assert recorded == [4, 4, 4, 2]
    torch.testing.assert_close(torch.autograd.grad(loss, (x, head.weight)), grads)
    biased = nn.Linear(D, W, dtype=torch.float64)
    loss = next_token_loss(x, biased, targets, chunk_size=4)
    full = functional.cross_entropy(biased(x).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, full)


def test_targets_outside_of_the_vocabulary_are_refused() -> None:
    x, head, targets = random_inputs()
    targets[0, 0] = W
    with pytest.raises(IndexError, match="out of bounds"):
        next_token_loss(x, head, targets, chunk_size=3)


@pytest.mark.parametrize("tied", [False, True])
def test_model_computes_its_training_loss_in_chunks(tied: bool) -> None:
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        "gated_delta_net",
        vocab_size=W,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        loss_chunk_size=3,
    )
    model = rc.lm.RecollectForCausalLM(config).train()
    ids = torch.randint(W, (B, T))
    labels = ids.clone()
    labels[0, 3] = IGNORE_INDEX
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    arguments = {"attention_mask": mask, "labels": labels, "num_items_in_batch": torch.tensor(9)}
    out = model(ids, **arguments)
    assert out.logits is None
    out.loss.backward()
    result = {name: cast(Tensor, p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    full = model(ids, **arguments, output_logits=True)
    assert full.logits.shape == (B, T, W)
    logits, requested = full.logits[:, :-1], labels[:, 1:].clone()
    requested[1, :2] = IGNORE_INDEX  # no token precedes the first real one
    expected = (
        functional.cross_entropy(logits.flatten(0, 1), requested.flatten(), reduction="sum") / 9
    )
    torch.testing.assert_close(out.loss, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(full.loss, expected, atol=1e-6, rtol=1e-6)
    expected.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(result[name], p.grad, atol=1e-6, rtol=1e-5, msg=name)
    moved = next_token_targets(labels, mask)
    torch.testing.assert_close(
        model(ids, attention_mask=mask, shift_labels=moved, num_items_in_batch=9).loss, expected
    )
    assert model.eval()(ids, labels=ids).logits is not None
    with pytest.raises(ValueError, match="exclude each other"):
        model(ids, labels=ids, shift_labels=ids)
    with pytest.raises(ValueError, match=r"shift_labels must have shape \[2, 7\]"):
        model(ids, shift_labels=ids[:, 1:])


def test_bfloat16_differs_by_rounding() -> None:
    x, head, targets = random_inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = next_token_loss(x, head, targets, chunk_size=4)
        loss.backward()
        result, head.weight.grad = head.weight.grad, None
        logits = head(x)
        assert logits.dtype == torch.bfloat16
        full = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    full.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, full, atol=1e-6, rtol=1e-6)  # equal logits
    # Gradients of logits are rounded to 8 bits before, or after, the division by the tokens.
    torch.testing.assert_close(result, head.weight.grad, atol=2e-3, rtol=2e-2)


def test_logits_of_all_tokens_are_never_built() -> None:
    N, C, W = 512, 32, 4096
    x, head = torch.randn(1, N, 16, requires_grad=True), nn.Linear(16, W, bias=False)
    targets = torch.randint(W, (1, N))
    peaks: list[int] = []
    for chunk in (0, C):
        with LiveMemory(head.parameters()) as memory:
            next_token_loss(x, head, targets, chunk_size=chunk).backward()
        peaks.append(memory.peak)
    assert peaks[0] > 4 * N * W
    assert peaks[1] < 4 * 5 * W * (16 + C)


def test_meta_tensors() -> None:
    x, head, targets = random_inputs()
    meta = x.detach().to("meta").requires_grad_()
    loss = next_token_loss(meta, head.to("meta"), targets.to("meta"), chunk_size=3)
    loss.backward()
    assert meta.grad is not None and meta.grad.shape == x.shape


@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_invalid_chunk_size_is_refused(size: object) -> None:
    with pytest.raises(rc.RecipeError, match="loss_chunk_size"):
        rc.lm.RecollectConfig.from_recipes("gated_delta_net", loss_chunk_size=size)
