"""Small runs of a language model: text, plan, a failing part, and comparison of two runs."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recollect.lm.training.arguments import MIN_TORCH_FOR_2D
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import Progress, TrainObserver

STEPS = 6

gathers = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < MIN_TORCH_FOR_2D,
    reason="a run refuses what this torch gathers wrongly",
)


def write_text(path: Path) -> Path:
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    lines = (" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(80))
    path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return path


def plan(text: Path, out: Path, **changes: dict[str, Any]) -> TrainPlan:
    tables: dict[str, dict[str, Any]] = {
        "model": {"recipe": "gated_delta_net", "width": 16, "depth": 1, "heads": 2, "mlp": 16},
        "data": {"train": [str(text)], "context": 32},
        "optimizer": {"steps": STEPS, "batch": 2, "lr": 0.01},
        "run": {"out": str(out), "save_every": 2, "keep": 2, "log_every": 1, "seed": 3},
    }
    for table, values in changes.items():
        tables[table] |= values
    return TrainPlan.from_dict(tables)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(first: Path, second: Path) -> None:
    one, two = weights(first), weights(second)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0, msg=name)


class Recorder(TrainObserver):
    """Record the events of a run, and interrupt it after a step if requested."""

    def __init__(self, *, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.summaries: list[Mapping[str, str]] = []
        self.progress: list[Progress] = []
        self.messages: list[str] = []

    def on_start(self, summary: Mapping[str, str]) -> None:
        self.summaries.append(summary)

    def on_message(self, message: str) -> None:
        self.messages.append(message)

    def on_progress(self, progress: Progress) -> None:
        self.progress.append(progress)
        if progress.step == self.stop_after:
            raise KeyboardInterrupt


class _Infinite(torch.autograd.Function):
    """The identity with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.inf


def make_ill(part: nn.Module, num_calls: int, *, backward: bool) -> None:
    """Make a part's output, or only its gradient, non-finite from some call in training on."""
    calls = itertools.count(1)

    def harm(module: nn.Module, inputs: object, y: Tensor) -> Tensor:
        if not module.training or next(calls) <= num_calls:
            return y
        return _Infinite.apply(y) if backward else y * torch.inf

    part.register_forward_hook(harm)
