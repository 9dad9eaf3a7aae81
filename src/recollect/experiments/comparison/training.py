"""Training of a comparison's models, in sequence or in worker processes of one thread each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recollect.experiments.comparison.results import (
    History,
    ModelRun,
    ProgressReporter,
    Schedule,
    Sizes,
)
from recollect.experiments.comparison.tasks import CompareTask, compare_task
from recollect.experiments.framework.fitting import TrainingStep, training_steps
from recollect.experiments.framework.workers import (
    POLL_SECONDS,
    WorkerFailure,
    run_in_workers,
    send_to_parent,
    stop_requested,
)
from recollect.lm.model.cache import cache_of
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.divergence import (
    INNER_STEPS_HINT,
    NUMERICAL_ERRORS,
    Diverged,
    find_origin,
)
from recollect.lm.training.weight_decay import parameter_groups
from recollect.report.devices import resolve_device
from recollect.report.environment import Environment, describe_environment
from recollect.tasks.mqar import IGNORE
from recollect.tasks.text import TextCorpus

__all__ = [
    "Job",
    "JobRunner",
    "RunOrError",
    "run_jobs",
    "state_bytes",
    "train",
    "training_environment",
]

T = TypeVar("T")

LOSS_AVERAGE_STEPS = 10
"""Number of steps over which a logged loss is averaged."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train on one task with one seed."""

    task: str
    model: str
    config: RecollectConfig
    size: Sizes
    seed: int
    num_seeds: int = 1
    device: str | None = None

    @property
    def label(self) -> str:
        """Name of the model, with the seed if the comparison has several."""
        return f"{self.model}, seed {self.seed}" if self.num_seeds > 1 else self.model


RunOrError = ModelRun | str
"""The run of a job, or the reason why its model could not be trained."""


def run_jobs(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, progress: ProgressReporter
) -> Iterator[tuple[Job, RunOrError]]:
    """Train the models, and yield each run or failure when it ends.

    A keyboard interrupt stops the current runs. Their partial results are yielded, with no tokens
    if a run had not started, and then `KeyboardInterrupt` is raised.
    """
    if _threads(len(jobs), processes) is None:
        outcomes = _run_serial(jobs, corpus, progress)
    else:
        outcomes = _run_parallel(jobs, corpus, min(processes, len(jobs)), progress)
    for job, outcome in outcomes:
        try:
            if isinstance(outcome, str):
                progress.on_failure(job.task, job.label, outcome)
            elif outcome.tokens:
                progress.on_end(outcome)
        finally:  # an interrupt in the progress loses no result
            yield job, outcome


def training_environment(num_jobs: int, processes: int, device: torch.device) -> Environment:
    """Describe the environment of `run_jobs`, with the number of threads per process."""
    environment = describe_environment(device)
    return replace(environment, threads=_threads(num_jobs, processes) or environment.threads)


def _threads(num_jobs: int, processes: int) -> int | None:
    """Return the number of threads per worker; ``None`` without worker processes."""
    return 1 if min(num_jobs, processes) > 1 else None


def _run_serial(
    jobs: Sequence[Job], corpus: TextCorpus | None, progress: ProgressReporter
) -> Iterator[tuple[Job, RunOrError]]:
    runner = JobRunner(corpus)
    for job in jobs:
        outcome = runner.run(job, progress)
        yield job, outcome
        if isinstance(outcome, ModelRun) and not outcome.finished:
            raise KeyboardInterrupt


def _run_parallel(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, progress: ProgressReporter
) -> Iterator[tuple[Job, RunOrError]]:
    def on_message(message: tuple[Any, ...]) -> None:
        event, *values = message
        getattr(progress, event)(*values)

    for job, outcome in run_in_workers(JobRunner(corpus), jobs, processes, on_message=on_message):
        if outcome is not None:
            yield job, outcome.message if isinstance(outcome, WorkerFailure) else outcome


class JobRunner:
    """Runs jobs, and prepares the data of each task, size and seed once."""

    def __init__(self, corpus: TextCorpus | None) -> None:
        self.corpus = corpus
        self.tasks: dict[tuple[str, Sizes, int], CompareTask] = {}

    def __call__(self, job: Job) -> RunOrError | None:
        """Run a job in a worker; ``None`` if a stop was requested before it started."""
        return None if stop_requested() else self.run(job, _ParentReporter())

    def run(self, job: Job, progress: ProgressReporter) -> RunOrError:
        """Run a job; an error becomes its message."""
        key = job.task, job.size, job.seed
        try:
            if key not in self.tasks:
                self.tasks[key] = compare_task(job.task, job.size, job.seed, self.corpus)
            return _train_model(job, self.tasks[key], progress)
        except (ValueError, RuntimeError) as error:
            return str(error)


class _ParentReporter(ProgressReporter):
    """Sends the events of a worker to the parent, and raises `KeyboardInterrupt` on its request.

    The end of a run is not sent, because the parent receives its result.
    """

    def __init__(self) -> None:
        self.last_sent = 0.0

    def on_start(self, task: str, model: str, parameters: int, steps: int) -> None:
        _check_stop()
        send_to_parent(("on_start", task, model, parameters, steps))

    def on_step(
        self, task: str, model: str, step: int, loss: float | None, history: History
    ) -> None:
        _check_stop()
        now = time.monotonic()
        if now - self.last_sent > POLL_SECONDS:
            self.last_sent = now
            latest = replace(history, losses=history.losses[-1:], curve=history.curve[-1:])
            send_to_parent(("on_step", task, model, step, loss, latest))


def _check_stop() -> None:
    if stop_requested():
        raise KeyboardInterrupt


