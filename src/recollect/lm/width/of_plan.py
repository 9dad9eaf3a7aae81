"""The coordinate check of a training plan: its recipe, its text, its learning rate."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from recollect.lm.data.rows import PackedDataset, collate
from recollect.lm.data.sources import BadLinePolicy
from recollect.lm.model.config import MLP, RecollectConfig
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.prepare import model_config, rows_of, tokenizer_of
from recollect.lm.width.coordinates import TOLERANCE, Coordinates, check_coordinates
from recollect.lm.width.rules import BASE_WIDTH
from recollect.report.devices import find_device

__all__ = ["check_plan", "default_widths"]

_LEAST = 64  # the narrowest width by default: below it, sums over channels are no averages


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
    """`check_coordinates` of what a plan trains, on the first rows of its text.

    Args:
        plan: of the run; nothing is written to its folder.
        widths: ascending; `default_widths` when omitted.
        steps: of AdamW, at the plan's peak learning rate, one of its batches each.
        seeds: initial weights that are averaged over.
        depth: layers; each of the plan's once, and two at least, when omitted.
        parametrization: ``"standard"`` or ``"mup"``, in place of the plan's.
        tolerance: largest slope that counts as flat.

    Raises:
        ValueError: what `recollect.lm.train` refuses of a plan, a plan that goes on from a saved
            model, or widths that its heads do not fill.
    """
    if plan.model.start is not None:
        raise ValueError(
            "[model] start goes on from a saved model, and coordinates are those of new ones: "
            "leave it out, and state the model"
        )
    base = plan.optimizer.rules_from
    if parametrization is not None:
        base = None if parametrization == "standard" else (base or BASE_WIDTH)
    data = replace(plan.data, context=plan.data.piece, segments=1, segment_gradient="cut")
    optimizer = replace(plan.optimizer, steps=steps, tokens=None, accumulate=1)
    short = replace(plan, data=data, optimizer=optimizer)
    bad = BadLinePolicy(skip=data.bad_lines == "skip")
    with tempfile.TemporaryDirectory() as aside:
        tokenizer = tokenizer_of(short, Path(aside), bad, None)
    config = model_config(plan.model, tokenizer)
    config.num_hidden_layers = depth or min(config.num_hidden_layers, max(2, _pattern(config)))
    rows = rows_of(short, tokenizer, bad).train
    # Rows that are all read know an index alone.
    each = (rows[i] for i in range(len(rows))) if isinstance(rows, PackedDataset) else iter(rows)
    device = find_device(plan.run.device, said="[run] device")
    batches: list[dict[str, Tensor]] = []
    for _ in range(steps):
        own = list(itertools.islice(each, optimizer.batch))
        batch = collate(own, reset_memory=data.packing == "documents")
        batches.append({name: x.to(device) for name, x in batch.items()})
    return check_coordinates(
        config,
        batches,
        widths=default_widths(config) if widths is None else widths,
        lr=plan.lr,
        base_width=base,
        seeds=seeds,
        betas=optimizer.betas,
        tolerance=tolerance,
    )


def default_widths(config: RecollectConfig) -> list[int]:
    """Three widths of whole heads, each twice the one before, the first of 64 channels or more."""
    unit = config.hidden_size // math.gcd(
        config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    )
    first = unit * max(1, -(-_LEAST // unit))
    return [first, 2 * first, 4 * first]


def _pattern(config: RecollectConfig) -> int:
    return sum(name != MLP for name in config.layers)
