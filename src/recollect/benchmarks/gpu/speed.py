"""`recollect bench --suite gpu`: lengths from 2,048 to 65,536 against peers and the ceilings.

All lengths have as many tokens in all: a call has rows of T tokens, so many that the product stays.
Queries, keys and values are bfloat16, which flash-linear-attention's operators and SDPA's fastest
kernels take; what runs in PyTorch alone multiplies as `docs/gpu.md` says. Cases of one table are
timed in alternating rounds of one run, beside products of bfloat16, whose rate every share is of.

``python -m recollect.benchmarks.gpu.speed --save FILE`` writes what it has after every run, so that
a run that is cut short leaves its numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from recollect.benchmarks.gpu.ceilings import measure_ceilings
from recollect.benchmarks.gpu.decoding import NAMES as DECODED
from recollect.benchmarks.gpu.decoding import measure_decoding
from recollect.benchmarks.gpu.peers import OPERATORS, operator_case, packages
from recollect.benchmarks.gpu.stages import Asked
from recollect.benchmarks.harness import run
from recollect.benchmarks.results import BenchResult, Case
from recollect.benchmarks.suites.calls import NO_NORM, Shape, recall_case, recipe_of, sdpa_case
from recollect.benchmarks.suites.deep import own_case, titans_case
from recollect.engines.deep import fused_plan
from recollect.engines.deep.fused.walk import launcher
from recollect.functional.binding import bind
from recollect.report.environment import describe_environment

__all__ = ["FULL", "SYSTEMS", "TINY", "Sizes", "lines", "measure"]

SYSTEMS = (*OPERATORS, "titans")
"""Presets that are timed: linear memories with a peer each, and a deep one."""

_MOST = 20.0
"""Seconds of one case in one run, above which it is left out."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the suite is run at.

    Attributes:
        lengths: T of each table. tokens: B T of all of them.
        heads, size: H, and K = V. rounds: of linear memories; of deep ones, half as many.
        rows: of decoding, each by itself. prompt: tokens before the first decoded one.
    """

    lengths: tuple[int, ...] = (4096, 2048, 8192, 16384, 32768, 65536)
    tokens: int = 65536
    heads: int = 8
    size: int = 64
    rounds: int = 7
    rows: tuple[int, ...] = (1, 256)
    prompt: int = 1024


FULL = Sizes()
"""A GPU's sizes; 4,096 tokens first, because time may run out."""

TINY = Sizes(lengths=(32,), tokens=32, heads=2, size=16, rounds=1, rows=(2,), prompt=20)
"""Sizes that show that the suite runs, and nothing about speed."""


@dataclass
class _Clock:
    """Seconds that are left, and what each case took at the last length."""

    until: float
    taken: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    runs: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    def spare(self, group: str, way: str, T: int) -> bool:
        """Whether a run of this length ends in time, going by the last one."""
        before, seconds = self.runs.get((group, way), (T, 0.0))
        return time.monotonic() + seconds * max(1.0, T / before) < self.until

    def slow(self, label: str, way: str, T: int, calls: int) -> float | None:
        """Seconds that a case would take in a run, where that is too many."""
        before, seconds = self.taken.get((label, way), (T, 0.0))
        total = calls * seconds * max(1.0, T / before)
        return total if total > _MOST else None


