"""The runs of a comparison: one after another, or in processes of one thread each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from recollect.experiments.comparison.results import ModelRun, Sizes, Watcher
from recollect.experiments.comparison.tasks import CompareTask, compare_task
from recollect.experiments.comparison.training import History, measured, train
from recollect.experiments.framework.processes import GLANCE, Lost, in_processes, stopped, tell
from recollect.lm.model.cache import cache_of
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.report.devices import resolve_device
from recollect.report.environment import Environment, describe_environment
from recollect.tasks.text import TextCorpus

__all__ = ["Job", "Outcome", "run_jobs", "state_bytes", "training_environment"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train on one task.

    Attributes:
        task, model, config, size, seed: what is trained, on what.
        several: whether the comparison has several seeds.
        device: as `resolve_device` takes it.
    """

    task: str
    model: str
    config: RecollectConfig
    size: Sizes
    seed: int
    several: bool = False
    device: str | None = None

    @property
    def label(self) -> str:
        """The model, and the seed where there are several."""
        return f"{self.model}, seed {self.seed}" if self.several else self.model


Outcome = ModelRun | str
"""What was measured, or why the model could not be trained."""


def run_jobs(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, watcher: Watcher
) -> Iterator[tuple[Job, Outcome]]:
    """Train, and give what comes of each as it ends; a failure does not lose the others.

    A keyboard interrupt stops the runs on their way, gives what they have measured so far (those
    that had not begun have no tokens), and raises `KeyboardInterrupt` when all has been given.

    Args:
        corpus: of the task text.
        processes: with more than one, each has one thread and takes jobs in their order.
    """
    several = _threads(len(jobs), processes) is not None
    outcomes = (
        _side_by_side(jobs, corpus, min(processes, len(jobs)), watcher)
        if several
        else _in_turn(jobs, corpus, watcher)
    )
    for job, outcome in outcomes:
        try:
            if isinstance(outcome, str):
                watcher.fail(job.task, job.label, outcome)
            elif outcome.tokens:
                watcher.end(outcome)
        except KeyboardInterrupt:  # while it was told: nothing that ended is lost
            yield job, outcome
            raise
        yield job, outcome


def training_environment(jobs: int, processes: int, device: torch.device) -> Environment:
    """What so many jobs are trained in: every process has one thread where there are several."""
    environment = describe_environment(device)
    return replace(environment, threads=_threads(jobs, processes) or environment.threads)


def _threads(jobs: int, processes: int) -> int | None:
    """Of every process; ``None`` where this one does all, with the threads it has."""
    return 1 if min(jobs, processes) > 1 else None


def _in_turn(
    jobs: Sequence[Job], corpus: TextCorpus | None, watcher: Watcher
) -> Iterator[tuple[Job, Outcome]]:
    tasks = _Tasks(corpus)
    for job in jobs:
        outcome = _tried(job, tasks, watcher)
        yield job, outcome
        if isinstance(outcome, ModelRun) and not outcome.finished:
            raise KeyboardInterrupt


class _Tasks:
    """Tasks made ready once."""

    def __init__(self, corpus: TextCorpus | None) -> None:
        self.corpus = corpus
        self.ready: dict[tuple[str, int], CompareTask] = {}

    def of(self, job: Job) -> CompareTask:
        which = job.task, job.seed
        if which not in self.ready:
            self.ready[which] = compare_task(job.task, job.size, job.seed, self.corpus)
        return self.ready[which]


def _tried(job: Job, tasks: _Tasks, watcher: Watcher) -> Outcome:
    try:
        return _trained(job, tasks.of(job), watcher)
    except (ValueError, RuntimeError) as error:
        return str(error)


def _trained(job: Job, task: CompareTask, watcher: Watcher) -> ModelRun:
    """Train one model; what it has learned so far when somebody interrupts."""
    began = time.process_time()
    torch.manual_seed(job.seed)
    model = RecollectForCausalLM(job.config)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept, grows = state_bytes(model, job.size.length)
    history = History()
    by_pairs: dict[int, float] = {}
    try:
        watcher.begin(job.task, job.label, parameters, job.size.schedule.steps)
        train(
            model,
            task.examples,
            job.size.schedule,
            evaluate=task.evaluate,
            seed=job.seed,
            history=history,
            watch=lambda step, loss, seen: watcher.step(job.task, job.label, step, loss, seen),
            device=resolve_device(job.device, argument_name="device"),
        )
        model.eval()
        with torch.no_grad():
            value, by_pairs = measured(model, task.final, job.size.schedule.steps)
    except KeyboardInterrupt:
        history.finished = False
        value = history.curve[-1][1] if history.curve else None
    return ModelRun(
        task=job.task,
        model=job.model,
        parameters=parameters,
        state_bytes=kept,
        grows=grows,
        value=value,
        by_pairs=by_pairs,
        curve=tuple(history.curve),
        tokens=history.tokens,
        tokens_per_second=history.tokens_per_second,
        seconds=history.seconds,
        cpu_seconds=time.process_time() - began,
        finished=history.finished,
        seed=job.seed if job.several else None,
        options=_layer_options(job.config),
    )


def _layer_options(config: RecollectConfig) -> dict[str, dict[str, Any]]:
    """Return the options of every recipe of a model, by the name of its layer."""
    return {
        f"{name}.{path}" if path else name: leaf.options.to_dict()
        for name in config.recipes
        for path, leaf in config.mixer(name).leaves.items()
    }


def state_bytes(model: RecollectForCausalLM, length: int) -> tuple[int, bool]:
    """Bytes a decoder keeps per sequence after ``length`` tokens, and whether they grow."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        sizes = [
            cache_of(
                model(torch.zeros(1, count, dtype=torch.long, device=device), use_cache=True)
            ).nbytes
            for count in (length // 2, length)
        ]
    model.train()
    return sizes[1], sizes[1] > sizes[0]


# -- processes -------------------------------------------------------------------------------------


class _Teller(Watcher):
    """In a process of its own: tells what happens, and stops when it is asked to.

    Of an end the first process learns by the outcome.
    """

    def __init__(self) -> None:
        self.told = 0.0

    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        self.heed()
        tell(("begin", task, model, parameters, steps))

    def step(self, task: str, model: str, step: int, loss: float | None, history: History) -> None:
        self.heed()
        now = time.monotonic()
        if now - self.told > GLANCE:  # oftener nobody looks
            self.told = now
            latest = replace(history, losses=history.losses[-1:], curve=history.curve[-1:])
            tell(("step", task, model, step, loss, latest))

    def heed(self) -> None:
        if stopped():
            raise KeyboardInterrupt


class _There:
    """What comes of a job in another process; ``None`` where it was stopped before it began."""

    def __init__(self, corpus: TextCorpus | None) -> None:
        self.tasks = _Tasks(corpus)

    def __call__(self, job: Job) -> Outcome | None:
        return None if stopped() else _tried(job, self.tasks, _Teller())


def _side_by_side(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, watcher: Watcher
) -> Iterator[tuple[Job, Outcome]]:
    calls: dict[str, Callable[..., None]] = {"begin": watcher.begin, "step": watcher.step}

    def hear(said: tuple[Any, ...]) -> None:
        calls[said[0]](*said[1:])

    for job, outcome in in_processes(_There(corpus), jobs, processes, hear=hear):
        if isinstance(outcome, Lost):
            yield job, outcome.reason
        elif outcome is not None:
            yield job, outcome
