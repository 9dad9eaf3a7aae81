"""Cases of deep memories: one MLP memory against the device's ceiling, and against titans-pytorch.

The peer runs at two settings: ``chunk_size=1, batch_size=b``, every token with gates of its own, as
the paper has it and as we compute it; and ``chunk_size=b, batch_size=b``, one set of gates for b
tokens, which is what people run. Both sides do the same work outside the memory: our case calls the
peer's own projections and gates, and starts from its weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recollect.benchmarks.results import Case
from recollect.benchmarks.suites.calls import stepper
from recollect.blocks.cost import cost
from recollect.choices.algorithm.descent import Momentum
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe

__all__ = ["memory_case", "own_case", "titans_case"]


def _recipe(b: int) -> Recipe:
    return Recipe(memory=MLP(residual=False), retention=Decay(), algorithm=Momentum(batch_size=b))


def memory_case(
    label: str,
    b: int,
    sizes: tuple[int, int, int, int],
    *,
    device: str = "cpu",
    backward: bool = False,
) -> Case:
    """A two-map MLP of four times the width with momentum, ``sizes`` = (B, T, H, K = V)."""
    recipe, (B, T, H, K) = _recipe(b), sizes

    def make() -> Callable[[], object]:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        q, k = (torch.nn.functional.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
        u = torch.rand(3, B, T, H, generator=generator)
        gates = {"lr": u[0] / b, "log_decay": -1e-3 * u[1], "momentum": u[2]}
        init = [draw(H, *shape) * shape[-1] ** -0.5 for shape in recipe.shapes(K, K)]
        tensors = [q, k, draw(B, T, H, K), *gates.values(), *init]
        leaves = [x.to(device).requires_grad_(backward) for x in tensors]
        named = dict(zip(gates, leaves[3:6], strict=True))

        def forward() -> Tensor:
            q, k, v = leaves[:3]
            return recall(
                recipe, q, k, v, named, initial_memory=leaves[6:], output_final_state=False
            )[0]

        return stepper(forward, leaves) if backward else forward

    price = cost(recipe, B=B, T=T, H=H, K=K, V=K)
    return Case(name=label, make=make, flops=float(price.training if backward else price.total))


def _peer(b: int, chunk: int, K: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from titans_pytorch import NeuralMemory
        except ImportError:
            raise RuntimeError(
                "the suite 'titans' compares with titans-pytorch: pip install titans-pytorch"
            ) from None
    torch.manual_seed(0)
    return NeuralMemory(
        dim=K,
        chunk_size=chunk,
        batch_size=b,
        momentum=True,
        mem_model_norm_add_residual=False,
        qk_rmsnorm=True,
        default_model_kwargs={"depth": 2, "expansion_factor": 4.0},
        # Untrained, it halves its weights at every token: after 256, subnormal numbers.
        init_adaptive_step_bias=-3.0,
        init_decay_bias=-5.0,
    )


def _leaves(module: Any, B: int, T: int, K: int, device: str) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(B, T, K, generator=torch.Generator().manual_seed(1)).to(device)
    return x.requires_grad_(), [x, *module.parameters()]


def titans_case(
    label: str,
    b: int,
    chunk: int,
    sizes: tuple[int, int, int],
    *,
    backward: bool = False,
    device: str = "cpu",
) -> Case:
    """The peer's module, ``sizes`` = (B, T, K)."""
    B, T, K = sizes

    def make() -> Callable[[], object]:
        module = _peer(b, chunk, K).to(device)
        x, leaves = _leaves(module, B, T, K, device)

        def forward() -> Tensor:
            return module(x)[0]

        return stepper(forward, leaves) if backward else torch.no_grad()(forward)

    return Case(name=label, make=make)


def own_case(
    label: str,
    b: int,
    sizes: tuple[int, int, int],
    *,
    backward: bool = False,
    device: str = "cpu",
) -> Case:
    """Our memory between the peer's projections: what its module computes at ``chunk_size=1``."""
    B, T, K = sizes
    recipe = _recipe(b)

    def make() -> Callable[[], object]:
        module = _peer(b, 1, K).to(device)
        x, leaves = _leaves(module, B, T, K, device)

        def forward() -> Tensor:
            stored, asked = module.store_norm(x), module.retrieve_norm(x)
            q = module.q_norm(module.split_heads(module.to_queries(asked))).transpose(1, 2)
            k = module.k_norm(module.split_kv_heads(module.to_keys(stored))).transpose(1, 2)
            v = module.split_kv_heads(module.to_values(stored)).transpose(1, 2)
            # Its loss is a mean over channels of the squared error: η there is η 2/K here.
            gates = {
                "lr": module.to_adaptive_step[0](stored).sigmoid() * 2 / K,
                "log_decay": (1 - module.to_decay_factor[0](stored).sigmoid()).log(),
                "momentum": module.to_momentum[0](stored).sigmoid(),
            }
            init = [w.transpose(-1, -2) for w in module.memory_model_parameters]
            # The peer's module makes its state at every call, and so do we.
            y, _ = recall(recipe, q, k, v, gates, initial_memory=init)
            return module.combine_heads(module.merge_heads(y.transpose(1, 2)))

        return stepper(forward, leaves) if backward else torch.no_grad()(forward)

    return Case(name=label, make=make)
