"""Measure recollect on a GPU with one command, in at most nine minutes.

    python scripts/gpu_run.py --out runs/gpu
    python scripts/gpu_run.py --read results/gpu/h200.jsonl --markdown

Each step below is a process with a time limit. It appends a line of JSON to ``gpu_run.jsonl`` as
soon as a number is known, so that a run that is cut short keeps its results. Steps that compare
numbers or compile kernels run next to each other; steps that measure times run alone. Without a
GPU, the steps run at tiny sizes on the CPU, which tests this script.

Nothing is installed. The run needs torch and the source tree, and uses triton,
flash-linear-attention, titans-pytorch and transformers if they are there. Wheels in ``.gpu/whl``
are unpacked into a temporary folder. In a copy without ``.git`` the file ``.gpu/commit`` contains
the commit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_tables import markdown, summary

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ROOT / ".gpu"
FILE = "gpu_run.jsonl"
NUM_CONFIGURATIONS = 2
"""Configurations of a Triton kernel that are tried. Compiling one takes about a second, and
flash-linear-attention has up to 270 per kernel."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part of the run.

    Attributes:
        name: name of the step's function.
        module: module of the function.
        seconds: time limit.
        processes: number of processes that share the step.
        exclusive: whether nothing else runs at the same time.
        warm_up: whether the step only compiles the kernels of a later step.
    """

    name: str
    module: str = "gpu_times"
    seconds: float
    processes: int = 1
    exclusive: bool = False
    warm_up: bool = False

    @property
    def label(self) -> str:
        """The name of the step in the lines."""
        return f"warm {self.name}" if self.warm_up else self.name


STEPS = (
    Step(name="device", module="gpu_checks", seconds=60, exclusive=True),
    Step(name="presets", module="gpu_checks", seconds=110, processes=7),
    Step(name="backend", module="gpu_checks", seconds=110, processes=6),
    Step(name="recurrence", module="gpu_checks", seconds=110, processes=2),
    Step(name="adoption", module="gpu_checks", seconds=110, processes=6),
    Step(name="linear", seconds=100, processes=8, warm_up=True),
    Step(name="training", seconds=100, warm_up=True),
    Step(name="decoding", seconds=100, warm_up=True),
    Step(name="linear", seconds=90, exclusive=True),
    Step(name="training", seconds=90, exclusive=True),
    Step(name="deep", seconds=110, exclusive=True),
    Step(name="decoding", seconds=50, exclusive=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps, one step, or print the tables of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT", "runs/gpu"), help="folder of the results"
    )
    parser.add_argument("--seconds", type=float, default=530.0, help="time limit of the run")
    names = ", ".join(dict.fromkeys(step.name for step in STEPS))
    parser.add_argument("--only", default="", help=f"steps, separated by commas: {names}")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda if there is one")
    parser.add_argument("--read", type=Path, nargs="+", help="print the tables of these files")
    parser.add_argument("--markdown", action="store_true", help="print no failures after them")
    parser.add_argument("--step", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        print(markdown(options.read) if options.markdown else "\n".join(map(summary, options.read)))
        return 0
    if options.step:
        run_step(**options.step)
        return 0
    only = set(filter(None, options.only.split(",")))
    if unknown := only - {step.name for step in STEPS}:
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; expected some of {names}")
    run_all(options.out.resolve(), options.seconds, only, options.device)
    return 0


# -- one step, in its own process ----------------------------------------------------------------


def run_step(index: int, **fields: Any) -> None:
    """Run a step.

    Args:
        index: index of the step in `STEPS`.
        **fields: fields of `gpu_checks.StepContext`.
    """
    step = STEPS[index]
    import torch

    # The library warns where slower operations replace those of a device.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", message=".*please report it")

    if fields["device"] == "cpu" or not step.exclusive:
        torch.set_num_threads(1)
    checks, module = (importlib.import_module(name) for name in ("gpu_checks", step.module))
    if checks.has_backend(fields["device"]):
        limit_configurations(NUM_CONFIGURATIONS)
    context = checks.StepContext(**{**fields, "path": Path(fields["path"])})
    warnings.showwarning = context.write_warning
    with context.guard(step.name):
        getattr(module, step.name)(context)


def limit_configurations(limit: int) -> None:
    """Let Triton try at most this many configurations of each kernel, evenly spaced.

    Call it before flash-linear-attention is imported. Its operators and the library's calls of them
    share their kernels, so that the comparison of both stays fair.
    """
    from triton.runtime import autotuner

    initialize = autotuner.Autotuner.__init__

    def limited(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kw: Any) -> None:
        if configs and len(configs) > limit:
            configs = [configs[i * len(configs) // limit] for i in range(limit)]
        initialize(self, fn, arg_names, configs, *args, **kw)

    autotuner.Autotuner.__init__ = limited  # type: ignore[method-assign]


# -- all steps -----------------------------------------------------------------------------------


def run_all(out: Path, seconds: float, only: set[str], device: str | None) -> None:
    """Run the steps in order, and print the tables of the file.

    Args:
        out: folder of the file.
        seconds: time limit of all steps together.
        only: names of the steps to run besides ``device``; empty for all.
        device: ``"cuda"`` or ``"cpu"``; ``None`` for a GPU if there is one.
    """
    start = time.time()
    out.mkdir(parents=True, exist_ok=True)
    path, commit_file = out / FILE, EXTRAS / "commit"
    commit = commit_file.read_text().strip() if commit_file.exists() else "unknown"
    with tempfile.TemporaryDirectory() as scratch, (out / "log.txt").open("ab") as log:
        for wheel in sorted((EXTRAS / "whl").glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(Path(scratch) / "site")
        environment = _environment(Path(scratch))
        device = device or _find_device(environment)
        environment["RECOLLECT_TEST_DEVICE"] = device
        running: list[_Running] = []
        for index, step in enumerate(STEPS):
            # The lines of a run begin with the versions, which the step `device` writes.
            if (only and step.name not in only | {"device"}) or (step.warm_up and device == "cpu"):
                continue
            if step.exclusive:
                _wait_for(running, path, start)
            processes = 1 if device == "cpu" else step.processes
            for part in range(processes):
                deadline = start + seconds - 3
                if device != "cpu":  # a CPU may be slow, and nothing else has to run
                    deadline = min(deadline, time.time() + step.seconds)
                if deadline - time.time() < 8:
                    _write(path, start, step.label, "left out", why="no time left")
                    continue
                fields = {
                    "index": index, "step": step.label, "part": part, "num_parts": processes,
                    "device": device, "warm_up": step.warm_up, "deadline": deadline,
                    "path": str(path), "start": start, "commit": commit,
                }  # fmt: skip
                process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve()), "--step", json.dumps(fields)],
                    cwd=ROOT,
                    # A choice that was timed next to other work is not stored.
                    env=environment | {"FLA_CACHE_RESULTS": str(int(step.exclusive))},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                running.append(_Running(step.label, part, process, deadline))
            if step.exclusive:
                _wait_for(running, path, start)
        _wait_for(running, path, start)
    _write(path, start, "run", "ended")
    print(summary(path))


@dataclass(frozen=True)
class _Running:
    label: str
    part: int
    process: subprocess.Popen[bytes]
    deadline: float


def _wait_for(running: list[_Running], path: Path, start: float) -> None:
    """Wait for all processes, and end each that exceeds its time limit."""
    while running:
        one = running.pop(0)
        try:
            status = one.process.wait(timeout=max(0.1, one.deadline + 3 - time.time()))
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)  # with the processes that it started
        one.process.wait()
        if status != 0:
            why = "time limit" if status is None else f"exit status {status}"
            _write(path, start, one.label, "cut short", part=one.part, why=why)


def _write(path: Path, start: float, step: str, what: str, **data: Any) -> None:
    line = {"step": step, "what": what, "t": round(time.time() - start, 1), **data}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _environment(scratch: Path) -> dict[str, str]:
    """Return the variables of all steps; caches of compiled kernels are in the scratch folder."""
    places = [str(ROOT), str(ROOT / "src"), str(scratch / "site"), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }


def _find_device(environment: Mapping[str, str]) -> str:
    code = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


if __name__ == "__main__":
    sys.exit(main())