def _train_model(job: Job, task: CompareTask, progress: ProgressReporter) -> ModelRun:
    """Train and evaluate a model; after an interrupt the run has the measurements up to then."""
    start = time.process_time()
    torch.manual_seed(job.seed)
    model = RecollectForCausalLM(job.config)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    nbytes, grows = state_bytes(model, job.size.length)
    history, steps = History(), job.size.schedule.steps
    by_pairs: dict[int, float] = {}
    try:
        progress.on_start(job.task, job.label, parameters, steps)
        train(
            model,
            task.examples,
            job.size.schedule,
            evaluate=task.evaluate,
            seed=job.seed,
            history=history,
            on_step=lambda *event: progress.on_step(job.task, job.label, *event),
            device=resolve_device(job.device, argument_name="device"),
        )
        model.eval()
        value, by_pairs = evaluate_no_grad(model, task.evaluate_full, steps)
    except KeyboardInterrupt:
        history.finished = False
        value = history.curve[-1][1] if history.curve else None
    return ModelRun(
        task=job.task,
        model=job.model,
        parameters=parameters,
        state_bytes=nbytes,
        grows=grows,
        value=value,
        by_pairs=by_pairs,
        curve=tuple(history.curve),
        tokens=history.tokens,
        tokens_per_second=history.tokens_per_second,
        seconds=history.seconds,
        cpu_seconds=time.process_time() - start,
        finished=history.finished,
        seed=job.seed if job.num_seeds > 1 else None,
        options={
            f"{name}.{path}" if path else name: leaf.options.to_dict()
            for name in job.config.recipes
            for path, leaf in job.config.mixer(name).leaves.items()
        },
    )


def state_bytes(model: RecollectForCausalLM, length: int) -> tuple[int, bool]:
    """Return the bytes of a decoder's state after ``length`` tokens, and whether they grow."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        half, full = (
            cache_of(
                model(torch.zeros(1, count, dtype=torch.long, device=device), use_cache=True)
            ).nbytes
            for count in (length // 2, length)
        )
    model.train()
    return full, full > half


def train(
    model: nn.Module,
    examples: tuple[Tensor, Tensor],
    schedule: Schedule,
    *,
    evaluate: Callable[[nn.Module], float],
    seed: int,
    history: History,
    on_step: Callable[[int, float | None, History], None] | None = None,
    device: torch.device | None = None,
) -> None:
    """Train a model in place, and fill ``history``.

    Models with one seed receive the same examples in the same order. ``evaluate`` is called at the
    schedule's checkpoints, and ``on_step`` after every step with the latest logged loss.

    Raises:
        Diverged: a loss or a gradient is not finite.
    """
    model.to(device or resolve_device(None, argument_name="device"))
    inputs, labels = examples
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    indices = order[: schedule.steps * schedule.batch].split(schedule.batch)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return inputs[indices[step - 1]], labels[indices[step - 1]]

    steps = training_steps(
        model,
        map(batch, range(1, len(indices) + 1)),
        # Fused, as for the numbers in results/: rounding differs otherwise.
        torch.optim.AdamW(parameter_groups(model, weight_decay=schedule.weight_decay), fused=True),
        schedule.lr_at,
        clip=schedule.clip,
        predict=lambda x: model(input_ids=x).logits,
    )
    recent_losses: list[float] = []
    start = time.perf_counter()
    for step in _until_nonfinite(steps, model, batch, schedule):
        history.seconds += time.perf_counter() - start
        history.tokens += schedule.batch * inputs[0].numel()
        recent_losses.append(step.loss)
        if len(recent_losses) == LOSS_AVERAGE_STEPS:
            history.losses.append((step.number, sum(recent_losses) / LOSS_AVERAGE_STEPS))
            recent_losses.clear()
        if step.number in schedule.checkpoints:
            model.eval()
            value = evaluate_no_grad(model, evaluate, step.number)
            history.curve.append((history.tokens, value))
        if on_step is not None:
            on_step(step.number, history.losses[-1][1] if history.losses else None, history)
        start = time.perf_counter()
    history.finished = True


def evaluate_no_grad(model: nn.Module, evaluate: Callable[[nn.Module], T], step: int) -> T:
    """Evaluate a model without gradients; raise `Diverged` if a layer's output is not finite."""

    def replay() -> list[Tensor]:
        evaluate(model)
        return []

    with torch.no_grad():
        try:
            return evaluate(model)
        except NUMERICAL_ERRORS as error:
            if (origin := find_origin(model, replay)) is None:
                raise
            origin = f"when it is measured, {origin}"
            raise Diverged(step=step, lr=None, origin=origin, advice=INNER_STEPS_HINT) from error


def _until_nonfinite(
    steps: Iterator[TrainingStep],
    model: nn.Module,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    schedule: Schedule,
) -> Iterator[TrainingStep]:
    """Yield the steps; raise `Diverged` at a loss or a gradient that is not finite."""

    def diverged(step: int) -> Diverged:
        inputs, labels = (x.to(next(model.parameters()).device) for x in batch(step))

        def loss() -> list[Tensor]:
            logits = model(input_ids=inputs).logits.flatten(0, 1).float()
            return [nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE)]

        return Diverged(
            step=step,
            lr=schedule.lr_at(step - 1),
            origin=find_origin(model, loss),
            advice="take a lower lr",
        )

    for number in itertools.count(1):
        try:
            step = next(steps, None)
        except NUMERICAL_ERRORS as error:
            if (divergence := diverged(number)).origin is None:
                raise
            raise divergence from error
        if step is None:
            return
        if not step.finite:
            raise diverged(number)
        yield step
