"""Models and training of the swap task: AM section 3.2, listing 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from recollect.choices.features.base import Kernel
from recollect.choices.features.kernels import Exponential, LinearKernel, ReluKernel, Round
from recollect.experiments.framework import (
    Budget,
    Config,
    Lines,
    accuracy,
    fit,
    heldout_generator,
)
from recollect.experiments.framework.fitting import FitResult, Stage
from recollect.experiments.framework.task_models import (
    LEARNED_GATES,
    PLAIN_LAYER,
    LayerFunction,
    TaskModel,
    delta_former_recipe,
    memory_layer,
)
from recollect.tasks.swaps import SwapConfig, swap_batch
from recollect.zoo.preset import get

__all__ = [
    "KERNELS",
    "attention_layer",
    "delta_former_layer",
    "fit_metrics",
    "learning_curves",
    "train_on_swaps",
]

KERNELS: dict[str, tuple[Kernel, str]] = {
    "linear": (LinearKernel(), "none"),
    "round": (Round(decimals=2), "none"),
    "relu": (ReluKernel(), "none"),
    "exp": (Exponential(), "none"),
    "softmax": (Exponential(), "sum"),
}
"""κ₁ by name: the kernel, and the normalization of its sum."""


def delta_former_layer(
    kernel: str, *, heads: int = 1, size: int | None = None, w_heads: int = 1, rope: bool = False
) -> LayerFunction:
    """Return DeltaFormer's layer: ``heads`` queries and ``w_heads`` probes over one memory."""
    kappa, normalize = KERNELS[kernel]
    theta = 10_000.0 if rope else None
    return memory_layer(
        delta_former_recipe(kappa, normalize=normalize, num_heads=w_heads),
        replace(PLAIN_LAYER, gate_options=LEARNED_GATES, rope_theta=theta),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=size,
    )


def attention_layer(heads: int, size: int, kv_heads: int | None = None) -> LayerFunction:
    """Return a layer of softmax attention."""
    recipe = get("softmax_attention").recipe
    return memory_layer(recipe, num_heads=heads, num_kv_heads=kv_heads, head_dim=size)


def train_on_swaps(
    config: Config,
    layers: list[LayerFunction],
    seed: int,
    device: torch.device,
    lengths: Sequence[int],
) -> FitResult:
    """Train a model of width 12 on a number of swaps, or on growing ones, and test the last."""
    tasks = {length: SwapConfig(length=length) for length in lengths}
    task = tasks[lengths[-1]]
    heldout = swap_batch(task, config["tested"], heldout_generator(seed))

    def stage(length: int) -> Stage:
        return Stage(draw=lambda generator: swap_batch(tasks[length], config["batch"], generator))

    return fit(
        lambda: TaskModel(task.vocab, task.items, 12, layers),
        [stage(length) for length in lengths],
        lambda model: accuracy(model, *heldout),
        Budget.from_config(config, decay="linear"),
        seed=seed,
        device=device,
    )


def fit_metrics(result: FitResult, config: Config) -> dict[str, Any]:
    """Return the best accuracy, and the learning curve, extended with its last value."""
    interval = max(1, config["steps"] // config["evaluations"])
    curve = [value for _, value in result.curve]
    curve += curve[-1:] * (config["steps"] // interval - len(curve))
    return {
        "accuracy": result.value,
        "lr": result.lr,
        "steps": float(result.steps),
        "lost steps": float(result.skipped_steps),
        "accuracy by steps": curve,
    }


def learning_curves(**options: Any) -> Lines:
    """Return lines of the accuracy against training steps, with the options of `Lines`."""
    return Lines(
        y="accuracy by steps",
        x=_evaluation_steps,
        x_label="training steps",
        y_label="accuracy",
        y_range=(0.0, 1.05),
        **options,
    )


def _evaluation_steps(config: Mapping[str, Any], count: int) -> list[int]:
    interval = max(1, config["steps"] // config["evaluations"])
    return [interval * (i + 1) for i in range(count)]


def depth_name(cell: Mapping[str, Any]) -> str:
    """Return the number of layers in words."""
    return f"{cell['layers']} layer{'s' if cell['layers'] > 1 else ''}"
