"""Coordinate check of a training plan: its recipe, text and learning rate."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from torch import Tensor

from recollect.lm.data.rows import PackedDataset, collate
from recollect.lm.data.sources import BadLinePolicy
from recollect.lm.model.config import MLP, RecollectConfig
from recollect.lm.mup.coordinate_check import TOLERANCE, Coordinates, check_coordinates
from recollect.lm.mup.rules import BASE_WIDTH
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.setup import build_tokenizer, load_text_data, model_config
from recollect.report.devices import resolve_device

__all__ = ["check_plan", "default_widths"]

_MIN_WIDTH = 64  # of the default widths: averages over fewer channels are noise


def check_plan(
    plan: TrainPlan,
    *,
    widths: Sequence[int] | None = None,
    steps: int = 4,
    seeds: int = 2,
    depth: int | None = None,
    parametrization: str | None = None,
    tolerance: float = TOLERANCE,
) -> Coordinates:
    """Run `check_coordinates` on the model and the first batches of a plan; nothing is written.

    By default the check uses `default_widths`, the plan's parametrization, and as many layers as
    contain each of the plan's recipes once, at least 2.
    """
    if plan.model.start is not None:
        raise ValueError(
            "[model] start names a saved model, and the coordinate check needs a new one: replace "
            "start by the recipe and sizes of the model"
        )
    base_width = plan.optimizer.mup_base_width
    if parametrization is not None:
        base_width = None if parametrization == "standard" else (base_width or BASE_WIDTH)
    data = replace(plan.data, context=plan.data.segment_length, segments=1, segment_gradient="cut")
    optimizer = replace(plan.optimizer, steps=steps, tokens=None, accumulate=1)
    short_plan = replace(plan, data=data, optimizer=optimizer)
    bad_lines = BadLinePolicy(skip=data.bad_lines == "skip")
    with tempfile.TemporaryDirectory() as tmpdir:
        tokenizer = build_tokenizer(short_plan, Path(tmpdir), bad_lines, None)
    config = model_config(plan.model, tokenizer)
    num_mixers = sum(name != MLP for name in config.layers)
    config.num_hidden_layers = depth or min(config.num_hidden_layers, max(2, num_mixers))
    train = load_text_data(short_plan, tokenizer, bad_lines).train
    rows = (
        (train[i] for i in range(len(train))) if isinstance(train, PackedDataset) else iter(train)
    )
    device = resolve_device(plan.run.device, argument_name="[run] device")
    batches: list[dict[str, Tensor]] = []
    for _ in range(steps):
        batch = collate([*islice(rows, optimizer.batch)], reset_memory=data.packing == "documents")
        batches.append({name: x.to(device) for name, x in batch.items()})
    return check_coordinates(
        config,
        batches,
        widths=default_widths(config) if widths is None else widths,
        lr=plan.lr,
        base_width=base_width,
        seeds=seeds,
        betas=optimizer.betas,
        tolerance=tolerance,
    )


def default_widths(config: RecollectConfig) -> list[int]:
    """Return three widths of whole heads, each twice the one before, from 64 channels on."""
    unit = config.hidden_size // math.gcd(
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    )
    first = unit * max(1, -(-_MIN_WIDTH // unit))
    return [first, 2 * first, 4 * first]
