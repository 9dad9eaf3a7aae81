"""Language models of the papers' experiments: one is trained, and what was measured of it.

How depends on the configuration alone. At the scales of this repository it is a model of bytes on
the text of `recollect compare`, at equal parameters and tokens, trained by that command's loop. A
configuration with ``data``, as the papers' scale has, is a plan of `recollect train`, and tasks of
lm-eval measure what it trained.

============  ======================================================================================
width, depth  of the backbone
heads         of every layer; ``channels`` of a head in their place
parameters    that the width of every model's MLP is set to reach
length        tokens of a row
step_tokens   tokens of an optimizer step, so ``step_tokens / length`` rows
steps         of the optimizer; ``tokens`` in its place with ``data``
lr            peak learning rate
measured      bytes of held-out text
data          the table of a `TrainPlan`, without its context
vocab         tokens of the tokenizer that it names
tasks         of lm-eval, by name
folder        where trained models stand; equal terms in any experiment are the same model
============  ======================================================================================
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recollect.experiments.framework.experiment import Config
from recollect.experiments.framework.records import Values
from recollect.tasks.mqar import IGNORE
from recollect.tasks.text import TextCorpus, bigram_bits_per_byte, heldout_windows, load_text

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec as Named
    from recollect.experiments.comparison.results import Sizes
    from recollect.lm.model.config import RecollectConfig

# Experiments are listed without transformers too: what needs it is imported when it runs.

__all__ = [
    "BIGRAM",
    "BITS",
    "COMMON_SENSE",
    "FINEWEB",
    "LOCAL",
    "SMOKE",
    "language_model",
    "model_of",
]

BITS = "bits per byte"
"""What every model is measured by: of the held-out text, or of WikiText where lm-eval is asked."""

BIGRAM = "byte bigram"
"""The bits per held-out byte of a smoothed byte bigram, which knows no context."""

SMOKE = {"seeds": 1, "width": 16, "depth": 1, "heads": 2, "parameters": 24_000, "length": 32} | {
    "step_tokens": 64, "steps": 1, "lr": 4e-3, "measured": 256
}  # fmt: skip
"""Whether it runs."""

LOCAL = {"width": 64, "depth": 2, "heads": 4, "parameters": 240_000, "length": 128} | {
    "step_tokens": 512, "steps": 100, "lr": 1e-2, "measured": 16_384
}  # fmt: skip
"""Minutes on a core; an experiment says where it differs. The learning rate is the one of 0.004,
0.01 and 0.02 with which Gated DeltaNet and softmax attention were best after 10⁵ bytes; no deep
memory was asked."""

COMMON_SENSE = {
    "lambada_openai": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "social_iqa": "acc",
    "boolq": "acc",
}
"""The papers' tasks, and the accuracy of each that their average is of."""

FINEWEB = {"seeds": 1, "depth": 24, "width": 1536, "heads": 16, "parameters": 760_000_000} | {
    "vocab": 32_000,
    "length": 4096,
    "step_tokens": 2**19,
    "tokens": 30 * 10**9,
    "lr": 1.25e-3,
    "data": {
        "dataset": "HuggingFaceFW/fineweb-edu",
        "name": "sample-100BT",
        "tokenizer": "fla-hub/gla-1.3B-100B",
    },
    "tasks": ["wikitext", *COMMON_SENSE],
    "folder": "runs/language_models",
}
"""MIRAS table 5 and ATLAS table 7 at 760M, and the tasks of their tables."""

_BYTES = 256


def model_of(config: Config, model: Named, **cell: Any) -> RecollectConfig:
    """The model that a cell of a grid trains.

    Args:
        config: of the experiment.
        model: a zoo name, or a recipe or mixer of one's own under a name.
        **cell: what the grid varies, in place of the configuration's.

    Raises:
        ValueError: it has more than ``parameters`` even with the narrowest MLP.
    """
    from recollect.experiments.comparison.results import Schedule

    terms = {**config, **cell}
    # Length and schedule are told to no model: what is matched once serves all of them.
    size = replace(_sizes(terms), length=1, schedule=Schedule(steps=1, batch=1))
    vocab = terms.get("vocab", _BYTES)
    return copy.deepcopy(_matched(model, vocab, size, terms["parameters"]))


