"""A model of 170M parameters trained for five minutes: tokens per second, and what they go to.

`recollect.lm.train` does it, as for anybody. The text is this package's own source, so that no
network is needed, and its tokens are bytes: what is measured is speed, and that the loss falls; the
model is worth nothing.

``python -m recollect.benchmarks.gpu.training --save FILE`` writes what it has with every log line.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import recollect
from recollect.benchmarks.gpu.stages import Asked
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.planning.flops import measured_ceiling, model_flops
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import Header, Progress
from recollect.lm.training.train import RecollectTrainer, Trained, train
from recollect.report.environment import describe_environment

__all__ = ["measure_training"]

RECIPE = "gated_delta_net"
_BYTES_PER_TOKEN = 1.5e6
"""That activations of a 170M model take, about; a batch that does not fit is halved."""

_MOST_KERNELS = 15

Keep = Callable[[dict[str, Any]], None]


class _Until(TrainerCallback):
    """Ends a run so many seconds after its first step."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self.began or time.monotonic()
        if time.monotonic() - self.began >= self.seconds:
            control.should_training_stop = True


def _plan(scratch: Path, device: torch.device, rows: int, *, tiny: bool) -> TrainPlan:
    text = scratch / "text.txt"
    if not text.exists():
        sources = sorted(Path(recollect.__file__).parent.rglob("*.py"))
        texts = [path.read_text(encoding="utf-8") for path in sources[: 20 if tiny else None]]
        text.write_text("\n".join(texts), encoding="utf-8")
    model: dict[str, Any] = {"size": "170M", "parameters": 170_000_000}
    if tiny:
        model = {"width": 32, "depth": 1, "heads": 2}
    return TrainPlan.from_dict(
        {
            "model": {"recipe": RECIPE, **model},
            "data": {
                "train": [str(text)],
                "context": 64 if tiny else 4096,
                "packing": "stream",  # documents in a row would ask the device for their borders
                "tokenizer": "bytes",  # to train another one takes minutes of a CPU
            },
            # More steps than there is time for; warm-up is over after 100.
            "optimizer": {"steps": 20_000, "batch": rows, "lr": 1e-3, "warmup": 0.005},
            "run": {
                "out": str(scratch / f"run-{rows}"),
                "save_every": 0,
                "log_every": 2 if tiny else 10,
                "bf16": True,
                "device": str(device),
            },
        }
    )


def measure_training(
    device: torch.device | str, *, seconds: float = 300.0, tiny: bool = False, keep: Keep
) -> dict[str, Any]:
    """Train for so many seconds of steps, and look at one step's kernels.

    Args:
        device: where.
        seconds: of steps, after the first.
        tiny: whether the model is of a few thousand parameters, which shows that it runs.
        keep: given the data with every log line.

    Returns:
        JSON-ready data: ``environment``, ``model``, ``history`` (lines of the log),
        ``tokens_per_second`` and ``ceiling_share`` (medians over these lines but the first two),
        ``peak_bytes``, ``kernels`` (the longest of one step, by time).

    Raises:
        ValueError: not even one row fits.
    """
    device = torch.device(device)
    data: dict[str, Any] = {
        "environment": describe_environment(device).to_dict(),
        "tiny": tiny,
        "recipe": RECIPE,
        "seconds": seconds,
        "model": {},
        "history": [],
        "finished": False,
    }
    with tempfile.TemporaryDirectory() as scratch:
        rows = 2 if tiny else _rows(device)
        while True:
            plan = _plan(Path(scratch), device, rows, tiny=tiny)
            try:
                trained = _trained(plan, seconds, data, keep)
                break
            except ValueError as error:
                if rows == 1 or "does not fit" not in str(error):
                    raise
            rows //= 2
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        _add(data, trained, plan, device)
        keep(data)
        data["kernels"] = _kernels(trained.model, plan, device)
    data["finished"] = True
    keep(data)
    return data


def _rows(device: torch.device) -> int:
    """A power of two, of rows of 4,096 tokens."""
    memory = 8e9
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    most = max(1, int(0.7 * memory / _BYTES_PER_TOKEN / 4096))
    return 2 ** (most.bit_length() - 1)


def _trained(plan: TrainPlan, seconds: float, data: dict[str, Any], keep: Keep) -> Trained:
    class Timed(RecollectTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(_Until(seconds))

    data["history"] = []

    def begins(header: Header) -> None:
        data["model"] = {
            "parameters": sum(header.parameters.values()),
            "parts": dict(header.parameters),
            "rows": header.rows,
            "context": header.context,
            "dtype": header.dtype,
        }

    def watch(news: Progress) -> None:
        if news.loss_step != news.step or news.loss is None:
            return
        if data["history"] and data["history"][-1]["step"] == news.step:
            return
        data["history"].append(
            {
                "step": news.step,
                "loss": news.loss,
                "tokens_per_second": news.tokens_per_second,
                "ceiling_share": news.ceiling_share,
            }
        )
        keep(data)

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return train(plan, trainer_class=Timed, watch=watch, begins=begins)


def _add(data: dict[str, Any], trained: Trained, plan: TrainPlan, device: torch.device) -> None:
    """What is known once the run has ended."""
    steady = data["history"][2:] or data["history"]
    flops = model_flops(trained.model.config, context=plan.data.context)  # pyright: ignore[reportArgumentType]
    data |= {
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": trained.seconds,
        "loss": trained.loss,
        "flops_per_token": flops,
        "ceiling": measured_ceiling(device, torch.bfloat16),
        "tokens_per_second": statistics.median(one["tokens_per_second"] for one in steady),
        "ceiling_share": statistics.median(one["ceiling_share"] for one in steady),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def _kernels(
    model: RecollectForCausalLM, plan: TrainPlan, device: torch.device
) -> list[dict[str, Any]]:
    """The longest kernels of a forward and a backward pass; on a CPU, operations."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (plan.optimizer.batch, plan.data.context)
    ids = torch.randint(256, shape, generator=generator, device=device)
    model.train()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    step()
    there = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if there else []
    with torch.profiler.profile(activities=activities) as profile:
        step()
        if there:
            torch.cuda.synchronize(device)
    events = profile.key_averages()
    spent = {
        one.key: (one.self_device_time_total if there else one.self_cpu_time_total, one.count)
        for one in events
        if not there or str(one.device_type).endswith("CUDA")
    }
    total = sum(time for time, _ in spent.values()) or 1.0
    longest = sorted(spent.items(), key=lambda item: -item[1][0])[:_MOST_KERNELS]
    return [
        {"name": name, "seconds": time * 1e-6, "count": count, "share": time / total}
        for name, (time, count) in longest
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the data.

    Args:
        arguments: of the command line.
    """
    options = Asked.of(arguments, prog="python -m recollect.benchmarks.gpu.training", seconds=300.0)
    data = measure_training(
        options.device, seconds=options.seconds, tiny=options.tiny, keep=options.keep
    )
    print(
        f"{data['model']['parameters']:,} parameters, {data['tokens_per_second']:,.0f} tokens a "
        f"second, {data['ceiling_share']:.1%} of the products' rate, loss {data['loss']:.3f}"
    )


if __name__ == "__main__":
    main()
