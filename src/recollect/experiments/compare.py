"""`compare`: train several recipes at equal parameters and tokens, and judge them side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from recollect.experiments.records import plain
from recollect.experiments.training import Examples, History, Schedule, train
from recollect.lm import RecollectConfig, RecollectForCausalLM, match_parameters, parameter_count
from recollect.options import LayerOptions
from recollect.recipe import Recipe
from recollect.report.environment import Environment, describe_environment
from recollect.tasks.mqar import IGNORE, MqarConfig, mqar
from recollect.tasks.text import (
    TextCorpus,
    batches,
    bigram_bits_per_byte,
    heldout_windows,
    load_text,
)
from recollect.zoo import Preset, get

__all__ = ["TASKS", "Comparison", "ModelRun", "Named", "Sizes", "Watcher", "compare", "named"]

TASKS = ("text", "mqar")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How big a task's models and runs are.

    Attributes:
        width, depth, heads: of the model; its feed-forward width is set so that all models of a
            comparison have equal parameters.
        length: tokens per example.
        schedule: steps, batch, learning rate.
        key_dim: K of every memory whose preset does not say; width / heads if ``None``.
    """

    width: int
    depth: int
    heads: int
    length: int
    schedule: Schedule
    key_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "length", "key_dim"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"Sizes: {name} must be at least 1, not {size}")

    def but(
        self,
        *,
        steps: int | None = None,
        lr: float | None = None,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        length: int | None = None,
        batch: int | None = None,
        tokens: int | None = None,
        key_dim: int | None = None,
    ) -> Sizes:
        """These sizes with what is given replaced; ``tokens`` sets the steps, rounded up.

        Raises:
            ValueError: a size below 1, or both steps and tokens.
        """
        given = {"steps": steps, "lr": lr, "batch": batch}
        schedule = replace(self.schedule, **{name: x for name, x in given.items() if x is not None})
        sizes = {
            "width": width,
            "depth": depth,
            "heads": heads,
            "length": length,
            "key_dim": key_dim,
        }
        changed = replace(
            self, schedule=schedule, **{name: x for name, x in sizes.items() if x is not None}
        )
        if tokens is None:
            return changed
        if steps is not None:
            raise ValueError("steps and tokens exclude each other: one follows from the other")
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, not {tokens}")
        steps = -(-tokens // (schedule.batch * changed.length))
        return replace(changed, schedule=replace(schedule, steps=steps))


DEFAULTS: dict[str, Sizes] = {
    "text": Sizes(
        width=128, depth=2, heads=4, length=256, schedule=Schedule(steps=180, batch=8, lr=4e-3)
    ),
    # One head: a memory of 64 x 64 holds every pair, and recall is learned within a minute.
    "mqar": Sizes(
        width=64, depth=2, heads=1, length=48, schedule=Schedule(steps=300, batch=48, lr=7e-3)
    ),
}
MQAR_VOCAB = 64
MQAR_PAIRS = (4, 8, 12)
MQAR_BEYOND = (16, 24)
"""Pair counts that are asked but never trained on: does what was learned hold more?"""


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """One model on one task.

    Attributes:
        parameters: trained numbers.
        state_bytes: what decoding must keep per sequence after ``length`` tokens.
        grows: whether that grows with the sequence.
        value: bits per held-out byte (text), or accuracy over all pair counts (mqar).
        by_pairs: accuracy by number of pairs (mqar).
        curve: (training tokens, value).
        finished: False when the run was interrupted; the numbers are those so far.
    """

    task: str
    model: str
    parameters: int
    state_bytes: int
    grows: bool
    value: float | None
    by_pairs: dict[int, float] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()
    tokens: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    finished: bool = True


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison, whole or interrupted.

    Attributes:
        runs: in the order they were made.
        bigram: bits per byte of a smoothed byte bigram on the same held-out text.
        text: source and digest of the text.
        chance: accuracy of guessing among the values (mqar).
        interrupted: whether somebody stopped it.
        failures: (task, model, reason) of models that could not be trained.
    """

    runs: tuple[ModelRun, ...]
    sizes: Mapping[str, Sizes]
    seed: int
    environment: Environment
    bigram: float | None = None
    text: Mapping[str, str] = field(default_factory=dict)
    chance: float | None = None
    interrupted: bool = False
    failures: tuple[tuple[str, str, str], ...] = ()

    def of(self, task: str) -> list[ModelRun]:
        """The runs of one task."""
        return [run for run in self.runs if run.task == task]

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            **plain(asdict(self)),
            "environment": self.environment.to_dict(),
            "schema": 1,
        }


class Watcher(Protocol):
    """Whoever shows progress."""

    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        """A model starts."""

    def step(self, step: int, loss: float | None, history: History) -> None:
        """A step was taken."""

    def end(self, run: ModelRun) -> None:
        """A model is done."""


class _Nobody:
    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        pass

    def step(self, step: int, loss: float | None, history: History) -> None:
        pass

    def end(self, run: ModelRun) -> None:
        pass


Named = str | Preset | tuple[str, Recipe] | tuple[str, Recipe, LayerOptions]
"""A zoo name, a preset, or a recipe of one's own under a name, with its options or without."""


def named(model: Named) -> tuple[str, Recipe, LayerOptions]:
    """The model's name, recipe and options."""
    if isinstance(model, tuple):
        return (*model, LayerOptions()) if len(model) == 2 else model
    preset = get(model) if isinstance(model, str) else model
    return preset.name, preset.recipe, preset.options


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A task made ready: tokens to train on, and how to measure."""

    vocab: int
    examples: Examples
    evaluate: Callable[[nn.Module], float]
    final: Callable[[nn.Module], tuple[float, dict[int, float]]]
    conv: bool


def compare(
    models: Sequence[Named],
    tasks: Sequence[str] = TASKS,
    *,
    text: str | None = None,
    corpus: TextCorpus | None = None,
    sizes: Mapping[str, Sizes] | None = None,
    seed: int = 0,
    method: str = "auto",
    parameters: int | None = None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Train each model on each task at equal parameters and tokens.

    Args:
        models: zoo names, presets, or ``(name, recipe)`` or ``(name, recipe, options)`` of your
        own.
        tasks: out of `TASKS`.
        text: path of a text of your own; the default is the documentation installed with Python.
        corpus: a text already loaded, instead of ``text``.
        sizes: per task, in place of `DEFAULTS`.
        seed: of initial weights, examples and their order.
        method: engine, as in `recall`.
        parameters: that every model is brought to; the largest model's when omitted. Runs that give
            the same number can be laid side by side.
        watcher: told about progress.

    Returns:
        The comparison. A keyboard interrupt ends it early and is noted in it; nothing measured is
        lost.

    Raises:
        ValueError: no models, a name twice, or an unknown task.
        RecipeError: an unknown zoo name.
    """
    chosen = [named(model) for model in models]
    names = [name for name, _, _ in chosen]
    if not chosen:
        raise ValueError("compare needs at least one model")
    if len(set(names)) < len(names):
        raise ValueError(f"compare: a model is named twice in {', '.join(names)}")
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"compare: unknown task {task!r}; there are {', '.join(TASKS)}")
    watcher = watcher or _Nobody()
    every = {task: (sizes or {}).get(task, DEFAULTS[task]) for task in dict.fromkeys(tasks)}
    runs: list[ModelRun] = []
    failures: list[tuple[str, str, str]] = []
    facts: dict[str, str] = {}
    bigram = chance = None
    interrupted = False
    try:
        for task, size in every.items():
            if task == "text":
                corpus = corpus or load_text(text)
                bigram = bigram_bits_per_byte(corpus)
                facts = {"source": corpus.source, "sha256": corpus.sha256}
                ready = _text_task(corpus, size, seed)
            else:
                chance = 2 / MQAR_VOCAB
                ready = _mqar_task(size, seed)
            configs = _equal_configs(chosen, ready, size, method, parameters)
            for name, config in zip(names, configs, strict=True):
                try:
                    interrupted = _run(task, name, config, ready, size, seed, runs, watcher)
                except (ValueError, RuntimeError) as error:
                    # The others are worth having; the reason stands in the report.
                    failures.append((task, name, str(error)))
                if interrupted:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    return Comparison(
        runs=tuple(runs),
        sizes=every,
        seed=seed,
        environment=describe_environment(),
        bigram=bigram,
        text=facts,
        chance=chance,
        interrupted=interrupted,
        failures=tuple(failures),
    )


