"""Peak memory of training steps: the output layer in chunks, rows in segments, and plans.

Each case runs in a separate process, or in one process per rank of a row, of which the largest peak
counts. ``live`` is the number of bytes of all tensors (`LiveMemory`), equal in every run,
``resident`` the growth of the process since its first step, and ``planned`` the estimate of
`recollect plan`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recollect.lm.memory_estimate.live_memory import LiveMemory
from recollect.report.environment import describe_environment
from recollect.report.files import write_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CASES", "Peak", "measure", "measure_peak", "num_ranks", "plan_peak"]

PlanTables = Mapping[str, Mapping[str, Any]]
"""Tables of a run file, without ``[data] train`` and ``[run] out``."""

# glibc keeps freed blocks of up to 32 MiB. Larger ones than this return to the system, so that the
# process is as large as its tensors: for a million tokens whose gradient is kept, the process grows
# by 708 MiB with 1 MiB, and by 265 with 64 KiB. Tensors take 252.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Largest memory of the steps of a run."""

    live: int  # bytes of tensors, weights included
    resident: int | None  # growth of the process in bytes; None if the system does not report it
    seconds: float  # duration of the run


def _run_tables(
    recipe: str = "gated_delta_net",
    *,
    context: int = 8192,
    batch: int = 1,
    steps: int = 2,
    width: int = 64,
    depth: int = 3,
    heads: int = 1,
    data: Mapping[str, Any] | None = None,
    **run: Any,
) -> PlanTables:
    return {
        "model": {"recipe": recipe, "width": width, "depth": depth, "heads": heads},
        "data": {"context": context, **(data or {})},
        "optimizer": {"steps": steps, "batch": batch, "lr": 1e-4},
        "run": {"save_every": 0, **run},
    }


_MILLION: dict[str, Any] = {"context": 1_000_000, "steps": 1}
_SEGMENTS = {"segments": 125}
_WIDE: dict[str, Any] = {"width": 128, "heads": 2}
_BY_2: dict[str, Any] = {**_WIDE, "depth": 2, "batch": 2, "parallel": {"context": 2}}

CASES: dict[str, PlanTables] = {
    "logits of all tokens": _run_tables(depth=1, context=4096, loss_chunk=0),
    "logits of 1024 tokens": _run_tables(depth=1, context=4096),
    "8,192 tokens": _run_tables(),
    "16,384 tokens": _run_tables(context=16384),
    "1,000,000 tokens in 125 segments": _run_tables(**_MILLION, data=_SEGMENTS),
    "1,000,000 tokens in 125 segments, gradient kept": _run_tables(
        **_MILLION, data={**_SEGMENTS, "segment_gradient": "kept"}
    ),
    "gated_delta_net, 512 wide, bfloat16": _run_tables(
        width=512, depth=2, heads=8, context=512, batch=2, bf16=True
    ),
    "gated_delta_net, recomputed": _run_tables(**_WIDE, context=2048, batch=2, checkpointing=True),
    "softmax_attention, bfloat16": _run_tables(
        "softmax_attention", **_WIDE, context=1024, batch=4, bf16=True
    ),
    "mamba2, bfloat16": _run_tables("mamba2", **_WIDE, context=2048, batch=2, bf16=True),
    "titans": _run_tables("titans", **_WIDE, depth=2, context=512, batch=2),
    "rls": _run_tables("rls", **_WIDE, context=1024, batch=2),
    # Ranks gather transitions, decays, or keys and values, or send a state to the next.
    "gated_delta_net, along 2 ranks": _run_tables("gated_delta_net", **_BY_2, context=1024),
    "mamba2, along 2 ranks": _run_tables("mamba2", **_BY_2, context=1024),
    "softmax_attention, along 2 ranks": _run_tables("softmax_attention", **_BY_2, context=1024),
    "titans, along 2 ranks": _run_tables("titans", **_BY_2, context=512),
}
"""Run files by name. The vocabulary has 32,000 tokens if the name starts with "logits"."""

_COMPARED = (
    ("logits of all tokens", "logits of 1024 tokens"),
    ("1,000,000 tokens in 125 segments", "8,192 tokens"),
    ("1,000,000 tokens in 125 segments, gradient kept", "8,192 tokens"),
    ("16,384 tokens", "8,192 tokens"),
)


