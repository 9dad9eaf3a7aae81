"""The Titans recipe against titans-pytorch, an implementation that is not ours.

Its ``chunk_size=1, batch_size=b`` gives every token its own gates and takes gradients at the start
of inner batches of b tokens, as here. Its loss is a mean over d channels of the squared error, so
its step of η is ours of η·2/d. Everything in float64.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect as rc

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    titans_pytorch = pytest.importorskip("titans_pytorch")

pytestmark = pytest.mark.filterwarnings("ignore")  # of a third party

DIM, B, T, BATCH = 8, 2, 37, 8
TOL = {"atol": 1e-10, "rtol": 1e-10}


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def network(residual: bool) -> nn.Module:
    mlp = titans_pytorch.MemoryMLP(DIM, depth=2, expansion_factor=4.0)
    return Residual(mlp) if residual else mlp


@rc.memory.module_factory("parity.normed")
def normed(inputs: int, outputs: int) -> nn.Module:
    """Return its default memory, whose norm's scale is part of the memory."""
    return titans_pytorch.memory_models.ResidualNorm(
        dim=outputs, model=titans_pytorch.MemoryMLP(inputs, depth=2, expansion_factor=4.0)
    )


def peer(heads: int, momentum: bool, norm: bool = False, residual: bool = True) -> Any:
    torch.manual_seed(0)
    module = titans_pytorch.NeuralMemory(
        dim=DIM if heads == 1 else 12,
        dim_head=DIM,
        heads=heads,
        chunk_size=1,
        batch_size=BATCH,
        momentum=momentum,
        model=titans_pytorch.MemoryMLP(DIM, depth=2, expansion_factor=4.0)
        if norm
        else network(residual),
        mem_model_norm_add_residual=norm,
        qk_rmsnorm=True,
    ).double()
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():  # gammas start at zero
                parameter.normal_(std=0.1)
        # Its untrained steps make the memory diverge with keys of length √d.
        module.to_adaptive_step[0].bias -= 3.0
    return module


def wired(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return q, k, v and gates of its modules, in our layout ``[B, T, H, ...]``."""
    stored, read = module.store_norm(x), module.retrieve_norm(x)
    q = module.q_norm(module.split_heads(module.to_queries(read))).transpose(1, 2)
    k = module.k_norm(module.split_kv_heads(module.to_keys(stored))).transpose(1, 2)
    v = module.split_kv_heads(module.to_values(stored)).transpose(1, 2)

    def gate(linear: nn.Module) -> Tensor:
        return linear(stored).sigmoid()

    gates = {
        "lr": gate(module.to_adaptive_step[0]) * 2 / DIM,
        "log_decay": (1 - gate(module.to_decay_factor[0])).log(),
    }
    if module.to_momentum is not None:
        gates["momentum"] = gate(module.to_momentum[0])
    return q, k, v, gates


def ours(module: Any, x: Tensor, memory: rc.memory.Memory, method: str) -> Tensor:
    momentum = module.to_momentum is not None
    recipe = rc.zoo.get("titans" if momentum else "titans_minus").recipe
    algorithm = rc.algorithm.Momentum if momentum else rc.algorithm.GradientDescent
    recipe = recipe.replace(memory=memory, algorithm=algorithm(batch_size=BATCH))
    q, k, v, gates = wired(module, x)
    init = list(module.memory_model_parameters)
    if isinstance(memory, rc.memory.MLP):
        init = [w.transpose(-1, -2) for w in init]  # it multiplies from the right
    y, _ = rc.recall(recipe, q, k, v, gates, initial_memory=tuple(init), engine=method)
    y = y.transpose(1, 2)
    if module.retrieve_gate is not None:
        y = y * module.retrieve_gate(module.retrieve_norm(x))
    return module.combine_heads(module.merge_heads(y))


def tokens(heads: int) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, T, DIM if heads == 1 else 12, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_outputs_and_gradients(heads: int, momentum: bool, residual: bool, method: str) -> None:
    module, x = peer(heads, momentum, residual=residual), tokens(heads)
    memory = rc.memory.MLP(residual=residual)
    theirs, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, _ = module(theirs)
    want.square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    actual = ours(module, mine, memory, method)
    torch.testing.assert_close(actual, want, **TOL)
    actual.square().sum().backward()
    assert theirs.grad is not None
    torch.testing.assert_close(mine.grad, theirs.grad, **TOL)
    result = {name: parameter.grad for name, parameter in module.named_parameters()}
    torch.testing.assert_close(result, grads, **TOL)
    moved = (actual - ours_without_writing(module, x, memory)).norm() / actual.norm()
    assert moved > 0.05  # a large part of the reads comes from writes


def ours_without_writing(module: Any, x: Tensor, memory: rc.memory.Memory) -> Tensor:
    with torch.no_grad():
        for linear in (module.to_adaptive_step[0], module.to_decay_factor[0]):
            linear.bias.fill_(-1e3)
    return ours(module, x, memory, "reference")


@pytest.mark.parametrize("momentum", [True, False])
def test_its_network_as_our_module_memory(momentum: bool) -> None:
    """Its complete default memory: residual, layer norm, and the norm's scale."""
    module, x = peer(1, momentum, norm=True), tokens(1)
    want, _ = module(x)
    memory = rc.memory.Module(factory="parity.normed")
    names = [name for name, _ in normed(DIM, DIM).named_parameters()]
    assert names == list(module.memory_model_parameter_names)
    torch.testing.assert_close(ours(module, x, memory, "auto"), want, **TOL)


def test_decoding_from_its_prefill() -> None:
    """Both continue a state in the middle of an inner batch."""
    module, x = peer(1, momentum=True), tokens(1)
    want, state = module(x[:, :13])
    outputs = [want]
    for t in range(13, T):
        y, state = module(x[:, t : t + 1], state=state)
        outputs.append(y)
    result = ours(module, x, rc.memory.MLP(), "auto")
    torch.testing.assert_close(result, torch.cat(outputs, 1), **TOL)