def _equal_configs(
    chosen: Sequence[tuple[str, Recipe, LayerOptions]],
    task: _Task,
    size: Sizes,
    method: str,
    parameters: int | None,
) -> list[RecollectConfig]:
    configs = [
        RecollectConfig.from_recipes(
            {name: (recipe, _sized(_with_conv(options) if task.conv else options, size))},
            vocab_size=task.vocab,
            hidden_size=size.width,
            num_hidden_layers=size.depth,
            num_attention_heads=size.heads,
            method=method,
        )
        for name, recipe, options in chosen
    ]
    # All are brought to the largest, so that no model loses what its recipe needs.
    target = parameters or max(parameter_count(config) for config in configs)
    return match_parameters(configs, target)


def _with_conv(options: LayerOptions) -> LayerOptions:
    """Recall is told to every model with a short convolution, as in the zoology benchmark."""
    return options if options.conv else replace(options, conv=4)


def _sized(options: LayerOptions, size: Sizes) -> LayerOptions:
    """Keys of the asked size, where the preset has none of its own."""
    if size.key_dim is None or options.key_dim is not None:
        return options
    return replace(options, key_dim=size.key_dim)


def _run(
    task: str,
    name: str,
    config: RecollectConfig,
    ready: _Task,
    size: Sizes,
    seed: int,
    runs: list[ModelRun],
    watcher: Watcher,
) -> bool:
    """Train one model and note it; True when interrupted."""
    torch.manual_seed(seed)
    model = RecollectForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state_bytes, grows = _state_bytes(model, size.length)
    history = History()
    watcher.begin(task, name, parameters, size.schedule.steps)
    interrupted = False
    try:
        train(
            model,
            ready.examples,
            size.schedule,
            evaluate=ready.evaluate,
            seed=seed,
            history=history,
            watch=watcher.step,
        )
    except KeyboardInterrupt:
        interrupted = True
    value, by_pairs = (history.curve[-1][1] if history.curve else None), {}
    if not interrupted:
        model.eval()
        with torch.no_grad():
            value, by_pairs = ready.final(model)
    run = ModelRun(
        task=task,
        model=name,
        parameters=parameters,
        state_bytes=state_bytes,
        grows=grows,
        value=value,
        by_pairs=by_pairs,
        curve=tuple(history.curve),
        tokens=history.tokens,
        tokens_per_second=history.tokens_per_second,
        seconds=history.seconds,
        finished=history.finished,
    )
    runs.append(run)
    watcher.end(run)
    return interrupted


