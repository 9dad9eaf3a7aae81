"""Peak memory of training steps: the output layer in chunks, rows in segments, and plans.

Every case runs in a process of its own, or in one per rank that a row lies along, of which the one
that takes most is told. ``live`` is what tensors took at once (`LiveMemory`), the
same in every run; ``resident`` is by how much the process grew from its first step on (Linux);
``planned`` is what `recollect plan` says.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recollect.lm.memory_estimate.live_memory import LiveMemory
from recollect.report.environment import describe_environment
from recollect.report.files import write_atomic
from recollect.serialization import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CASES", "Peak", "measure", "measured", "planned", "ranks_of"]

PIECE, LONG = 8_192, 1_000_000
_LAYERS = {"width": 64, "depth": 3, "heads": 1}


# glibc keeps freed pieces of up to 32 MiB, more of them the longer a process runs; what is larger
# than this goes back to the system, and the process is as large as its tensors. A million tokens
# whose gradient is kept: 708 MiB from 1 MiB on, 265 from 64 KiB on, of 252 that tensors took.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most memory that steps of a run took.

    Attributes:
        live: bytes of tensors, weights included.
        resident: bytes that the process grew by; ``None`` where the system does not say.
        seconds: of the run.
    """

    live: int
    resident: int | None
    seconds: float


def _steps(**changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    plan: dict[str, dict[str, Any]] = {
        "model": {"recipe": "gated_delta_net", **_LAYERS},
        "data": {"context": PIECE},
        "optimizer": {"steps": 2, "batch": 1, "lr": 1e-4},
        "run": {"save_every": 0},
    }
    for table, values in changes.items():
        plan[table] |= values
    return plan


# A vocabulary of a language model's, beside which layers are small.
_WORDS = {"width": 64, "depth": 1, "heads": 1}
_WIDER = {"width": 128, "depth": 3, "heads": 2}
_LONG = {"context": LONG, "segments": 125}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "logits of all tokens": _steps(model=_WORDS, data={"context": 4096}, run={"loss_chunk": 0}),
    "logits of 1024 tokens": _steps(model=_WORDS, data={"context": 4096}),
    "8,192 tokens": _steps(),
    "16,384 tokens": _steps(data={"context": 2 * PIECE}),
    "1,000,000 tokens in 125 segments": _steps(data=_LONG, optimizer={"steps": 1}),
    "1,000,000 tokens in 125 segments, gradient kept": _steps(
        data={**_LONG, "segment_gradient": "kept"}, optimizer={"steps": 1}
    ),
    "gated_delta_net, 512 wide, bfloat16": _steps(
        model={"width": 512, "depth": 2, "heads": 8},
        data={"context": 512},
        optimizer={"batch": 2},
        run={"bf16": True},
    ),
    "gated_delta_net, recomputed": _steps(
        model=_WIDER,
        data={"context": 2048},
        optimizer={"batch": 2},
        run={"checkpointing": True},
    ),
    "softmax_attention, bfloat16": _steps(
        model={**_WIDER, "recipe": "softmax_attention"},
        data={"context": 1024},
        optimizer={"batch": 4},
        run={"bf16": True},
    ),
    "mamba2, bfloat16": _steps(
        model={**_WIDER, "recipe": "mamba2"},
        data={"context": 2048},
        optimizer={"batch": 2},
        run={"bf16": True},
    ),
    "titans": _steps(
        model={**_WIDER, "recipe": "titans", "depth": 2},
        data={"context": 512},
        optimizer={"batch": 2},
    ),
    "rls": _steps(
        model={**_WIDER, "recipe": "rls"}, data={"context": 1024}, optimizer={"batch": 2}
    ),
    **{
        f"{recipe}, along 2 ranks": _steps(
            model={**_WIDER, "recipe": recipe, "depth": 2},
            data={"context": tokens},
            optimizer={"batch": 2},
            run={"parallel": {"context": 2}},
        )
        for recipe, tokens in (
            ("gated_delta_net", 1024),  # transitions are gathered
            ("mamba2", 1024),  # decays
            ("softmax_attention", 1024),  # keys and values
            ("titans", 512),  # a state is handed over
        )
    },
}
"""Plans by name; where logits are named the vocabulary has 32,000 tokens."""