def measure(
    names: Sequence[str] | None = None, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return the peaks of cases, each from a separate process, ready for JSON.

    Args:
        names: names in `CASES`; all if omitted.
        progress: function that gets the number of finished cases and of all cases.

    Raises:
        ValueError: a process failed.
    """
    names = list(CASES) if names is None else names
    peaks: dict[str, Any] = {}
    for num_done, name in enumerate(names, 1):
        peaks[name] = _run_case(name)
        if progress is not None:
            progress(num_done, len(names))
    ratios = {
        f"{x} / {y}": peaks[x]["live"] / peaks[y]["live"]
        for x, y in _COMPARED
        if x in peaks and y in peaks
    }
    ratios |= {f"planned / live: {name}": x["planned"] / x["live"] for name, x in peaks.items()}
    return {
        "suite": "memory",
        "plans": {name: CASES[name] for name in names},
        "peaks": peaks,
        "ratios": ratios,
        "environment": describe_environment("cpu").to_dict(),
    }


def num_ranks(tables: PlanTables) -> int:
    """Return the number of processes of a run."""
    return math.prod(tables["run"].get("parallel", {}).values())


def _run_case(name: str) -> dict[str, Any]:
    """Return the largest peak of the processes of a case."""
    ranks = num_ranks(CASES[name])
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *(torchrun if ranks > 1 else []), "-m", __name__, name, folder],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **_ALLOCATOR},
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no error message"]
            errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]+Error: .+)", done.stderr, re.MULTILINE)
            message = errors[-1] if errors else lines[-1]
            raise ValueError(f"{name}: its process ended with {done.returncode}: {message}")
        peaks = [json.loads(path.read_text()) for path in Path(folder).glob("peak-*.json")]
    return max(peaks, key=lambda peak: peak["live"])


def measure_peak(
    tables: PlanTables, *, vocab: int | None = None, folder: str | None = None
) -> Peak:
    """Return the peak of the steps of a run in this process.

    The processes of a run share ``folder``, by default a temporary one.
    """
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.progress import TrainObserver
    from recollect.lm.training.train import train

    with tempfile.TemporaryDirectory() as temporary, LiveMemory() as memory:
        folder = folder or temporary
        run = {name: dict(values) for name, values in tables.items()}
        num_bytes = run["optimizer"]["steps"] * run["optimizer"]["batch"] * run["data"]["context"]
        # All processes of a run write equal files.
        write_atomic(f"{folder}/text.txt", random.Random(0).randbytes(num_bytes).hex())
        run["data"] |= {"train": [f"{folder}/text.txt"], "packing": "stream"}
        run["run"] |= {"out": f"{folder}/run"}
        if num_ranks(tables) == 1:
            run["run"]["device"] = "cpu"
        if vocab is not None:
            _tokenizer(vocab).save_pretrained(f"{folder}/tokenizer")
            run["data"]["tokenizer"] = f"{folder}/tokenizer"
        initial_rss = 0

        class ResetPeaks(TrainObserver):
            def on_start(self, summary: Mapping[str, str]) -> None:
                nonlocal initial_rss
                gc.collect()
                memory.reset_peak()
                initial_rss = _resident_bytes("VmRSS")
                _reset_resident_peak()

        start = time.perf_counter()
        train(TrainPlan.from_dict(run), observer=ResetPeaks())
        growth = _resident_bytes("VmHWM") - initial_rss if initial_rss else None
        return Peak(live=memory.peak, resident=growth, seconds=time.perf_counter() - start)


def plan_peak(tables: PlanTables, *, vocab: int | None = None) -> int:
    """Return the estimate of `recollect plan` for one rank of a run."""
    from recollect.lm.distributed.parallel_dims import parse_parallel
    from recollect.lm.memory_estimate.estimate import RankEstimator
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.setup import model_config

    plan = TrainPlan.from_dict({**tables, "data": {**tables["data"], "train": ["text.txt"]}})
    dims = parse_parallel(tables["run"].get("parallel", {}), num_ranks(tables))
    config = model_config(plan.model, _tokenizer(vocab))
    return RankEstimator(plan, config).rank(dims).total


def _tokenizer(vocab: int | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with additional tokens up to a size."""
    from recollect.lm.data.tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer()
    if vocab is not None:
        tokenizer.add_tokens([f"<unused {i}>" for i in range(vocab - len(tokenizer))])
    return tokenizer


def _resident_bytes(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM``, its peak, of this process; 0 without Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def _reset_resident_peak() -> None:
    """Set ``VmHWM`` to ``VmRSS``. `resource.getrusage` has no such reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _main(name: str, folder: str) -> None:
    torch.set_num_threads(1)
    vocab = 32_000 if name.startswith("logits") else None
    peak = asdict(measure_peak(CASES[name], vocab=vocab, folder=folder))
    peak["planned"] = plan_peak(CASES[name], vocab=vocab)
    write_atomic(f"{folder}/peak-{os.environ.get('RANK', 0)}.json", json.dumps(peak))


if __name__ == "__main__":
    _main(*sys.argv[1:])
