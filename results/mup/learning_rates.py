"""Measure the best learning rate of models of several widths, with muP and without.

``python results/mup/learning_rates.py`` trains on local text for about fifteen minutes on one core,
and writes ``gated_delta_net.json`` and its figures next to this file. All models have heads of one
size. If the learning rate transfers over width, all curves of held-out loss have their minimum at
the same learning rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import recollect as rc
from recollect.report import Series, describe_environment, line_figure, write_atomic
from recollect.tasks import IGNORE, TextCorpus, batches, heldout_windows, load_text

FOLDER, RECIPE = Path(__file__).parent, "gated_delta_net"
PARAMETRIZATIONS = ("standard", "mup")
WIDTHS = (64, 128, 256)
LEARNING_RATES = tuple(2.0**power for power in range(-9, -2))
HEAD_DIM, DEPTH, LENGTH, BATCH_SIZE, STEPS = 16, 2, 128, 8, 150
HELDOUT_BYTES = 32_768

Trial = dict[str, Any]
"""Parametrization, width, peak learning rate, and held-out nats per byte; infinite if diverged."""


def run_trials(corpus: TextCorpus) -> Iterator[Trial]:
    """Train every width at every learning rate; both parametrizations agree at the first width."""
    for width in WIDTHS:
        for lr in LEARNING_RATES:
            loss = train(corpus, width, lr, base_width=None)
            for name in PARAMETRIZATIONS:
                if name == "mup" and width != WIDTHS[0]:
                    loss = train(corpus, width, lr, base_width=WIDTHS[0])
                print(f"{name} {width} {lr:.3g}: {loss:.4f}", flush=True)
                yield {"parametrization": name, "width": width, "lr": lr, "loss": loss}


def train(corpus: TextCorpus, width: int, lr: float, *, base_width: int | None) -> float:
    """Return the held-out loss of a model after training, with muP if there is a base width."""
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        RECIPE,
        vocab_size=corpus.vocab,
        hidden_size=width,
        num_hidden_layers=DEPTH,
        num_attention_heads=width // HEAD_DIM,
    )
    model = rc.lm.RecollectForCausalLM(config)
    if base_width is not None:
        rc.lm.scale_for_width(model, base_width)
    groups = rc.lm.parameter_groups(model, weight_decay=0.1, lr=lr, base_width=base_width)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    warmup = max(1, STEPS // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min((n + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, n / STEPS))),
    )
    generator = torch.Generator().manual_seed(0)
    rows = batches(corpus, length=LENGTH, batch=BATCH_SIZE, generator=generator)
    model.train()
    for _ in range(STEPS):
        inputs, labels = next(rows)
        loss = model(input_ids=inputs, shift_labels=labels).loss
        if not math.isfinite(loss.item()):
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return heldout_loss(model.eval(), corpus)


@torch.no_grad()
def heldout_loss(model: Any, corpus: TextCorpus) -> float:
    """Return the nats per byte of the held-out text."""
    total, count = 0.0, 0
    for inputs, labels in heldout_windows(corpus, length=LENGTH, batch=64, limit=HELDOUT_BYTES):
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        total += cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()
        count += int((labels != IGNORE).sum())
    return total / count


def select(trials: Sequence[Trial], parametrization: str, width: int) -> list[Trial]:
    """Return the trials of a curve in the order of their learning rates."""
    curve = [t for t in trials if (t["parametrization"], t["width"]) == (parametrization, width)]
    return sorted(curve, key=lambda trial: trial["lr"])


def best_log2_lr(curve: Sequence[Trial]) -> float:
    """Return log₂ of the best learning rate: the vertex of a parabola through the best trials.

    The parabola needs finite losses on both sides. Otherwise the best trial itself counts.
    """
    best = min(range(len(curve)), key=lambda i: curve[i]["loss"])
    neighbours = curve[max(best - 1, 0) : best + 2]
    log2_lr = math.log2(curve[best]["lr"])
    if len(neighbours) < 3 or not all(math.isfinite(trial["loss"]) for trial in neighbours):
        return log2_lr
    x, y = [math.log2(t["lr"]) for t in neighbours], [t["loss"] for t in neighbours]
    a, b, _ = np.polyfit(x, y, 2)
    return float(-b / (2 * a)) if a > 0 else log2_lr


def draw(trials: Sequence[Trial], folder: Path) -> None:
    """Write one figure per parametrization."""
    for name in PARAMETRIZATIONS:
        curves = {width: select(trials, name, width) for width in WIDTHS}
        line_figure(
            [
                Series(
                    name=f"width {width}",
                    x=[trial["lr"] for trial in curve],
                    y=[trial["loss"] for trial in curve],
                )
                for width, curve in curves.items()
            ],
            x="learning rate",
            y="held-out nats per byte",
            title=f"{RECIPE}, {name} parametrization",
            log_x=True,
        ).save(folder / f"{RECIPE}-{name}")


def main() -> None:
    """Measure, and write the results and the figures."""
    torch.set_num_threads(1)
    corpus = load_text()
    trials = list(run_trials(corpus))
    results = {
        "what": f"{RECIPE}, {DEPTH} layers, heads of {HEAD_DIM}, base width {WIDTHS[0]}, {STEPS} "
        f"steps of {BATCH_SIZE} × {LENGTH} bytes, one seed, one thread",
        "text": corpus.source,
        "sha256": corpus.sha256,
        "environment": describe_environment("cpu").to_dict(),
        "log2 of the best learning rate": {
            name: {str(w): round(best_log2_lr(select(trials, name, w)), 2) for w in WIDTHS}
            for name in PARAMETRIZATIONS
        },
        "trials": trials,
    }
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    write_atomic(FOLDER / f"{RECIPE}.json", text)
    draw(trials, FOLDER)


if __name__ == "__main__":
    main()