def _state_bytes(model: RecollectForCausalLM, length: int) -> tuple[int, bool]:
    """Bytes a decoder keeps per sequence after ``length`` tokens, and whether they grow."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        sizes = [
            model(
                input_ids=torch.zeros(1, count, dtype=torch.long, device=device), use_cache=True
            ).past_key_values.nbytes
            for count in (length // 2, length)
        ]
    model.train()
    return sizes[1], sizes[1] > sizes[0]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _text_task(corpus: TextCorpus, size: Sizes, seed: int) -> _Task:
    generator = torch.Generator().manual_seed(seed)
    stream = batches(corpus, length=size.length, batch=size.schedule.batch, generator=generator)
    examples = Examples(next(stream) for _ in range(size.schedule.steps))

    def bits(model: nn.Module, limit: int | None) -> float:
        total, count = 0.0, 0
        for inputs, labels in heldout_windows(
            corpus, length=size.length, batch=4 * size.schedule.batch, limit=limit
        ):
            asked, loss = _asked(model, inputs, labels)
            total, count = total + float(loss.sum()), count + int(asked.sum())
        return total / count / math.log(2)

    return _Task(
        vocab=corpus.vocab,
        examples=examples,
        evaluate=lambda model: bits(model, 16_384),
        final=lambda model: (bits(model, 131_072), {}),
        conv=False,
    )


def _asked(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where a label asks something, and the loss there in nats."""
    device = _device(model)
    logits = model(input_ids=inputs.to(device)).logits.float()
    labels = labels.to(device)
    asked = labels != IGNORE
    loss = nn.functional.cross_entropy(logits[asked], labels[asked], reduction="none")
    return asked, loss


def _mqar_task(size: Sizes, seed: int) -> _Task:
    generator = torch.Generator().manual_seed(seed)
    configs = [
        MqarConfig(vocab=MQAR_VOCAB, pairs=pairs, length=size.length) for pairs in MQAR_PAIRS
    ]
    count = size.schedule.steps * size.schedule.batch
    share = math.ceil(count / len(configs))
    examples = Examples([mqar(config, share, generator) for config in configs])
    test = torch.Generator().manual_seed(seed + 1_000_003)
    beyond = [
        MqarConfig(vocab=MQAR_VOCAB, pairs=pairs, length=max(size.length, 4 * pairs))
        for pairs in MQAR_BEYOND
    ]
    held = {config.pairs: mqar(config, 256, test) for config in (*configs, *beyond)}

    def accuracy(model: nn.Module, limit: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for pairs, (inputs, labels) in held.items():
            logits = model(input_ids=inputs[:limit].to(_device(model))).logits
            here = labels[:limit].to(logits.device)
            asked = here != IGNORE
            found[pairs] = float((logits.argmax(-1)[asked] == here[asked]).float().mean())
        return found

    def final(model: nn.Module) -> tuple[float, dict[int, float]]:
        by_pairs = accuracy(model, 256)
        return sum(by_pairs.values()) / len(by_pairs), by_pairs

    def evaluate(model: nn.Module) -> float:
        by_pairs = accuracy(model, 64)
        return sum(by_pairs.values()) / len(by_pairs)

    return _Task(vocab=MQAR_VOCAB, examples=examples, evaluate=evaluate, final=final, conv=True)
