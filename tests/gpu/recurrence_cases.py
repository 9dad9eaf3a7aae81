"""Calls of deep memories of two maps by the kernels of their recurrence, and incorrect kernels.

The definition (`expected_of`) takes its inner gradients by autograd, token by token, in float64 on
the CPU, and shares no code with the kernels. They run in Triton's interpreter
(`tests.gpu.recurrence`) or on a GPU (`tests.gpu.test_recurrence`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.gpu.passes import distance, host
from torch import Tensor

import recollect as rc

Send = Callable[[Tensor], Tensor]


@rc.member
class TwiceLessThrice(rc.bias.Bias):
    """A user's bias that declares the affine error 2 p − 3 v."""

    affine = (2.0, 3.0)

    def error(self, prediction: Tensor, value: Tensor, gates: Any) -> Tensor:
        return 2.0 * prediction - 3.0 * value


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        recipe: recipe of the call.
        K: channels.
        T: tokens.
        B: sequences.
        padded: whether the first sequence ends seven tokens early.
        dtype: type of all tensors.
        runs_kernels: whether the kernels run the call.
        twice: whether gradients are differentiated once more.
        zeros: whether the first tokens' keys, and the next tokens' errors, are 0.
        engine: of `recollect.recall`.
        chunk: tokens of a group.
    """

    recipe: rc.Recipe
    K: int = 16
    T: int = 40
    B: int = 1
    padded: bool = False
    dtype: torch.dtype = torch.float64
    runs_kernels: bool = True
    twice: bool = False
    zeros: bool = False
    engine: str = "deep"
    chunk: int | None = None


def recipe(*, momentum: bool = True, share: bool = True, b: int = 16, **more: Any) -> rc.Recipe:
    """Return the recipe of `titans` without a norm, or a variant of it."""
    kind = rc.algorithm.Momentum if momentum else rc.algorithm.GradientDescent
    memory = rc.memory.MLP(**more.pop("memory", {}))
    choices = {"retention": rc.retention.Decay(), **more}
    return rc.Recipe(memory=memory, algorithm=kind(batch_size=b, normalized_steps=share), **choices)


NORM = {"norm": "layer"}
TITANS = recipe(memory=NORM)
CASES = {
    "titans": Case(TITANS),
    "titans in float32": Case(TITANS, dtype=torch.float32),
    "rows that end early": Case(TITANS, B=2, padded=True),
    "without momentum": Case(recipe(momentum=False, memory=NORM), B=2, padded=True),
    "plain steps": Case(recipe(share=False, memory=NORM)),
    "without a norm": Case(recipe()),
    "24 channels": Case(TITANS, K=24, T=56, B=2, padded=True),
    "24 channels without a norm": Case(recipe(), K=24),
    "another affine error": Case(recipe(bias=TwiceLessThrice()), T=24),
    "no decay, no residual": Case(
        recipe(
            momentum=False,
            share=False,
            retention=rc.retention.Keep(),
            memory={"residual": False, "activation": "silu"},
        ),
        T=24,
    ),
    "zeros": Case(TITANS, zeros=True),
    "a window of 17 tokens": Case(
        recipe(memory=NORM, context=rc.context.Window(size=17, gated=False))
    ),
    "several groups": Case(TITANS, T=72, chunk=32),
    "gradients of gradients": Case(TITANS, T=20, twice=True),
    **{
        f"{name} between": Case(recipe(memory={**NORM, "activation": name}), T=24)
        for name in ("gelu_tanh", "tanh", "relu", "identity")
    },
    "one batch": Case(TITANS, T=16, runs_kernels=False),
    "batches of 5 tokens": Case(recipe(b=5, memory=NORM), T=17, runs_kernels=False),
    "8 channels": Case(TITANS, K=8, T=20, runs_kernels=False),
    "a root mean square": Case(recipe(memory={"norm": "rms"}), T=20, runs_kernels=False),
    "three maps": Case(recipe(memory={**NORM, "depth": 3}), T=20, runs_kernels=False),
    "PyTorch operations": Case(TITANS, T=20, engine="torch", runs_kernels=False),
}


def inputs_of(case: Case) -> dict[str, Any]:
    """Return the arguments of `rc.recall` by name, drawn in float64."""
    torch.manual_seed(case.K + case.T)
    B, T, H, K = case.B, case.T, 2, case.K
    q, k, v = torch.randn(3, B, T, H, K, dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    if case.zeros:
        k[:, :3] = 0.0
        v[:, 2:5] = 0.0
        k[:, 4] = 0.0
    each = torch.rand(4, B, T, H, dtype=torch.float64)
    gates = {"lr": 0.1 + 0.3 * each[0], "log_decay": -0.1 * each[1], "momentum": 0.9 * each[2]}
    names = {gate.name for gate in case.recipe.gates()}
    gates = {name: x for name, x in gates.items() if name in names}
    gates |= dict.fromkeys(names - set(gates), 0.5 + each[3])
    shapes = case.recipe.memory.shapes(K, K)
    init = [torch.randn(B, H, *s, dtype=torch.float64) * s[1] ** -0.5 for s in shapes]
    inputs = {"q": q, "k": k, "v": v, **{f"gate {name}": x for name, x in gates.items()}}
    inputs |= {f"init {n}": w for n, w in enumerate(init)}
    for name, x in rc.initial_params(case.recipe, H=H, K=K, V=K).items():
        inputs[f"param {name}"] = x.double() + 0.3 * torch.randn(x.shape, dtype=torch.float64)
    return {name: x.to(case.dtype) for name, x in inputs.items()}


def results_of(
    case: Case, inputs: Mapping[str, Tensor], engine: str, send: Send = lambda x: x
) -> dict[str, Tensor]:
    """Return outputs, states and gradients by name, on the CPU.

    Args:
        case: the call.
        inputs: its arguments, on the CPU.
        engine: of `recollect.recall`.
        send: copies a tensor to the device of the call.
    """
    leaves = {name: send(x).requires_grad_() for name, x in inputs.items()}
    padding: dict[str, Any] = {}
    if case.padded:
        mask = torch.ones(case.B, case.T, dtype=torch.bool)
        mask[0, case.T - 7 :] = False
        padding["attention_mask"] = send(mask)
    y, state = rc.recall(
        case.recipe,
        *(leaves[name] for name in ("q", "k", "v")),
        {name[5:]: x for name, x in leaves.items() if name.startswith("gate ")},
        params={name[6:]: x for name, x in leaves.items() if name.startswith("param ")},
        initial_memory=[x for name, x in leaves.items() if name.startswith("init ")],
        engine=engine,
        chunk_size=case.chunk,
        **padding,
    )
    assert state is not None
    results = {"y": y, **{f"state {n}": x for n, x in enumerate(state.weights)}}
    results |= {
        f"{name} {n}": x for name, xs in state.algorithm_state.items() for n, x in enumerate(xs)
    }

    def wave(x: Tensor, seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return send(torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype))

    tensors = [*leaves.values()]
    total = torch.stack([(x * wave(x, n)).sum() for n, x in enumerate(results.values())]).sum()
    gradients = torch.autograd.grad(total, tensors, create_graph=case.twice)
    results |= {f"d {name}": g for name, g in zip(leaves, gradients, strict=True)}
    if case.twice:
        total = torch.stack([(g * wave(g, 80)).sum() for g in gradients]).sum()
        second = torch.autograd.grad(total, tensors, allow_unused=True)
        pairs = zip(leaves, second, strict=True)
        results |= {f"dd {name}": g for name, g in pairs if g is not None}
    return {name: host(x) for name, x in results.items()}


def expected_of(case: Case) -> dict[str, Tensor]:
    """Return the results of the definition."""
    return results_of(case, {name: x.double() for name, x in inputs_of(case).items()}, "reference")


def errors_of(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the distances by name."""
    assert results.keys() == expected.keys()
    return {name: distance(results[name], x) for name, x in expected.items()}


def bound(case: Case, part: str) -> float:
    """Return the largest distance of a result, which rounding in another order explains."""
    if case.dtype == torch.float64:
        return 1e-9
    return 1e-3 if part.startswith("d") else 1e-5


MUTANTS = (
    ("step_scale = tl.maximum(above, 0.0) / below", "step_scale = above / above"),
    ("next1 += m * one", "next1 += one"),
    ("up_k += d1_sq * twice * key", "up_k += 0.0"),
    ("of_g += to_N * distance + to_size * g", "of_g += to_size * g"),
    ("second_derivative * tl.load(u1 + wide + t + rw) * up_d", "second_derivative * up_d"),
    ("next2 = _dot(up_zt, h, next2, PRECISION)", "next2 = next2 + 0.0"),
)
"""Code of `kernels`, and incorrect code in its place."""
