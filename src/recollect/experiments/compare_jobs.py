"""The runs of a comparison: one after another, or in processes of one thread each."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from typing import Any

import torch

from recollect.experiments.compare_tasks import CompareTask, compare_task
from recollect.experiments.comparison import ModelRun, Sizes, Watcher
from recollect.experiments.training import History, train
from recollect.lm import RecollectConfig, RecollectForCausalLM
from recollect.report.environment import Environment, describe_environment
from recollect.tasks.text import TextCorpus

__all__ = ["Job", "Outcome", "run_jobs", "training_environment"]

GLANCE = 0.1
"""Seconds between two looks at what other processes say; the least between two steps they tell."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train on one task."""

    task: str
    model: str
    config: RecollectConfig
    size: Sizes
    seed: int


Outcome = ModelRun | str
"""What was measured, or why the model could not be trained."""


def run_jobs(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, watcher: Watcher
) -> Iterator[tuple[Job, Outcome]]:
    """Train, and give what comes of each as it ends; a failure does not lose the others.

    A keyboard interrupt stops the runs on their way, gives what they have measured so far (those
    that had not begun have no tokens), and ends the iteration.

    Args:
        corpus: of the task text.
        processes: with more than one, each has one thread and takes jobs in their order.
    """
    if _threads(len(jobs), processes) is None:
        yield from _in_turn(jobs, corpus, watcher)
    else:
        yield from _side_by_side(jobs, corpus, min(processes, len(jobs)), watcher)


def training_environment(jobs: int, processes: int) -> Environment:
    """What so many jobs are trained in: every process has one thread where there are several."""
    environment = describe_environment()
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
            return


class _Tasks:
    """Tasks made ready once."""

    def __init__(self, corpus: TextCorpus | None) -> None:
        self.corpus = corpus
        self.ready: dict[str, CompareTask] = {}

    def of(self, job: Job) -> CompareTask:
        if job.task not in self.ready:
            self.ready[job.task] = compare_task(job.task, job.size, job.seed, self.corpus)
        return self.ready[job.task]


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
    state_bytes, grows = _state_bytes(model, job.size.length)
    history = History()
    by_pairs: dict[int, float] = {}
    try:
        watcher.begin(job.task, job.model, parameters, job.size.schedule.steps)
        train(
            model,
            task.examples,
            job.size.schedule,
            evaluate=task.evaluate,
            seed=job.seed,
            history=history,
            watch=lambda step, loss, seen: watcher.step(job.task, job.model, step, loss, seen),
        )
        model.eval()
        with torch.no_grad():
            value, by_pairs = task.final(model)
    except KeyboardInterrupt:
        history.finished = False
        value = history.curve[-1][1] if history.curve else None
    run = ModelRun(
        task=job.task,
        model=job.model,
        parameters=parameters,
        state_bytes=state_bytes,
        grows=grows,
        value=value,
        by_pairs=by_pairs,
        curve=tuple(history.curve),
        tokens=history.tokens,
        tokens_per_second=history.tokens_per_second,
        seconds=history.seconds,
        cpu_seconds=time.process_time() - began,
        finished=history.finished,
    )
    if run.tokens:
        watcher.end(run)
    return run


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


# -- processes -------------------------------------------------------------------------------------


class _Teller:
    """In a process of its own: tells what happens, and stops when it is asked to."""

    def __init__(self, events: SimpleQueue[Any], stop: Event) -> None:
        self.events, self.stop = events, stop
        self.told = 0.0

    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        self._heed()
        self.events.put(("begin", task, model, parameters, steps))

    def step(self, task: str, model: str, step: int, loss: float | None, history: History) -> None:
        now = time.monotonic()
        if now - self.told > GLANCE:
            self.told = now
            self.events.put(("step", task, model, step, loss, history))
        self._heed()

    def end(self, run: ModelRun) -> None:
        self.events.put(("end", run))

    def _heed(self) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt


_tasks: _Tasks
_teller: _Teller


def _enter(corpus: TextCorpus | None, events: SimpleQueue[Any], stop: Event) -> None:
    """Several processes with one thread each use the cores better than one with many.

    The terminal interrupts every process; only the first one acts on it, through ``stop``.
    """
    global _tasks, _teller
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _tasks, _teller = _Tasks(corpus), _Teller(events, stop)


def _here(job: Job) -> Outcome:
    return _tried(job, _tasks, _teller)


def _side_by_side(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, watcher: Watcher
) -> Iterator[tuple[Job, Outcome]]:
    # Threads of torch do not survive a fork; a fresh process imports everything again.
    context = multiprocessing.get_context("spawn")
    events, stop = context.SimpleQueue(), context.Event()
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_enter, initargs=(corpus, events, stop)
    )
    waiting: dict[Future[Outcome], Job] = {pool.submit(_here, job): job for job in jobs}
    try:
        while waiting:
            try:
                done, _ = wait(waiting, GLANCE, FIRST_COMPLETED)
                _tell(events, watcher)
            except KeyboardInterrupt:
                stop.set()
                for future in [future for future in waiting if future.cancel()]:
                    del waiting[future]
                continue
            for future in done:
                yield waiting.pop(future), _outcome(future)
        _tell(events, watcher)
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        return "its process ended without a word, most likely out of memory; try fewer --jobs"
    except Exception as error:  # it could not be sent to its process
        return f"{type(error).__name__}: {error}; without --jobs it needs no process of its own"


def _tell(events: SimpleQueue[Any], watcher: Watcher) -> None:
    """Hand on what the processes said."""
    calls: dict[str, Callable[..., None]] = {
        "begin": watcher.begin,
        "step": watcher.step,
        "end": watcher.end,
    }
    while not events.empty():
        name, *said = events.get()
        calls[name](*said)
