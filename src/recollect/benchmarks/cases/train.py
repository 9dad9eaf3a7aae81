"""`recollect train` and a plain PyTorch training loop: forward, backward and optimizer step.

A run of `train` reports progress after every step. The observer then takes one step of the plain
loop with a model of equal size, so that both alternate in one thread. The time of a step of the run
starts after the plain step and ends at the next report. It includes everything that a run does:
rows, collation, the count of items, clipping, the schedule, logs and callbacks.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from recollect.benchmarks.results import BenchResult, Case, Ceiling, summarize
from recollect.lm.data.rows import PackedRow, collate, read_rows
from recollect.lm.data.sources import FileDocuments
from recollect.lm.data.tokenizers import byte_tokenizer
from recollect.lm.memory_estimate.flops import measure_peak_flops, model_flops
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import Progress, TrainObserver
from recollect.lm.training.setup import build_model
from recollect.lm.training.train import train
from recollect.lm.training.weight_decay import parameter_groups
from recollect.report.environment import describe_environment

__all__ = ["PLAIN_LOOP", "TRAIN", "measure"]

PLAIN_LOOP, TRAIN = "bare loop", "recollect train"
_WARMUP_STEPS = 2
_BATCH_SIZE = 4
_MODEL = {"recipe": "gated_delta_net", "parameters": 3_000_000}


def measure(
    *,
    rounds: int = 7,
    context: int = 512,  # tokens of a row
    progress: Callable[[int, int], None] | None = None,  # gets the finished rounds, and all
) -> BenchResult:
    """Return the seconds per step of both, in alternating rounds."""
    steps = rounds + _WARMUP_STEPS
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(random.Random(0).randbytes(steps * _BATCH_SIZE * context).hex())
        plan = TrainPlan.from_dict(
            {
                "model": _MODEL,
                "data": {"train": [str(text)], "context": context},
                "optimizer": {"steps": steps, "batch": _BATCH_SIZE, "lr": 1e-4},
                "run": {"out": f"{folder}/run", "save_every": 0, "log_every": 10},
            }
        )
        tokenizer = byte_tokenizer()
        rows, _ = read_rows(FileDocuments(files=(text,)), tokenizer, context=context)
        torch.manual_seed(0)
        model = build_model(plan, tokenizer)
        plain_step = _plain_step(copy.deepcopy(model).train(), rows)
        observer = _Alternate(plain_step, rounds, progress)
        train(plan, observer=observer)
        config = cast(RecollectConfig, model.config)
        flops = model_flops(config, context=context) * _BATCH_SIZE * context
    ceiling = measure_peak_flops("cpu", torch.float32)
    return summarize(
        [Case(name=name, make=lambda: plain_step, flops=flops) for name in observer.seconds],
        list(observer.seconds.values()),
        baseline=PLAIN_LOOP,
        seed=0,
        ceilings=[Ceiling(name="matmul 1024³", gflops=ceiling / 1e9)],
        calls=[1, 1],
        peaks=[None, None],
        environment=describe_environment("cpu"),
    )


def _plain_step(model: RecollectForCausalLM, rows: list[PackedRow]) -> Callable[[], None]:
    """Return a training step as in AdamW's documentation, on rows that are already read."""
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-4)
    position = 0

    def step() -> None:
        nonlocal position
        batch = [rows[(position + i) % len(rows)] for i in range(_BATCH_SIZE)]
        position += _BATCH_SIZE
        loss = model(**collate(batch, reset_memory=True)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


class _Alternate(TrainObserver):
    """An observer that takes a step of the plain loop after every step of the run."""

    def __init__(
        self,
        plain_step: Callable[[], None],
        rounds: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.plain_step, self.rounds, self.progress = plain_step, rounds, progress
        self.seconds: dict[str, list[float]] = {PLAIN_LOOP: [], TRAIN: []}
        self.last_step, self.start = 0, 0.0

    def on_progress(self, progress: Progress) -> None:
        if progress.step == self.last_step:
            return  # a log line of the previous step
        run_seconds = time.perf_counter() - self.start
        self.last_step = progress.step
        plain_start = time.perf_counter()
        self.plain_step()
        plain_seconds = time.perf_counter() - plain_start
        if progress.step > _WARMUP_STEPS:
            self.seconds[TRAIN].append(run_seconds)
            self.seconds[PLAIN_LOOP].append(plain_seconds)
            if self.progress is not None:
                self.progress(progress.step - _WARMUP_STEPS, self.rounds)
        self.start = time.perf_counter()
