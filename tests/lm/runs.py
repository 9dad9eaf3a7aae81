"""Small runs of a language model: their text, their plan, and whether two ended alike."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from recollect.lm.training.plan import TrainPlan

STEPS = 6


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
