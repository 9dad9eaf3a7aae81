"""The runs of a comparison: one after another, or in processes of one thread each."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from types import FrameType
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
        if isinstance(outcome, str):
            watcher.fail(job.task, job.model, outcome)
        elif outcome.tokens:
            watcher.end(outcome)
        yield job, outcome


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
            raise KeyboardInterrupt


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
    return ModelRun(
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

    def __init__(self, events: SimpleQueue[Any], stop: Any) -> None:
        self.events, self.stop = events, stop
        self.told = 0.0

    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        self.heed()
        self.events.put(("begin", task, model, parameters, steps))

    def step(self, task: str, model: str, step: int, loss: float | None, history: History) -> None:
        self.heed()
        now = time.monotonic()
        if now - self.told > GLANCE:
            self.told = now
            # The latest alone: a pipe that nobody reads any more must not fill up.
            latest = replace(history, losses=history.losses[-1:], curve=history.curve[-1:])
            self.events.put(("step", task, model, step, loss, latest))

    def end(self, run: ModelRun) -> None:
        """The first process learns of it by the outcome."""

    def fail(self, task: str, model: str, reason: str) -> None:
        """The first process learns of it by the outcome."""

    def heed(self) -> None:
        if self.stop.value:
            raise KeyboardInterrupt


_tasks: _Tasks
_teller: _Teller


def _enter(corpus: TextCorpus | None, events: SimpleQueue[Any], stop: Any) -> None:
    """Several processes with one thread each use the cores better than one with many."""
    global _tasks, _teller
    torch.set_num_threads(1)
    _tasks, _teller = _Tasks(corpus), _Teller(events, stop)


def _here(job: Job) -> Outcome | None:
    """What comes of a job in this process; ``None`` where it was stopped before it began."""
    if _teller.stop.value:
        return None
    return _tried(job, _tasks, _teller)


def _side_by_side(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, watcher: Watcher
) -> Iterator[tuple[Job, Outcome]]:
    """A process that dies takes its pool with it: what was lost is run again, each job alone."""
    sendable: list[Job] = []
    for job in jobs:
        reason = _unsendable(job)
        if reason is None:
            sendable.append(job)
        else:
            yield job, reason
    lost = yield from _pooled(sendable, corpus, processes, watcher)
    for job in lost:
        if (yield from _pooled([job], corpus, 1, watcher)):
            yield job, "its process died, most likely for want of memory; try smaller sizes"


def _unsendable(job: Job) -> str | None:
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"it cannot be sent to another process ({error}); without --jobs it need not be"
    return None


def _pooled(
    jobs: Sequence[Job], corpus: TextCorpus | None, processes: int, watcher: Watcher
) -> Generator[tuple[Job, Outcome], None, list[Job]]:
    """Run jobs in a pool; those that were lost because one of its processes died are returned."""
    # Threads of torch do not survive a fork; a fresh process imports everything again.
    context = multiprocessing.get_context("spawn")
    events, stop = context.SimpleQueue(), context.Value("b", 0, lock=False)
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_enter, initargs=(corpus, events, stop)
    )
    waiting: dict[Future[Outcome | None], Job] = {}
    lost: list[Job] = []
    with _interrupts() as interrupted:
        try:
            with _sheltered():
                for job in jobs:
                    waiting[pool.submit(_here, job)] = job
            while waiting:
                done, _ = wait(waiting, GLANCE, FIRST_COMPLETED)
                try:
                    _tell(events, watcher)
                except KeyboardInterrupt:
                    interrupted.set()
                if interrupted.is_set() and not stop.value:
                    stop.value = 1
                    for future in [future for future in waiting if future.cancel()]:
                        del waiting[future]
                for future in done & waiting.keys():
                    job = waiting.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenProcessPool:
                        lost.append(job)
                        continue
                    if outcome is not None:
                        yield job, outcome
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)
        if interrupted.is_set():
            raise KeyboardInterrupt
    return lost


@contextmanager
def _sheltered() -> Iterator[None]:
    """Processes that start in here never see the terminal's interrupt; ``stop`` reaches them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """The first interrupt sets the event, to be looked at where nothing can be lost.

    The second ends the processes and is raised.
    """
    seen = threading.Event()
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield seen
        return

    def note(number: int, frame: FrameType | None) -> None:
        if seen.is_set():
            for process in multiprocessing.active_children():
                process.terminate()
            raise KeyboardInterrupt
        seen.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(events: SimpleQueue[Any], watcher: Watcher) -> None:
    """Hand on what the processes said."""
    calls: dict[str, Callable[..., None]] = {"begin": watcher.begin, "step": watcher.step}
    while not events.empty():
        name, *said = events.get()
        calls[name](*said)
