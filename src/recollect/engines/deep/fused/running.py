"""The deep engine's groups of inner batches by the fused walk."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.runtime import is_cacheable
from recollect.engines.deep.fused.gradients import FusedWalker
from recollect.engines.deep.fused.walk import Launch, launcher, run_walk
from recollect.engines.deep.layout import DeepPlan, Layout, Memory
from recollect.engines.deep.step_coefficients import tables

__all__ = ["launch_of", "run_fused", "walker_of", "walks"]


def launch_of(method: DeepPlan, layout: Layout) -> Launch | None:
    """Who runs the fused walk of a group: where it was asked for and built for what is there.

    Args:
        method: how the recipe runs, with a build.
        layout: of the group.
    """
    x = layout.x
    assert method.fused is not None
    if layout.G > 1 or x.dtype != torch.float32 or not is_cacheable(x):
        return None
    return launcher(method.fused, x.device)


def run_fused(
    method: DeepPlan, layout: Layout, memory: Memory, launch: Launch
) -> tuple[Tensor, Memory]:
    """Outputs ``[N, P, b, V]`` of a group for which nobody asks gradients, and the memory after.

    Args:
        method: how the recipe runs, with a build.
        layout: of the group.
        memory: before it.
        launch: of `launch_of`.
    """
    assert method.fused is not None
    table, *_ = tables(method.rule, method.maps, layout.steps, layout.gamma, start=0)
    y, A, S = run_walk(
        method.fused,
        table,
        (layout.x.flatten(1, 2), layout.keys["phi"].flatten(1, 2), layout.keys["v"].flatten(1, 2)),
        layout.commits,
        (memory.A, memory.slots.get("momentum")),
        launch,
    )
    y = y.unflatten(1, layout.x.shape[1:3])
    return y, Memory(A=A, slots={} if S is None else {"momentum": S})


def walker_of(method: DeepPlan, launch: Launch) -> FusedWalker:
    """Who goes from border to border in training.

    Args:
        method: how the recipe runs, with a build.
        launch: of `launch_of`.
    """
    assert method.fused is not None
    return FusedWalker(method.fused, launch)


def walks(method: DeepPlan, device: torch.device) -> bool:
    """Whether anybody runs a recipe's walk on a device.

    Args:
        method: how the recipe runs, with a build.
        device: where the call's tensors are.
    """
    assert method.fused is not None
    return launcher(method.fused, device) is not None