def measure(
    names: list[str] | None = None, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Peaks of the cases, each in a process of its own, as JSON-ready data.

    Args:
        names: of `CASES`; all when omitted. progress: told the cases done and in all.

    Raises:
        ValueError: a process that failed.
    """
    chosen = list(CASES) if names is None else names
    found: dict[str, Any] = {}
    for index, name in enumerate(chosen):
        every = _said(name, ranks_of(CASES[name]))
        found[name] = max(every, key=lambda said: said["live"])
        if progress is not None:
            progress(index + 1, len(chosen))
    ratios = {
        f"{above} / {below}": found[above]["live"] / found[below]["live"]
        for above, below in (
            ("logits of all tokens", "logits of 1024 tokens"),
            ("1,000,000 tokens in 125 segments", "8,192 tokens"),
            ("1,000,000 tokens in 125 segments, gradient kept", "8,192 tokens"),
            ("16,384 tokens", "8,192 tokens"),
        )
        if above in found and below in found
    }
    ratios |= {f"planned / live: {name}": x["planned"] / x["live"] for name, x in found.items()}
    return {
        "suite": "memory",
        "plans": {name: CASES[name] for name in chosen},
        "peaks": found,
        "ratios": ratios,
        "environment": describe_environment("cpu").to_dict(),
    }


def ranks_of(tables: Mapping[str, Mapping[str, Any]]) -> int:
    """Processes that a case takes.

    Args:
        tables: of a plan.
    """
    return math.prod(tables["run"].get("parallel", {}).values())


def _said(name: str, ranks: int) -> list[dict[str, Any]]:
    """What the processes of a case print.

    Raises:
        ValueError: one that failed.
    """
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        shared = {**os.environ, **_ALLOCATOR}
        if ranks > 1:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
            shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        port.close()

        def run(rank: int) -> subprocess.CompletedProcess[str]:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            return subprocess.run(
                [sys.executable, "-m", __name__, name, scratch],
                capture_output=True,
                text=True,
                check=False,
                env=shared | place,
            )

        with ThreadPoolExecutor(ranks) as threads:
            ended = list(threads.map(run, range(ranks)))
    for one in ended:
        if one.returncode:
            said = one.stderr.strip().splitlines() or ["nothing was said"]
            raise ValueError(f"{name}: its process ended with {one.returncode}: {said[-1]}")
    return [read_json(one.stdout.strip().splitlines()[-1]) for one in ended]


def measured(
    tables: Mapping[str, Mapping[str, Any]],
    *,
    vocab: int | None = None,
    place: str | None = None,
) -> Peak:
    """The peak of a run's steps, here.

    Args:
        tables: of a plan, without ``[data] train`` and ``[run] out``.
        vocab: of the model's vocabulary; that of bytes when omitted.
        place: a folder for the run, the same of all its processes; one of its own when omitted.
    """
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.progress import TrainObserver
    from recollect.lm.training.train import train

    alone = ranks_of(tables) == 1
    with tempfile.TemporaryDirectory() as scratch, LiveMemory() as memory:
        scratch = place or scratch
        text = Path(scratch) / "text.txt"
        given = {name: dict(values) for name, values in tables.items()}
        steps, batch = given["optimizer"]["steps"], given["optimizer"]["batch"]
        draw = random.Random(0)
        drawn = draw.randbytes(steps * batch * given["data"]["context"]).hex()
        write_atomic(text, drawn)  # the same, by every process
        given["data"] |= {"train": [str(text)], "packing": "stream"}
        given["run"] |= {"out": f"{scratch}/run"} | ({"device": "cpu"} if alone else {})
        if vocab is not None:
            _tokenizer(vocab).save_pretrained(f"{scratch}/tokenizer")
            given["data"]["tokenizer"] = f"{scratch}/tokenizer"
        initial_rss = 0

        class ResetPeaks(TrainObserver):
            def on_start(self, summary: Mapping[str, str]) -> None:
                nonlocal initial_rss
                gc.collect()
                memory.reset_peak()
                initial_rss = _resident("VmRSS")
                _reset_resident()

        began = time.perf_counter()
        train(TrainPlan.from_dict(given), observer=ResetPeaks())
        grown = _resident("VmHWM") - initial_rss if initial_rss else None
        return Peak(live=memory.peak, resident=grown, seconds=time.perf_counter() - began)


def planned(tables: Mapping[str, Mapping[str, Any]], *, vocab: int | None = None) -> int:
    """What a plan says of one rank of such steps.

    Args:
        tables: as in `measured`. vocab: as there.
    """
    from recollect.lm.distributed.parallel_dims import parse_parallel
    from recollect.lm.memory_estimate.estimate import RankEstimator
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.setup import model_config

    given = {**tables, "data": {**tables["data"], "train": ["text.txt"]}}
    plan = TrainPlan.from_dict(given)
    dims = parse_parallel(tables["run"].get("parallel", {}), ranks_of(tables))
    config = model_config(plan.model, _tokenizer(vocab))
    return RankEstimator(plan, config).rank(dims).total


def _tokenizer(vocab: int | None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, among so many tokens."""
    from recollect.lm.data.tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer()
    if vocab is not None:
        tokenizer.add_tokens([f"<unused {i}>" for i in range(vocab - len(tokenizer))])
    return tokenizer


def _resident(what: str) -> int:
    """Bytes of this process that the system has in memory, now or at most; 0 where it is silent."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(x.split()[1]) for x in lines if x.startswith(what)), 0)


def _reset_resident() -> None:
    """Let the most begin again (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _main(name: str, place: str | None = None) -> None:
    torch.set_num_threads(1)
    words = 32_000 if name.startswith("logits") else None
    peak = asdict(measured(CASES[name], vocab=words, place=place))
    print(json.dumps({**peak, "planned": planned(CASES[name], vocab=words)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
