"""Which learning rate is best at which width, with the rules for width (muP) and without.

Models of several widths, each with as many more heads of one size, are trained on text at a grid of
learning rates. Where the rules hold, the curves of held-out loss have their minimum at one place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.mup.rules import scale_for_width
from recollect.lm.training.weight_decay import parameter_groups
from recollect.report.environment import describe_environment
from recollect.report.figures import Series, line_figure
from recollect.report.files import write_atomic
from recollect.tasks.mqar import IGNORE
from recollect.tasks.text import TextCorpus, batches, heldout_windows, load_text

__all__ = ["RATES", "WIDTHS", "Trial", "best_rate", "save_transfer", "transfer"]

WIDTHS = (64, 128, 256)
RATES = tuple(2.0**power for power in range(-9, -2))
HEAD, DEPTH, LENGTH, BATCH, STEPS, HELDOUT = 16, 2, 128, 8, 150, 32_768


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One model that was trained.

    Attributes:
        parametrization: ``"standard"`` or ``"mup"``.
        width: channels of a token.
        lr: the peak learning rate.
        loss: held-out nats per byte; infinite where training diverged.
    """

    parametrization: str
    width: int
    lr: float
    loss: float


def transfer(
    recipe: str,
    corpus: TextCorpus,
    *,
    widths: Sequence[int] = WIDTHS,
    rates: Sequence[float] = RATES,
    steps: int = STEPS,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> list[Trial]:
    """Train every width at every learning rate, with the rules for width and without.

    At the first width, the base width, both are the same and are trained once.

    Args:
        recipe: a name of the zoo.
        corpus: the text, of bytes.
        widths: multiples of 16, ascending.
        rates: learning rates, ascending.
        steps: of AdamW, with a linear warm-up over a tenth and a cosine to 0.
        seed: of initial weights and of the order of the text, the same for all.
        say: told of every trial.
    """
    trials: list[Trial] = []
    for width in widths:
        for lr in rates:
            loss = math.nan
            for name in ("standard", "mup"):
                if name == "standard" or width != widths[0]:
                    base = None if name == "standard" else widths[0]
                    loss = _loss(recipe, corpus, width, lr, base=base, steps=steps, seed=seed)
                trials.append(Trial(parametrization=name, width=width, lr=lr, loss=loss))
                say(f"{name} {width} {lr:.3g}: {loss:.4f}")
    return trials


def best_rate(trials: Sequence[Trial], parametrization: str, width: int) -> float:
    """log₂ of the best learning rate: the vertex of the parabola through the best three trials.

    At an end of the grid it is that end.

    Args:
        trials: of `transfer`.
        parametrization: of which.
        width: of which.
    """
    own = sorted(
        (t for t in trials if (t.parametrization, t.width) == (parametrization, width)),
        key=lambda t: t.lr,
    )
    best = min(range(len(own)), key=lambda i: own[i].loss)
    near = own[max(best - 1, 0) : best + 2]
    if len(near) < 3 or not all(math.isfinite(t.loss) for t in near):
        return math.log2(own[best].lr)
    a, b, _ = np.polyfit([math.log2(t.lr) for t in near], [t.loss for t in near], 2)
    return float(-b / (2 * a)) if a > 0 else math.log2(own[best].lr)


def save_transfer(folder: str | PathLike[str], recipe: str = "gated_delta_net") -> None:
    """Measure `transfer` and write ``RECIPE.json``, ``.png`` and ``.svg`` into a folder.

    Raises:
        ImportError: without matplotlib.
        OSError: if the folder cannot be written.
    """
    torch.set_num_threads(1)
    corpus, target = load_text(), Path(folder)
    trials = transfer(recipe, corpus)
    kinds = ("standard", "mup")
    for kind in kinds:
        series = [
            Series(
                name=f"width {width}",
                x=[t.lr for t in trials if (t.parametrization, t.width) == (kind, width)],
                y=[t.loss for t in trials if (t.parametrization, t.width) == (kind, width)],
            )
            for width in WIDTHS
        ]
        line_figure(
            series,
            x="learning rate",
            y="held-out nats per byte",
            title=f"{recipe}, {kind} parametrization",
            log_x=True,
        ).save(target / f"{recipe}-{kind}")
    found = {
        "what": f"{recipe}, {DEPTH} layers, heads of {HEAD}, base width {WIDTHS[0]}, {STEPS} steps "
        f"of {BATCH} × {LENGTH} bytes, one seed, one thread",
        "text": corpus.source,
        "sha256": corpus.sha256,
        "environment": asdict(describe_environment("cpu")),
        "log2 of the best learning rate": {
            kind: {str(width): round(best_rate(trials, kind, width), 2) for width in WIDTHS}
            for kind in kinds
        },
        "trials": [asdict(trial) for trial in trials],
    }
    write_atomic(target / f"{recipe}.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def _loss(
    recipe: str,
    corpus: TextCorpus,
    width: int,
    lr: float,
    *,
    base: int | None,
    steps: int,
    seed: int,
) -> float:
    torch.manual_seed(seed)
    config = RecollectConfig.from_recipes(
        recipe,
        vocab_size=corpus.vocab,
        hidden_size=width,
        num_hidden_layers=DEPTH,
        num_attention_heads=width // HEAD,
    )
    model = RecollectForCausalLM(config)
    if base is not None:
        scale_for_width(model, base)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, weight_decay=0.1, lr=lr, base_width=base), betas=(0.9, 0.95)
    )
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min((n + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * min(1.0, n / steps))),
    )
    draw = torch.Generator().manual_seed(seed)
    rows = batches(corpus, length=LENGTH, batch=BATCH, generator=draw)
    model.train()
    for _ in range(steps):
        inputs, labels = next(rows)
        loss = model(input_ids=inputs, shift_labels=labels).loss
        if not math.isfinite(loss.item()):
            return math.inf
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return _heldout(model, corpus)


@torch.no_grad()
def _heldout(model: RecollectForCausalLM, corpus: TextCorpus) -> float:
    model.eval()
    total, count = 0.0, 0
    for inputs, labels in heldout_windows(corpus, length=LENGTH, batch=64, limit=HELDOUT):
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits
        total += float(
            functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
        )
        count += int((labels != IGNORE).sum())
    return total / count
