"""Calls of deep memories whose entrywise stretches are kernels, and what they are held to.

The definition (`told`) takes its inner gradients by autograd, token by token, in float64 on the
CPU, and shares nothing with the kernels. Who runs these is another's business: Triton's interpreter
(`tests.gpu.rows`) or a GPU (`tests.gpu.test_rows`).
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
    """2 p − 3 v: somebody's own bias that says it is affine."""

    affine = (2.0, 3.0)

    def error(self, prediction: Tensor, value: Tensor, gates: Any) -> Tensor:
        return 2.0 * prediction - 3.0 * value


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        recipe: what is solved. K: channels. T: tokens. B: rows. padded: whether the first row ends
            seven tokens early. dtype: of the numbers. taken: whether kernels are.
        again: whether gradients are differentiated once more.
        scale: of values from the second half on. keys: of keys.
        engine: of `recollect.recall`. chunk: tokens of a group.
        zeros: whether the first tokens' keys, and the next ones' errors, are 0.
    """

    recipe: rc.Recipe
    K: int = 16
    T: int = 40
    B: int = 1
    padded: bool = False
    dtype: torch.dtype = torch.float64
    taken: bool = True
    again: bool = False
    scale: float = 1.0
    keys: float = 1.0
    zeros: bool = False
    engine: str = "deep"
    chunk: int | None = None


def recipe(*, momentum: bool = True, share: bool = True, b: int = 16, **more: Any) -> rc.Recipe:
    """Titans', or a recipe like it."""
    kind = rc.algorithm.Momentum if momentum else rc.algorithm.GradientDescent
    memory = rc.memory.MLP(**more.pop("memory", {}))
    choices = {"retention": rc.retention.Decay(), **more}
    return rc.Recipe(memory=memory, algorithm=kind(batch_size=b, normalized_steps=share), **choices)


TITANS = recipe()
CASES = {
    "titans": Case(TITANS),
    "titans in float32": Case(TITANS, dtype=torch.float32),
    "titans_minus": Case(recipe(momentum=False)),
    "titans_minus in float32": Case(recipe(momentum=False), dtype=torch.float32),
    "rows that end early": Case(TITANS, B=2, padded=True),
    "rows that end early, without momentum": Case(recipe(momentum=False), B=2, padded=True),
    "plain steps": Case(recipe(share=False)),
    "plain steps, without momentum": Case(recipe(share=False, momentum=False), B=2, padded=True),
    "no decay": Case(recipe(momentum=False, retention=rc.retention.Keep())),
    "a window": Case(recipe(context=rc.context.Window(size=3, gated=False)), T=36),
    "no power of two": Case(recipe(b=5, memory={"expansion": 3}), K=12, T=17),
    "as wide as high": Case(recipe(memory={"expansion": 1, "residual": False})),
    "another affine error": Case(recipe(bias=TwiceLessThrice())),
    "an error without prediction": Case(recipe(share=False, bias=rc.bias.DotProduct())),
    "zeros": Case(TITANS, zeros=True),
    "zeros, plain steps": Case(recipe(share=False), zeros=True),
    "large values": Case(TITANS, scale=1e6),
    "one batch": Case(TITANS, T=16),
    "tokens before a border": Case(TITANS, T=9),
    "gradients of gradients": Case(TITANS, K=8, T=20, again=True),
    **{
        f"{name} between": Case(recipe(memory={"activation": name}), K=8, T=24)
        for name in ("gelu_tanh", "silu", "tanh", "relu", "identity")
    },
    "operations of torch alone": Case(TITANS, K=8, T=20, engine="torch", taken=False),
    "several groups": Case(TITANS, K=8, T=40, engine="deep", chunk=16),
    "three maps": Case(recipe(memory={"depth": 3}), K=8, T=20, taken=False),
    "a bent error": Case(recipe(share=False, bias=rc.bias.Huber()), K=8, T=20, taken=False),
}
"""What is taken is two maps of the same sizes under an affine error."""


