"""``python -m recollect.benchmarks.gpu``: all stages, or some, and the report."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recollect.benchmarks.gpu.readme import not_run, readme
from recollect.benchmarks.gpu.stages import STAGES, Here, Stage, checkout, run_stage
from recollect.report.environment import describe_environment
from recollect.report.files import write_atomic

__all__ = ["main"]

_RESULTS, _TRIAL = Path("results/gpu"), Path("runs/gpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and write what came of them.

    Args:
        arguments: of the command line.

    Returns:
        The exit status: 1 where a stage failed.
    """
    given = _given(arguments)
    # Where a script runs in the background, its children would not hear that they have to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    out = given.out or (_RESULTS if device == "cuda" else _TRIAL)
    names = [(stage.name, stage.about) for stage in STAGES]
    chosen = [stage for stage in STAGES if not given.only or stage.name in given.only]
    environment = describe_environment(device).to_dict()
    print(f"{environment['device']}, torch {environment['torch']}, commit {environment['commit']}")
    if device == "cpu":
        print("no GPU: every stage that can runs on the CPU at tiny sizes, to show that it does")
    failed = False

    def keep(stage: Stage, record: dict[str, Any]) -> None:
        nonlocal failed
        record = {"stage": stage.name, "environment": environment, **record}
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(out / f"{stage.name}.json", text + "\n")
        write_atomic(out / "README.md", readme(names, _records(out)))
        failed = failed or record["outcome"] == "failed"
        said = f"{record['outcome']}, {record['seconds']:.0f} s: {record['sentence']}"
        print(f"  {stage.name}: {said}", flush=True)

    aside: list[tuple[Stage, Future[dict[str, Any]]]] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        here = Here(device=device, scratch=Path(scratch), root=checkout())
        for stage in chosen:
            if stage.alone:
                while aside:
                    beside, future = aside.pop()
                    keep(beside, future.result())
            print(f"{stage.name}: {stage.about} (at most {stage.seconds:.0f} s)", flush=True)
            if stage.aside:
                aside.append((stage, pool.submit(run_stage, stage, here)))
            else:
                keep(stage, run_stage(stage, here))
        for beside, future in aside:
            keep(beside, future.result())
    print(f"written: {out / 'README.md'}")
    print(not_run(names, _records(out)))
    return int(failed)


def _given(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recollect.benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="a GPU where there is one")
    parser.add_argument(
        "--out", type=Path, help=f"folder of the report: {_RESULTS}, without a GPU {_TRIAL}"
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        help=f"stages, separated by commas, of {', '.join(names)}; the others keep what they have",
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.only if name not in names]
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}; there are {', '.join(names)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return given


def _records(out: Path) -> dict[str, dict[str, Any]]:
    """What stages have written, in this run or one before."""
    found: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        path = out / f"{stage.name}.json"
        if path.exists():
            found[stage.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
