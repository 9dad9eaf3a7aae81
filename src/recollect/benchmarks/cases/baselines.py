"""Cases that recipes are compared with: softmax attention of torch, loops and dense solves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from recollect.benchmarks.cases.recall import Shape, forward_backward, initial_arguments
from recollect.benchmarks.results import Case
from recollect.blocks.cost import cost
from recollect.engines.common.problem import Problem
from recollect.engines.kernel import local_regression
from recollect.functional.binding import bind
from recollect.recipe.recipe import Recipe
from recollect.state.state import initial_state
from recollect.zoo.preset import get

__all__ = [
    "delta_former_loop",
    "local_case",
    "sdpa_case",
    "sdpa_inputs",
    "sherman_morrison_loop",
]


def sdpa_inputs(shape: Shape) -> list[Tensor]:
    """Return q, k and v as contiguous tensors ``[B, H, T, D]``, the fastest layout."""
    arguments = initial_arguments(Recipe(), shape)
    return [arguments[name].transpose(1, 2).contiguous() for name in "qkv"]


def sdpa_case(shape: Shape, *, name: str = "sdpa", backward: bool = False) -> Case:
    """Return a case of the causal `scaled_dot_product_attention`."""

    def make() -> Callable[[], object]:
        q, k, v = (x.requires_grad_(backward) for x in sdpa_inputs(shape))

        def forward() -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        return forward_backward(forward, [q, k, v]) if backward else forward

    B, T, H, K, V = shape.sizes.values()
    # Two products over the lower triangle; the backward pass has five.
    flops = (3.5 if backward else 1.0) * B * H * T * T * (K + V)
    num_bytes = None if backward else float(B * H * T * 2 * (K + V) * shape.dtype.itemsize)
    return Case(name=name, make=make, flops=flops, bytes=num_bytes)


def local_case(shape: Shape, *, solver: str, name: str) -> Case:
    """Return a case of local linear attention by one of its solvers, ``"cg"`` or ``"dense"``."""
    recipe = get("local_linear_attention").recipe
    B, _, H, K, V = shape.sizes.values()

    def make() -> Callable[[], object]:
        arguments = initial_arguments(recipe, shape)
        bound = bind(recipe, H=H, K=K, V=V)
        state = initial_state(bound, B=B, dtype=shape.dtype, device=torch.device(shape.device))
        problem = Problem(
            bound=bound,
            q=(K**0.5 * arguments["q"]).unsqueeze(3),
            k=K**0.5 * arguments["k"],
            v=arguments["v"],
            rates={},
            params={},
            state=state,
        )
        return lambda: local_regression.attend(problem, solver=solver)

    return Case(name=name, make=make, flops=float(cost(recipe, **shape.sizes).total))


def delta_former_loop(shape: Shape, *, name: str) -> Case:
    """Return a case of DeltaFormer by a loop over tokens.

    Each token takes two softmaxes over the past and two sums (AM 94-95).
    """
    recipe = get("delta_former").recipe

    def make() -> Callable[[], object]:
        arguments = initial_arguments(recipe, shape)
        gates = arguments["gates"]
        q, k, v, w = (
            x.transpose(1, 2) for x in (*(arguments[name] for name in "qkv"), gates["probe"])
        )
        alpha, beta = (gates[gate].transpose(1, 2).unsqueeze(-1) for gate in ("lr", "erase"))
        scale = shape.K**-0.5

        def forward() -> Tensor:
            u, y = torch.zeros_like(v), torch.zeros_like(v)
            for t in range(shape.T):
                u[:, :, t] = alpha[:, :, t] * v[:, :, t]
                if t:
                    erase_logits = (k[:, :, :t] @ w[:, :, t, :, None]) * scale
                    removed = (erase_logits.softmax(-2) * u[:, :, :t]).sum(-2)
                    u[:, :, t] -= beta[:, :, t] * removed
                read_logits = (k[:, :, : t + 1] @ q[:, :, t, :, None]) * scale
                y[:, :, t] = (read_logits.softmax(-2) * u[:, :, : t + 1]).sum(-2)
            return y.transpose(1, 2)

        return forward

    return Case(name=name, make=make, flops=float(cost(recipe, **shape.sizes).total))


def sherman_morrison_loop(shape: Shape, *, name: str) -> Case:
    """Return a case of exact least squares by a Sherman–Morrison update per token."""
    B, T, H, K, V = shape.sizes.values()

    def make() -> Callable[[], object]:
        q, k, v = (x.unsqueeze(-1) for x in sdpa_inputs(shape))  # [B, H, T, D, 1]

        def forward() -> Tensor:
            P = torch.eye(K, device=shape.device).expand(B, H, K, K).contiguous()
            W = torch.zeros(B, H, V, K, device=shape.device)
            outputs: list[Tensor] = []
            for t in range(T):
                key = k[:, :, t]
                solved = P @ key
                gain = (solved / (1 + key.mT @ solved)).mT
                P = P - solved @ gain
                W = W + (v[:, :, t] - W @ key) @ gain
                outputs.append(W @ q[:, :, t])
            return torch.stack(outputs, dim=1).squeeze(-1)  # [B, T, H, V]

        return forward

    return Case(name=name, make=make, flops=float(B * H * T * (4 * K * K + 6 * K * V)))