@lru_cache(maxsize=64)
def _matched(model: Named, vocab: int, size: Sizes, parameters: int) -> RecollectConfig:
    from recollect.experiments.comparison.compare import build_configs, resolve_model

    (found,) = build_configs([resolve_model(model)], vocab, size, "auto", parameters, conv=False)
    return found


def _sizes(terms: Mapping[str, Any]) -> Sizes:
    from recollect.experiments.comparison.results import Schedule, Sizes

    return Sizes(
        width=terms["width"],
        depth=terms["depth"],
        heads=_heads(terms),
        length=terms["length"],
        schedule=Schedule(steps=_steps(terms), batch=_rows(terms), lr=terms["lr"], evaluations=1),
    )


def _heads(terms: Mapping[str, Any]) -> int:
    return terms["width"] // terms["channels"] if "channels" in terms else terms["heads"]


def _rows(terms: Mapping[str, Any]) -> int:
    return max(1, terms["step_tokens"] // terms["length"])


def _steps(terms: Mapping[str, Any]) -> int:
    return terms["steps"] if "steps" in terms else -(-terms["tokens"] // terms["step_tokens"])


def _count(made: RecollectConfig) -> float:
    from recollect.lm.model.counts import count_parameters

    return float(sum(count_parameters(made).values()))


def language_model(
    config: Config, model: Named, *, seed: int, device: torch.device, **cell: Any
) -> Values:
    """Train a language model and measure it.

    Args:
        config: of the experiment.
        model: as in `model_of`.
        seed: of weights, and of the order of rows: equal for all models of a grid.
        device: where.
        **cell: as in `model_of`.

    Returns:
        `BITS`, parameters, FLOPs and tokens of training. Of a model of bytes also the state of a
        decoder in bytes after a row, ``"bits by position"`` (the means at positions 0, 1, 2 to 3,
        4 to 7, …), the training loss in bits and `BIGRAM`; of a plan, every number that the tasks
        gave. A model that diverged has NaN for bits.
    """
    terms = {**config, **cell}
    made = model_of(config, model, **cell)
    measure = _by_plan if "data" in terms else _by_bytes
    return measure(terms, model, made, seed, device)


# -- models of bytes -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _text() -> TextCorpus:
    return load_text()


@lru_cache(maxsize=1)
def _bigram(corpus: TextCorpus) -> float:
    return bigram_bits_per_byte(corpus)


def _by_bytes(
    terms: Mapping[str, Any], model: Named, made: RecollectConfig, seed: int, device: torch.device
) -> Values:
    from recollect.experiments.comparison.results import History
    from recollect.experiments.comparison.tasks import compare_task
    from recollect.experiments.comparison.training import state_bytes, train
    from recollect.lm.memory_estimate.flops import model_flops
    from recollect.lm.model.model import RecollectForCausalLM
    from recollect.lm.training.divergence import Diverged

    corpus, size = _text(), _sizes(terms)
    torch.manual_seed(seed)
    net = RecollectForCausalLM(made)
    kept, _ = state_bytes(net, size.length)
    history, by_position = History(), [math.nan] * len(_edges(size.length))
    diverged = math.nan

    def evaluate(net: nn.Module) -> float:
        means = _bits_by_position(net, corpus, size, terms["measured"])
        spans = pairwise([*_edges(size.length), size.length])
        by_position[:] = [float(means[low:high].mean()) for low, high in spans]
        return float(means.mean())

    try:
        train(
            net,
            compare_task("text", size, seed, corpus).examples,
            size.schedule,
            evaluate=evaluate,
            seed=seed,
            history=history,
            device=device,
        )
    except Diverged as error:
        diverged = float(error.step)
    tokens = size.schedule.steps * size.schedule.batch * size.length
    return {
        BITS: history.curve[-1][1] if history.finished else math.nan,
        "parameters": _count(made),
        "state bytes": float(kept),
        "FLOPs": model_flops(made, context=size.length) * tokens,
        "tokens": float(tokens),
        "diverged at step": diverged,
        BIGRAM: _bigram(corpus),
        "bits by position": by_position,
        "training bits": [loss / math.log(2) for _, loss in history.losses],
    }


def _edges(length: int) -> list[int]:
    """First positions of the spans whose bits are told: 0, 1, 2, 4, 8 and so on."""
    return [0, *(2**power for power in range(max(length - 1, 0).bit_length()))]


def _bits_by_position(net: nn.Module, corpus: TextCorpus, size: Sizes, limit: int) -> Tensor:
    """Mean bits of the held-out byte at each position of a row: ``[length]``; rows that are full.

    Every position is in as many rows, so their mean is that over all bytes.
    """
    device = next(net.parameters()).device
    sums, rows = torch.zeros(size.length, dtype=torch.float64), 0
    windows = heldout_windows(corpus, length=size.length, batch=size.schedule.batch, limit=limit)
    for inputs, labels in windows:
        whole = (labels != IGNORE).all(-1)
        inputs, labels = inputs[whole].to(device), labels[whole].to(device)
        logits = net(input_ids=inputs).logits.float()
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        sums += loss.double().sum(0).cpu()
        rows += len(inputs)
    return sums / max(rows, 1) / math.log(2)


# -- plans of the papers' scale --------------------------------------------------------------------


def _by_plan(
    terms: Mapping[str, Any], model: Named, made: RecollectConfig, seed: int, device: torch.device
) -> Values:
    """Train by `recollect.lm.train`, going on where an earlier run stopped, and evaluate."""
    from recollect.experiments.comparison.compare import resolve_model
    from recollect.lm.evaluation.evaluate import evaluate  # which needs the extra
    from recollect.lm.memory_estimate.flops import model_flops
    from recollect.lm.training.divergence import Diverged
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.train import train as train_plan

    tables = {
        "model": {
            "recipes": dict(made.recipes),
            "width": terms["width"],
            "depth": terms["depth"],
            "heads": _heads(terms),
            "parameters": terms["parameters"],
        },
        "data": {**terms["data"], "context": terms["length"]},
        "optimizer": {
            "lr": terms["lr"],
            "steps": _steps(terms),
            "batch": 1,
            "accumulate": _rows(terms),
        },
        "run": {"seed": seed, "device": str(device), "bf16": device.type == "cuda"},
    }
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(terms["folder"]) / f"{resolve_model(model)[0].replace(' ', '_')}-{digest}"
    tables["run"]["out"] = str(folder)
    tokens = _steps(terms) * _rows(terms) * terms["length"]
    found = {
        "parameters": _count(made),
        "FLOPs": model_flops(made, context=terms["length"]) * tokens,
        "tokens": float(tokens),
    }
    try:
        trained = train_plan(TrainPlan.from_dict(tables), resume=folder.exists())
    except Diverged as error:
        return {**found, BITS: math.nan, "diverged at step": float(error.step)}
    if trained.heldout is not None:
        found[BITS] = trained.heldout
    if terms["tasks"]:
        evaluation = evaluate(
            trained.folder,
            terms["tasks"],
            out=folder / "evaluation",
            context=terms["length"],
            device=str(device),
        )
        found |= _of_tasks({one.task: one.metrics for one in evaluation.tasks})
    return found


def _of_tasks(tasks: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Every number of tasks by name; `BITS` of WikiText, and the papers' average accuracy.

    The average is there when every task of it is.
    """
    found = {f"{task} {name}": x for task, metrics in tasks.items() for name, x in metrics.items()}
    if "wikitext bits_per_byte" in found:
        found[BITS] = found["wikitext bits_per_byte"]
    asked = [f"{task} {name}" for task, name in COMMON_SENSE.items()]
    if all(name in found for name in asked):
        found["accuracy"] = sum(found[name] for name in asked) / len(asked)
    return found