def measure(
    device: torch.device | str,
    sizes: Sizes,
    *,
    only: Sequence[str] = (),
    seconds: float = 600.0,
    progress: Callable[[int, int], None] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure ceilings, decoding, and forward and backward passes at every length.

    Args:
        device: where.
        sizes: of the calls.
        only: a few of `SYSTEMS`, or of those that are decoded.
        seconds: after which no further run begins; what is left out is said.
        progress: told the runs done, and in all.
        keep: given the data after every run.

    Returns:
        JSON-ready data: ``environment``, ``packages``, ``sizes``, ``ceilings``, ``decoded``,
        ``speeds`` and ``left_out``.

    Raises:
        ValueError: a name that is none of them, or a length that is longer than all tokens.
    """
    device = torch.device(device)
    _check(sizes, only)
    names = [name for name in (*SYSTEMS, *DECODED) if not only or name in only]
    names = list(dict.fromkeys(names))
    clock, left_out = _Clock(time.monotonic() + seconds), dict[str, str]()
    tiny = sizes.tokens < FULL.tokens // 16
    least = 0.01 if tiny else 0.2
    keep = keep or (lambda data: None)
    data: dict[str, Any] = {
        "suite": "gpu",
        "environment": describe_environment(device).to_dict(),
        "packages": packages(),
        "tiny": tiny,
        "sizes": asdict(sizes),
        "ceilings": measure_ceilings(device, tiny=tiny, least=least),
        "decoded": [],
        "speeds": [],
        "agreement": {},
        "left_out": left_out,
        "finished": False,
    }
    if device.type != "cuda":
        left_out["CUDA graphs, the fused walk, flash-linear-attention's operators"] = "no GPU"
    elif data["packages"]["flash-linear-attention"] is None:
        reason = "it is not installed: recollect-layers[gpu]"
        left_out["flash-linear-attention's operators"] = reason
    keep(data)
    for name in names:
        if name in DECODED:
            data["decoded"] += measure_decoding(
                name,
                sizes.rows,
                heads=sizes.heads,
                size=sizes.size,
                prompt=sizes.prompt,
                device=device,
                left_out=left_out,
                least=least,
            )
            keep(data)
    todo = list(_runs(names, sizes, device))
    for done, (group, way, shape, cases) in enumerate(todo):
        _timed(group, way, shape, cases, sizes, clock, data)
        if group == "linear" and not data["agreement"]:
            data["agreement"] = _agreement(names, shape, left_out)
        keep(data)
        if progress is not None:
            progress(done + 1, len(todo))
    data["finished"] = True
    keep(data)
    return data


def _check(sizes: Sizes, only: Sequence[str]) -> None:
    for name in only:
        known = dict.fromkeys((*SYSTEMS, *DECODED))
        if name not in known:
            raise ValueError(f"this suite has no {name!r}; it has {', '.join(known)}")
    if max(sizes.lengths) > sizes.tokens:
        raise ValueError(
            f"T = {max(sizes.lengths):,} is longer than all {sizes.tokens:,} tokens of a call"
        )


_Run = tuple[str, str, Shape, list[Case]]


def _runs(names: Sequence[str], sizes: Sizes, device: torch.device) -> Iterator[_Run]:
    """Group, way, shape and cases of every run."""
    for T in sizes.lengths:
        shape = Shape(
            B=sizes.tokens // T,
            T=T,
            H=sizes.heads,
            K=sizes.size,
            V=sizes.size,
            dtype=torch.bfloat16,
            device=str(device),
        )
        for way in ("forward", "forward + backward"):
            backward = way != "forward"
            linear = [name for name in names if name in OPERATORS]
            if linear:
                yield "linear", way, shape, _linear(linear, shape, backward)
            if "titans" in names:
                yield "deep", way, shape, _deep(shape, backward)
                yield "titans-pytorch", way, shape, _between(shape, backward)


def _linear(names: Sequence[str], shape: Shape, backward: bool) -> list[Case]:
    """SDPA, and each memory: ours as it is chosen, ours in PyTorch, the peer's operator."""
    cases = [sdpa_case("SDPA", shape, backward=backward)]
    gpu = shape.device.startswith("cuda")
    for name in names:
        cases.append(recall_case(name, name, shape, backward=backward))
        if gpu and packages()["flash-linear-attention"] is not None:
            torch_alone = f"{name}, PyTorch alone"
            cases.append(recall_case(name, torch_alone, shape, backward=backward, engine="torch"))
            peer = f"{name}, flash-linear-attention"
            cases.append(operator_case(name, peer, shape, backward=backward))
    return cases


def _deep(shape: Shape, backward: bool) -> list[Case]:
    """Titans, its memory without the norm, and that by the fused walk where a device is one for it.

    Elsewhere ``engine="fused"`` takes the batched path too, which nobody should time twice.
    """
    cases = [recall_case(name, name, shape, backward=backward) for name in ("titans", NO_NORM)]
    at = bind(recipe_of(NO_NORM), H=shape.H, K=shape.K, V=shape.V)
    build = fused_plan(at).fused
    if build is not None and launcher(build, torch.device(shape.device)) is not None:
        fused = f"{NO_NORM}, fused walk"
        cases.append(recall_case(NO_NORM, fused, shape, backward=backward, engine="fused"))
    return cases


def _between(shape: Shape, backward: bool) -> list[Case]:
    """One head between titans-pytorch's projections, in float32, and its own module."""
    given = (shape.B, shape.T, shape.K)
    more: dict[str, Any] = {"backward": backward, "device": shape.device}
    return [
        own_case("ours, b = 16", 16, given, **more),
        titans_case("titans-pytorch, b = 16", 16, 16, given, **more),
    ]


def _timed(
    group: str,
    way: str,
    shape: Shape,
    cases: Sequence[Case],
    sizes: Sizes,
    clock: _Clock,
    data: dict[str, Any],
) -> None:
    """One run, whose rows and omissions are added to the data."""
    T, left_out, where = shape.T, data["left_out"], f"{group}, {way}, T = {shape.T:,}"
    if not clock.spare(group, way, T):
        left_out[where] = "the time of the suite was over"
        return
    rounds = sizes.rounds if group == "linear" else max(1, sizes.rounds // 2)
    fast: list[Case] = []
    for case in cases:
        total = clock.slow(case.name, way, T, rounds + 4)
        if total is None:
            fast.append(case)
        else:
            left_out[f"{case.name}, {where}"] = f"it would take {total:.0f} s, at the last's speed"
    began, failed = time.monotonic(), dict[str, str]()
    try:
        result = run(
            fast,
            baseline=cases[0].name,
            rounds=rounds,
            min_seconds=0.02,
            device=shape.device,
            dtype=torch.bfloat16,
            left_out=failed,
        )
    except (RuntimeError, ValueError) as error:
        left_out[where] = str(error) if not failed else "no case of it could be run"
        return
    finally:
        left_out.update({f"{name}, {where}": why for name, why in failed.items()})
    clock.runs[group, way] = (T, time.monotonic() - began)
    for timing in result.timings:
        clock.taken[timing.name, way] = (T, timing.median)
    data["speeds"] += _rows(group, way, shape, result)


def _agreement(names: Sequence[str], shape: Shape, left_out: dict[str, str]) -> dict[str, float]:
    """How far outputs by an operator are from those in PyTorch alone, relative to their length.

    Tests run the first configuration of a kernel, at small sizes; here it is the one that was
    chosen, at a size that is timed.
    """
    found: dict[str, float] = {}
    if not shape.device.startswith("cuda") or packages()["flash-linear-attention"] is None:
        return found
    for name in (name for name in names if name in OPERATORS):
        try:
            theirs, ours = (
                cast(Tensor, recall_case(name, name, shape, engine=method).make()()).float()
                for method in ("fla", "torch")
            )
            away = float((theirs - ours).norm() / ours.norm())
        except Exception as error:
            left_out[f"agreement of {name}"] = f"{type(error).__name__}: {error}"
            continue
        found[name] = away if math.isfinite(away) else 1e9  # as far as JSON goes
    return found


def _rows(group: str, way: str, shape: Shape, result: BenchResult) -> list[dict[str, Any]]:
    """What is written down of a run: a row per case."""
    keys = ("name", "median", "lower", "upper", "ratio", "gflops", "share", "peak_bytes")
    here = {
        "group": group,
        "way": way,
        "T": shape.T,
        "B": shape.B,
        "baseline": result.baseline,
        "rounds": result.rounds,
        "matmul": max(one.gflops for one in result.ceilings),
    }
    return [
        here | {key: value for key, value in asdict(timing).items() if key in keys}
        for timing in result.timings
    ]


def lines(data: dict[str, Any]) -> Iterator[str]:
    """The result as lines to print."""
    environment = data["environment"]
    if data["tiny"]:
        yield (
            f"tiny sizes on {environment['device']}: they show that the suite runs, and nothing "
            "about speed"
        )
    found = data["ceilings"]
    rates = ", ".join(f"{name} {rate / 1e12:,.4g}" for name, rate in found["matmul"].items())
    copy = f"copy {found['copy'] / 1e9:,.4g} GB/s"
    yield f"ceilings: products of {found['side']}³ {rates} TFLOP/s, {copy}"
    for one in data["speeds"]:
        share = "" if one["share"] is None else f", {one['share']:.1%} of bfloat16's products"
        yield (
            f"T {one['T']:>6,}  {one['way']:<18}  {one['name']:<40}  "
            f"{1e3 * one['median']:10.3f} ms{share}"
        )
    for one in data["decoded"]:
        graphs = "by graphs" if one["graphs"] else "step by step"
        share = one["bytes"] / one["seconds"] / found["copy"]
        yield (
            f"decoding  {one['rows']:>4} rows  {one['name']:<20}  {graphs:<12}  "
            f"{1e6 * one['seconds']:10.1f} µs a token, {share:.1%} of the copy's rate"
        )
    for what, why in data["left_out"].items():
        yield f"not timed: {what}: {why.splitlines()[0]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the suite and write its data.

    Args:
        arguments: of the command line.
    """
    options = Asked.of(arguments, prog="python -m recollect.benchmarks.gpu.speed", seconds=600.0)
    sizes = TINY if options.tiny else FULL
    for line in lines(measure(options.device, sizes, seconds=options.seconds, keep=options.keep)):
        print(line)


if __name__ == "__main__":
    main()
