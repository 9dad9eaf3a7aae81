"""Language models of the papers' experiments: one factory, one training and its measurements.

The configuration alone determines the training. At the scales of this repository it is a model of
bytes on the text of `recollect compare`, trained by that command's loop at equal parameters and
tokens. A configuration with ``data``, as at the paper's scale, is a plan of `recollect train`, and
tasks of lm-eval evaluate the trained model. A cell replaces values of the configuration by name.

============  ======================================================================================
width, depth  of the backbone
heads         number of heads of every layer; or ``channels``, the number of channels of a head
parameters    number of parameters that the width of every model's MLP is set to reach
length        number of tokens of a sequence
step_tokens   number of tokens of an optimizer step, ``step_tokens / length`` sequences
steps         number of optimizer steps; with ``data``, ``tokens`` replaces it
lr            peak learning rate
measured      number of bytes of held-out text
data          table of a `TrainPlan`, without its context
vocab         number of tokens of its tokenizer
tasks         names of tasks of lm-eval
folder        folder of the trained models; equal settings in any experiment give one model
============  ======================================================================================
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    NotMeasured,
    Results,
    Rule,
    Values,
    Verdict,
    provided,
    ranking,
    special,
    verdict,
)
from recollect.experiments.framework.plots import Figure
from recollect.tasks.mqar import IGNORE
from recollect.tasks.text import TextCorpus, bigram_bits_per_byte, heldout_windows, load_text

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec
    from recollect.experiments.comparison.results import Sizes
    from recollect.lm.model.config import RecollectConfig

# The list of experiments does not need transformers, so functions import the models that they run.

__all__ = [
    "BIGRAM",
    "BITS",
    "C4",
    "COMMON_SENSE",
    "FINEWEB",
    "LOCAL",
    "SMOKE",
    "TRAINED",
    "bits_ranking",
    "if_learned",
    "language_model",
    "language_models",
    "model_for_cell",
]

BITS = "bits per byte"
"""The measure of every model: on the held-out text, or on WikiText if lm-eval evaluates it."""

BIGRAM = "byte bigram"
"""Bits per held-out byte of a smoothed byte bigram."""

TRAINED = ("small", "paper")
"""Scales at which models are trained long enough for a verdict."""

SMOKE = {"seeds": 1, "width": 16, "depth": 1, "heads": 2, "parameters": 24_000, "length": 32} | {
    "step_tokens": 64, "steps": 1, "lr": 4e-3, "measured": 256
}  # fmt: skip
"""A run that tests the code."""

LOCAL = {"seeds": 3, "width": 64, "depth": 2, "heads": 4, "parameters": 240_000, "length": 128} | {
    "step_tokens": 512, "steps": 100, "lr": 1e-2, "measured": 16_384
}  # fmt: skip
"""Minutes on one core. Of the learning rates 0.004, 0.01 and 0.02, this one is best for Gated
DeltaNet and softmax attention after 10⁵ bytes. No deep memory was part of that search."""

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
"""Tasks of the papers, and the accuracy of each in their average."""

_TOKENIZER = "fla-hub/gla-1.3B-100B"

FINEWEB = {"seeds": 1, "depth": 24, "width": 1536, "heads": 16, "parameters": 760_000_000} | {
    "vocab": 32_000,
    "length": 4096,
    "step_tokens": 2**19,
    "tokens": 30 * 10**9,
    "lr": 1.25e-3,
    "data": {
        "dataset": "HuggingFaceFW/fineweb-edu",
        "name": "sample-100BT",
        "tokenizer": _TOKENIZER,
    },
    "tasks": ["wikitext", *COMMON_SENSE],
    "folder": "runs/language_models",
}
"""MIRAS table 5 and ATLAS table 7 at 760M, and the tasks of their tables."""

C4 = {
    "data": {
        "dataset": "allenai/c4",
        "name": "en",
        "heldout_split": "validation",
        "tokenizer": _TOKENIZER,
    },
    "tasks": [],
}
"""Changes of `FINEWEB` for the scaling figures of the papers."""

_BYTES = 256
_SETTINGS = ("width", "parameters", "lr", "length", "heads")


# -- experiments -----------------------------------------------------------------------------------


def language_models(
    *,
    name: str,
    title: str,
    source: str,
    protocol: str,
    claims: Sequence[Claim],
    figure: Figure,
    smoke: dict[str, Any],
    small: dict[str, Any],
    paper: dict[str, Any],
    model: Callable[[Cell], ModelSpec] | None = None,
    cells: Callable[[Config], Sequence[Cell]] | None = None,
    notes: str = "",
    tables: tuple[str, ...] = (),
) -> Experiment:
    """Return an experiment that trains one language model per cell.

    ``smoke``, ``small`` and ``paper`` are changes of `SMOKE`, `LOCAL` and `FINEWEB`. By default
    there is a cell for each name in ``config["models"]``. ``model`` returns the model of a cell, by
    default the name ``cell["model"]``. The other arguments are those of `Experiment`.
    """

    def measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
        changes = {key: cell[key] for key in _SETTINGS if key in cell}
        chosen = model(cell) if model else str(cell["model"])
        return language_model(config, chosen, seed=seed, device=device, **changes)

    return Experiment(
        name=name,
        title=title,
        source=source,
        protocol=protocol,
        claims=tuple(claims),
        configs={"smoke": SMOKE | smoke, "small": LOCAL | small, "paper": FINEWEB | paper},
        cells=cells or (lambda config: [{"model": model} for model in config["models"]]),
        measure=measure,
        figure=figure,
        notes=notes,
        tables=tables,
    )


def bits_ranking(title: str, groups: Mapping[str, Sequence[str]]) -> Figure:
    """Return a figure that ranks models by their bits per byte."""
    x_label = "held-out bits per byte"
    return ranking("model", y=BITS, x_label=x_label, title=title, groups=groups, baseline=BIGRAM)


def if_learned(rule: Rule, *, models: Sequence[str] = (), **cell: Any) -> Rule:
    """Apply a rule if a model has fewer bits per byte than a byte bigram.

    A run without a measured bigram passes. By default, all models count.
    """
    condition = special(
        "a model has fewer bits per byte than a byte bigram",
        partial(_better_than_bigram, models=tuple(models), cell=cell),
    )
    return provided(condition, rule)


def _better_than_bigram(results: Results, *, models: tuple[str, ...], cell: Cell) -> Verdict:
    values = [
        record.values
        for record in results.select(**cell)
        if BITS in record.values and (not models or record.cell["model"] in models)
    ]
    if not values:
        raise NotMeasured(f"{BITS} were not measured")
    pairs = [(float(x[BITS]), float(x.get(BIGRAM, math.inf))) for x in values]  # type: ignore[arg-type]
    lowest, bigram = min((bits for bits, _ in pairs)), pairs[0][1]
    return verdict(
        any(bits < level for bits, level in pairs),
        f"The lowest value is {lowest:.3f} {BITS}, and a byte bigram has {bigram:.3f}.",
    )


# -- one model -------------------------------------------------------------------------------------


def model_for_cell(config: Config, model: ModelSpec, **cell: Any) -> RecollectConfig:
    """Return the configuration of the model that a cell trains, which may have a recipe or mixer.

    Values of the cell replace those of the configuration.
    """
    from recollect.experiments.comparison.results import Schedule

    settings = {**config, **cell}
    # Length and schedule do not change a model, so that one search serves all of them.
    sizes = replace(_sizes(settings), length=1, schedule=Schedule(steps=1, batch=1))
    vocab = settings.get("vocab", _BYTES)
    return copy.deepcopy(_match_parameters(model, vocab, sizes, settings["parameters"]))


@lru_cache(maxsize=64)
def _match_parameters(
    model: ModelSpec, vocab: int, sizes: Sizes, parameters: int
) -> RecollectConfig:
    from recollect.experiments.comparison.compare import build_configs, resolve_model

    (config,) = build_configs([resolve_model(model)], vocab, sizes, "auto", parameters, conv=False)
    return config


def _sizes(settings: Mapping[str, Any]) -> Sizes:
    from recollect.experiments.comparison.results import Schedule, Sizes

    steps, batch = _num_steps(settings), _batch_size(settings)
    return Sizes(
        width=settings["width"],
        depth=settings["depth"],
        heads=_num_heads(settings),
        length=settings["length"],
        schedule=Schedule(steps=steps, batch=batch, lr=settings["lr"], evaluations=1),
    )


def _num_heads(settings: Mapping[str, Any]) -> int:
    width, channels = settings["width"], settings.get("channels")
    return width // channels if channels else settings["heads"]


def _batch_size(settings: Mapping[str, Any]) -> int:
    return max(1, settings["step_tokens"] // settings["length"])


def _num_steps(settings: Mapping[str, Any]) -> int:
    if "steps" in settings:
        return settings["steps"]
    return -(-settings["tokens"] // settings["step_tokens"])


def language_model(
    config: Config, model: ModelSpec, *, seed: int, device: torch.device, **cell: Any
) -> Values:
    """Train a language model as in `model_for_cell` and measure it.

    All models of a grid have the same weights and order of sequences for a seed. The result has
    `BITS`, and parameters, FLOPs and tokens of the training. A model of bytes also has the bytes of
    a decoder's state after a sequence, ``"bits by position"`` (means at positions 0, 1, 2 to 3, 4
    to 7, …), the training loss in bits and `BIGRAM`. A plan also has every number of its tasks. A
    model that diverged has the value NaN for `BITS`.
    """
    from recollect.lm.memory_estimate.flops import model_flops
    from recollect.lm.model.counts import parameter_count

    settings = {**config, **cell}
    model_config = model_for_cell(config, model, **cell)
    tokens = _num_steps(settings) * _batch_size(settings) * settings["length"]
    costs = {
        "parameters": float(parameter_count(model_config)),
        "FLOPs": model_flops(model_config, context=settings["length"]) * tokens,
        "tokens": float(tokens),
    }
    if "data" in settings:
        return costs | _train_from_plan(settings, model, model_config, seed, device)
    return costs | _train_on_bytes(settings, model_config, seed, device)


# -- models of bytes -------------------------------------------------------------------------------


_text = lru_cache(maxsize=1)(load_text)
_bigram = lru_cache(maxsize=1)(bigram_bits_per_byte)


def _train_on_bytes(
    settings: Mapping[str, Any], model_config: RecollectConfig, seed: int, device: torch.device
) -> dict[str, Any]:
    from recollect.experiments.comparison.results import History
    from recollect.experiments.comparison.tasks import compare_task
    from recollect.experiments.comparison.training import state_bytes, train
    from recollect.lm.model.model import RecollectForCausalLM
    from recollect.lm.training.divergence import Diverged

    corpus, sizes = _text(), _sizes(settings)
    torch.manual_seed(seed)
    model = RecollectForCausalLM(model_config)
    num_state_bytes, _ = state_bytes(model, sizes.length)
    starts = _span_starts(sizes.length)
    history, by_position, diverged = History(), [math.nan] * len(starts), math.nan

    def evaluate(model: nn.Module) -> float:
        bits = _bits_by_position(model, corpus, sizes, settings["measured"])
        spans = pairwise([*starts, sizes.length])
        by_position[:] = [float(bits[start:end].mean()) for start, end in spans]
        return float(bits.mean())

    try:
        train(
            model,
            compare_task("text", sizes, seed, corpus).examples,
            sizes.schedule,
            evaluate=evaluate,
            seed=seed,
            history=history,
            device=device,
        )
    except Diverged as error:
        diverged = float(error.step)
    return {
        BITS: history.curve[-1][1] if history.finished else math.nan,
        "state bytes": float(num_state_bytes),
        "diverged at step": diverged,
        BIGRAM: _bigram(corpus),
        "bits by position": by_position,
        "training bits": [loss / math.log(2) for _, loss in history.losses],
    }


def _span_starts(length: int) -> list[int]:
    """Return the first positions of the spans 0, 1, 2 to 3, 4 to 7 and so on."""
    return [0, *(2**power for power in range(max(length - 1, 0).bit_length()))]


def _bits_by_position(model: nn.Module, corpus: TextCorpus, sizes: Sizes, limit: int) -> Tensor:
    """Return the mean bits of a held-out byte at each position of a full sequence, ``[T]``."""
    sums, count = torch.zeros(sizes.length, dtype=torch.float64), 0
    batch, device = sizes.schedule.batch, next(model.parameters()).device
    for inputs, labels in heldout_windows(corpus, length=sizes.length, batch=batch, limit=limit):
        is_full = (labels != IGNORE).all(-1)
        inputs, labels = inputs[is_full].to(device), labels[is_full].to(device)
        logits = model(input_ids=inputs).logits.float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        sums += losses.double().sum(0).cpu()
        count += len(losses)
    return sums / max(count, 1) / math.log(2)


# -- plans of the papers' scale --------------------------------------------------------------------


def _train_from_plan(
    settings: Mapping[str, Any],
    model: ModelSpec,
    model_config: RecollectConfig,
    seed: int,
    device: torch.device,
) -> dict[str, Any]:
    """Train by `recollect.lm.train`, which continues an earlier run, and evaluate."""
    from recollect.experiments.comparison.compare import resolve_model
    from recollect.lm.evaluation.evaluate import evaluate  # needs the extra eval
    from recollect.lm.training.divergence import Diverged
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.train import train

    tables = {
        "model": {
            "recipes": dict(model_config.recipes),
            "width": settings["width"],
            "depth": settings["depth"],
            "heads": _num_heads(settings),
            "parameters": settings["parameters"],
        },
        "data": {**settings["data"], "context": settings["length"]},
        "optimizer": {
            "lr": settings["lr"],
            "steps": _num_steps(settings),
            "batch": 1,
            "accumulate": _batch_size(settings),
        },
        "run": {"seed": seed, "device": str(device), "bf16": device.type == "cuda"},
    }
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(settings["folder"]) / f"{resolve_model(model)[0].replace(' ', '_')}-{digest}"
    tables["run"]["out"] = str(folder)
    try:
        trained = train(TrainPlan.from_dict(tables), resume=folder.exists())
    except Diverged as error:
        return {BITS: math.nan, "diverged at step": float(error.step)}
    values = {} if trained.heldout is None else {BITS: trained.heldout}
    if settings["tasks"]:
        evaluation = evaluate(
            trained.folder,
            settings["tasks"],
            out=folder / "evaluation",
            context=settings["length"],
            device=str(device),
        )
        values |= _task_metrics({result.task: result.metrics for result in evaluation.tasks})
    return values


def _task_metrics(tasks: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return every metric by task, `BITS` of WikiText, and the average accuracy if complete."""
    values = {f"{task} {name}": x for task, metrics in tasks.items() for name, x in metrics.items()}
    if "wikitext bits_per_byte" in values:
        values[BITS] = values["wikitext bits_per_byte"]
    accuracies = [values.get(f"{task} {name}") for task, name in COMMON_SENSE.items()]
    if all(x is not None for x in accuracies):
        values["accuracy"] = sum(accuracies) / len(accuracies)  # type: ignore[arg-type]
    return values