def drawn(case: Case) -> dict[str, Any]:
    """Arguments of `rc.recall`, in float64."""
    torch.manual_seed(case.K + case.T)
    B, T, H, K = case.B, case.T, 2, case.K
    q, k, v = torch.randn(3, B, T, H, K, dtype=torch.float64)
    k = case.keys * torch.nn.functional.normalize(k, dim=-1)
    v[:, T // 2 :] *= case.scale
    if case.zeros:
        k[:, :3] = 0.0
        v[:, 2:5] = 0.0
        k[:, 4] = 0.0
    each = torch.rand(4, B, T, H, dtype=torch.float64)
    gates = {"lr": 0.1 + 0.3 * each[0], "log_decay": -0.1 * each[1], "momentum": 0.9 * each[2]}
    wanted = {gate.name for gate in case.recipe.gates()}
    gates = {name: x for name, x in gates.items() if name in wanted}
    gates |= dict.fromkeys(wanted - set(gates), 0.5 + each[3])
    shapes = case.recipe.memory.shapes(K, K)
    init = [torch.randn(B, H, *s, dtype=torch.float64) * s[1] ** -0.5 for s in shapes]
    given = {"q": q, "k": k, "v": v, **{f"gate {name}": x for name, x in gates.items()}}
    given |= {f"init {n}": w for n, w in enumerate(init)}
    for name, x in rc.initial_params(case.recipe, H=H, K=K, V=K).items():
        given[f"param {name}"] = x.double() + 0.3 * torch.randn(x.shape, dtype=torch.float64)
    return {name: x.to(case.dtype) for name, x in given.items()}


def solved(
    case: Case, given: Mapping[str, Tensor], engine: str, send: Send = lambda x: x
) -> dict[str, Tensor]:
    """Outputs, states and gradients by name, as the CPU has them.

    Args:
        case: the call. given: its arguments, on the CPU.
        engine: of `recollect.recall`.
        send: takes a tensor to where it runs.
    """
    leaves = {name: send(x).requires_grad_() for name, x in given.items()}
    where: dict[str, Any] = {}
    if case.padded:
        mask = torch.ones(case.B, case.T, dtype=torch.bool)
        mask[0, case.T - 7 :] = False
        where["attention_mask"] = send(mask)
    y, state = rc.recall(
        case.recipe,
        *(leaves[name] for name in ("q", "k", "v")),
        {name[5:]: x for name, x in leaves.items() if name.startswith("gate ")},
        params={name[6:]: x for name, x in leaves.items() if name.startswith("param ")},
        initial_memory=[x for name, x in leaves.items() if name.startswith("init ")],
        engine=engine,
        chunk_size=case.chunk,
        **where,
    )
    assert state is not None
    found = {"y": y, **{f"state {n}": x for n, x in enumerate(state.weights)}}
    found |= {
        f"{name} {n}": x for name, xs in state.algorithm_state.items() for n, x in enumerate(xs)
    }

    def wave(x: Tensor, seed: int) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return send(torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype))

    inputs = [*leaves.values()]
    total = torch.stack([(x * wave(x, n)).sum() for n, x in enumerate(found.values())]).sum()
    slopes = torch.autograd.grad(total, inputs, create_graph=case.again)
    found |= {f"d {name}": g for name, g in zip(leaves, slopes, strict=True)}
    if case.again:
        second = torch.stack([(g * wave(g, 80)).sum() for g in slopes]).sum()
        twice = torch.autograd.grad(second, inputs, allow_unused=True)
        found |= {f"dd {name}": g for name, g in zip(leaves, twice, strict=True) if g is not None}
    return {name: host(x) for name, x in found.items()}


def told(case: Case) -> dict[str, Tensor]:
    """What the definition says."""
    return solved(case, {name: x.double() for name, x in drawn(case).items()}, "reference")


def apart(found: Mapping[str, Tensor], said: Mapping[str, Tensor]) -> dict[str, float]:
    """Distances by name."""
    assert found.keys() == said.keys()
    return {name: distance(found[name], x) for name, x in said.items()}


def bound(case: Case, part: str) -> float:
    """How far a part may be from the definition: rounding, in another order of operations."""
    if case.dtype == torch.float64:
        return 1e-9
    return 1e-3 if part.startswith("d") else 1e-5
