"""`recollect train` against a plain PyTorch training loop: forward, backward, step.

A run of `train` calls back after every step; there, one step of the bare loop is taken on a model
of the same size, so that both are timed alternately in one thread. The clock of the run goes from
the end of a bare step to the next callback, so it holds all that a run does: rows, collation, the
count of items, clipping, the schedule, logs, callbacks.
"""

from __future__ import annotations

import copy
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from recollect.benchmarks.results import BenchResult, Case, Ceiling, summarise
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

__all__ = ["measure"]

BARE, RUN = "bare loop", "recollect train"
_WARM = 2  # steps of each before the first that counts


@dataclass
class _Bare:
    """Forward, backward, step on rows that lie ready, as AdamW's own page has it."""

    model: RecollectForCausalLM
    rows: list[PackedRow]
    batch: int
    reset: bool
    place: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), lr=1e-4)

    def __call__(self) -> None:
        rows = [self.rows[(self.place + i) % len(self.rows)] for i in range(self.batch)]
        self.place += self.batch
        loss = self.model(**collate(rows, reset_memory=self.reset)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def measure(
    *,
    rounds: int = 7,
    context: int = 512,
    batch: int = 4,
    recipe: str = "gated_delta_net",
    parameters: int = 3_000_000,
    progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Seconds per step of both, in rounds that alternate.

    Args:
        rounds: steps of each that count. context, batch: of a step. recipe: a zoo name.
        parameters: of the model, about. progress: told the rounds done and in all.

    Raises:
        ValueError: a number out of range.
    """
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        draw = random.Random(0)
        words = [
            "the",
            "memory",
            "writes",
            "a",
            "value",
            "at",
            "its",
            "key",
            "and",
            "reads",
            "it",
            "at",
            "a",
            "query",
        ]
        text.write_text("".join(draw.choices(words, k=(rounds + _WARM) * batch * context // 4)))
        plan = TrainPlan.from_dict(
            {
                "model": {"recipe": recipe, "parameters": parameters},
                "data": {"train": [str(text)], "context": context},
                "optimizer": {"steps": rounds + _WARM, "batch": batch, "lr": 1e-4},
                "run": {"out": f"{scratch}/run", "save_every": 0, "log_every": 10},
            }
        )
        tokenizer = byte_tokenizer()
        rows, _ = read_rows(FileDocuments(files=(text,)), tokenizer, context=context)
        torch.manual_seed(0)
        model = build_model(plan, tokenizer)
        bare = _Bare(copy.deepcopy(model).train(), rows, batch, reset=True)
        seconds: dict[str, list[float]] = {BARE: [], RUN: []}
        clock = {"step": 0, "since": 0.0}

        report_round = progress

        class TimeSteps(TrainObserver):
            def on_progress(self, progress: Progress) -> None:
                if progress.step == clock["step"]:
                    return  # a log line of the same step; its cost is on the run's clock
                now = time.perf_counter()
                taken, clock["step"] = now - clock["since"], progress.step
                began = time.perf_counter()
                bare()
                bare_taken = time.perf_counter() - began
                if progress.step > _WARM:
                    seconds[RUN].append(taken)
                    seconds[BARE].append(bare_taken)
                    if report_round is not None:
                        report_round(progress.step - _WARM, rounds)
                clock["since"] = time.perf_counter()

        train(plan, observer=TimeSteps())
        config = cast(RecollectConfig, model.config)
        flops = model_flops(config, context=context) * batch * context
    ceiling = measure_peak_flops("cpu", torch.float32)
    cases = [Case(name=name, make=lambda: bare, flops=flops) for name in (BARE, RUN)]
    return summarise(
        cases,
        [seconds[BARE], seconds[RUN]],
        baseline=BARE,
        seed=0,
        ceilings=[Ceiling(name="matmul 1024³", gflops=ceiling / 1e9)],
        calls=[1, 1],
        peaks=[None, None],
        environment=describe_environment("cpu"),
    )
