"""The stages of the whole run: what each starts, how long it may take, what came of it.

A stage is a process of its own. Whatever happens to it (a kernel that breaks the device's context,
a hang, too little memory), the next one begins anew; what it has written by then is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import ParseError

import recollect
from recollect.benchmarks.gpu.junit import read_tests
from recollect.engines.fla.operators import installed
from recollect.report.files import write_atomic

__all__ = ["STAGES", "Asked", "Here", "Stage", "run_stage"]

_GRACE = 15.0
"""Seconds that a stage has to write what it knows once it is asked to end."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """Where the stages run.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        scratch: folder for what only this run needs.
        root: of the checkout, whose tests some stages are; ``None`` in an installed package.
    """

    device: str
    scratch: Path
    root: Path | None

    @property
    def tiny(self) -> bool:
        """Whether sizes only show that a stage runs."""
        return self.device == "cpu"


def checkout() -> Path | None:
    """The folder above this package that has the tests of a GPU."""
    root = Path(recollect.__file__).parents[2]
    return root if (root / "tests/gpu/test_presets_on_cuda.py").exists() else None


Command = Callable[[Here, Path], list[str] | str]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the run.

    Attributes:
        name: of its file.
        about: what it asks, in a few words.
        seconds: after which it is ended.
        command: what it starts, given where its result goes; a sentence where it cannot.
        read: a sentence of its result, and whether nothing in it is wrong.
        alone: whether it has the device to itself, so that what it finds out about which
            configuration of a kernel is fastest may be remembered.
        aside: whether it runs beside the next ones that do not need the device to themselves.
    """

    name: str
    about: str
    seconds: float
    command: Command
    read: Callable[[Mapping[str, Any]], tuple[str, bool]]
    alone: bool = True
    aside: bool = False


# -- stages that are tests -------------------------------------------------------------------------


_NO_CHECKOUT = "it is a part of the tests, which an installed package does not have"
_NO_GPU = "there is no CUDA device"
_NO_BACKEND = "flash-linear-attention and triton are not installed: install recollect-layers[gpu]"


def _tests(here: Here, result: Path, *files: str, workers: int = 0) -> list[str] | str:
    """Those of pytest that are marked ``gpu``, in files of `tests/gpu`."""
    if here.root is None:
        return _NO_CHECKOUT
    if importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    # A warning of somebody's driver is no reason to end a day on a GPU with red tests.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default"]
    command += ["-p", "no:cacheprovider", f"--junitxml={result.with_suffix('.xml')}"]
    if workers and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(workers), "--dist", "worksteal"]
    return [*command, *(f"tests/gpu/{name}" for name in files)]


def _parity(here: Here, result: Path) -> list[str] | str:
    presets = "test_presets_on_cuda.py"
    if here.tiny:
        names = ("gated_delta_net", "softmax_attention")
        return _tests(here, result, *(f"{presets}::test_preset[{name}-float32]" for name in names))
    return _tests(here, result, presets, "test_graphs.py", workers=_workers(6))


def _backend(here: Here, result: Path) -> list[str] | str:
    if here.tiny:
        return _NO_GPU
    if not installed():
        return _NO_BACKEND
    return _tests(here, result, "test_backend.py", workers=_workers(8))


def _fused(here: Here, result: Path) -> list[str] | str:
    return _NO_GPU if here.tiny else _tests(here, result, "test_fused_on_cuda.py", "test_rows.py")


def _workers(most: int) -> int:
    """Processes that share the device: they compile and launch, which keeps a core each busy."""
    return max(1, min(most, (os.cpu_count() or 1) // 2))


def _told(found: Mapping[str, Any]) -> tuple[str, bool]:
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for case in found["tests"]:
        counts[case["outcome"]] += 1
    said = f"{counts['passed']} of {counts['passed'] + counts['failed']} pass"
    if counts["skipped"]:
        said += f", {counts['skipped']} were not run"
    return said, not counts["failed"] and bool(counts["passed"])


# -- the others ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a stage's own process is asked, as `_module` says it.

    Attributes:
        device: to measure. tiny: whether sizes are such that only the way is shown.
        seconds: that it may take. save: the file of what it finds.
    """

    device: str
    tiny: bool
    seconds: float
    save: Path

    @classmethod
    def of(cls, arguments: Sequence[str] | None, *, prog: str, seconds: float) -> Asked:
        """Read a command line.

        Args:
            arguments: of it; the process's own where there are none.
            prog: its name. seconds: where it does not say.
        """
        parser = argparse.ArgumentParser(prog=prog)
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--tiny", action="store_true")
        parser.add_argument("--seconds", type=float, default=seconds)
        parser.add_argument("--save", type=Path, required=True)
        return cls(**vars(parser.parse_args(arguments)))

    def keep(self, data: Mapping[str, Any]) -> None:
        """Write what was found so far."""
        write_atomic(self.save, json.dumps(data, indent=2, allow_nan=False) + "\n")


def _module(name: str, here: Here, result: Path, seconds: float) -> list[str]:
    command = [sys.executable, "-m", name, "--device", here.device, "--save", str(result)]
    return [*command, "--seconds", str(seconds), *(["--tiny"] if here.tiny else [])]


def _sanitizer(here: Here, result: Path) -> list[str] | str:
    if here.tiny:
        return _NO_GPU
    if here.root is None:
        return _NO_CHECKOUT
    return [sys.executable, "-m", "tests.gpu.sanitizer", "--save", str(result), "--seconds", "95"]


def _sanitized(found: Mapping[str, Any]) -> tuple[str, bool]:
    if found["tool"] is None:
        return "not run: compute-sanitizer was not found (it comes with CUDA's toolkit)", True
    said = [f"{one['check']} {one['outcome']}" for one in found["checks"]]
    return ", ".join(said), all(one["outcome"] != "found something" for one in found["checks"])


_NEAR = 3e-2
"""Of outputs in bfloat16, as the tests of the kernels have it."""


def _timed(found: Mapping[str, Any]) -> tuple[str, bool]:
    said = f"{len(found['speeds'])} times, {len(found['decoded'])} of decoding"
    if found["left_out"]:
        said += f", {len(found['left_out'])} left out"
    far = {name: away for name, away in found["agreement"].items() if not away <= _NEAR}
    for name, away in far.items():
        said += f"; {name} by the operator is {away:.1e} from PyTorch alone, at most {_NEAR:.0e}"
    return said, bool(found["speeds"]) and not far


def _learned(found: Mapping[str, Any]) -> tuple[str, bool]:
    if not found["history"]:
        return "no step was logged", False
    last = found["history"][-1]
    speed = found.get("tokens_per_second", last["tokens_per_second"])
    share = found.get("ceiling_share", last["ceiling_share"])
    said = f"{speed:,.0f} tokens a second, {share:.1%} of bfloat16's products"
    return f"{said}, loss {found['history'][0]['loss']:.3f} → {last['loss']:.3f}", True


def _kernels(here: Here, result: Path) -> list[str] | str:
    if here.tiny:
        return _NO_GPU
    if not installed():
        return _NO_BACKEND
    return _module("recollect.benchmarks.gpu.kernels", here, result, 560)


def _compiled(found: Mapping[str, Any]) -> tuple[str, bool]:
    failed = [one for one in found["compiled"] if one["why"] is not None]
    said = f"{len(found['compiled']) - len(failed)} of {len(found['compiled'])} in time"
    return said, not failed


def _training(here: Here, result: Path) -> list[str] | str:
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: install recollect-layers[lm]"
    return _module("recollect.benchmarks.gpu.training", here, result, 1 if here.tiny else 300)


STAGES = (
    Stage(
        name="kernels",
        about="flash-linear-attention's kernels compiled for what is timed, beside the next stages",
        seconds=570,
        command=_kernels,
        read=_compiled,
        alone=False,
        aside=True,
    ),
    Stage(
        name="parity",
        about="every preset on the device against the CPU; where the host waits",
        seconds=300,
        command=_parity,
        read=_told,
        alone=False,
    ),
    Stage(
        name="backend",
        about="flash-linear-attention's kernels in bfloat16 against the definition",
        seconds=150,
        command=_backend,
        read=_told,
        alone=False,
    ),
    Stage(
        name="fused",
        about="the fused walk and its tokens against the definition",
        seconds=110,
        command=_fused,
        read=_told,
        alone=False,
    ),
    Stage(
        name="sanitizer",
        about="the fused walk under compute-sanitizer",
        seconds=110,
        command=_sanitizer,
        read=_sanitized,
        alone=False,
    ),
    Stage(
        name="bench",
        about="speed against peers and the device's ceilings; decoding",
        seconds=390,
        command=partial(_module, "recollect.benchmarks.gpu.speed", seconds=350),
        read=_timed,
    ),
    Stage(
        name="training",
        about="170M parameters for five minutes",
        seconds=370,
        command=_training,
        read=_learned,
    ),
)
"""In the order in which they run: 24 minutes together at the most, what runs aside not counted."""


def run_stage(stage: Stage, here: Here) -> dict[str, Any]:
    """Run a stage to its end, or to the end of its time.

    Args:
        stage: what. here: where.

    Returns:
        ``outcome`` (``"passed"``, ``"failed"`` or ``"not run"``), a ``sentence``, ``seconds``, what
        was ``found`` (``None`` where nothing was written), and the end of what a failed one said.
    """
    result = here.scratch / f"{stage.name}.json"
    command = stage.command(here, result)
    if isinstance(command, str):
        return _record("not run", command, 0.0, None)
    began, log = time.monotonic(), here.scratch / f"{stage.name}.log"
    code = _run(command, log, stage, here)
    seconds = time.monotonic() - began
    found, problem = _found(result)
    said, good = "", True
    if found is not None:
        try:
            said, good = stage.read(found)
        except (KeyError, IndexError, TypeError) as error:
            found, problem = None, f"what it has written is not whole ({error!r})"
    reasons = [said] if said else []
    if code is None:
        reasons.append(f"its {stage.seconds:.0f} s were over before it had ended")
    elif code and good:
        reasons.append(f"it ended with status {code}")
    if problem:
        reasons.append(problem)
    failed = not good or found is None or code != 0
    record = _record("failed" if failed else "passed", "; ".join(reasons), seconds, found)
    if found is not None and said.startswith("not run"):
        record["outcome"] = "not run"
        record["sentence"] = said.removeprefix("not run: ")
    elif failed:
        record["tail"] = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    return record


def _record(
    outcome: str, sentence: str, seconds: float, found: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {"outcome": outcome, "sentence": sentence, "seconds": seconds, "found": found}


def _found(result: Path) -> tuple[dict[str, Any] | None, str]:
    """What a stage has written, or why that is nothing."""
    tests = result.with_suffix(".xml")
    try:
        if tests.exists():
            return read_tests(tests), ""
        return json.loads(result.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return None, "it has written nothing"
    except (ValueError, ParseError) as error:
        return None, f"what it has written cannot be read: {error}"


def _run(command: list[str], log: Path, stage: Stage, here: Here) -> int | None:
    """Its exit status; ``None`` where its time was over."""
    environment = os.environ | {"RECOLLECT_TEST_DEVICE": here.device, "PYTHONUNBUFFERED": "1"}
    places = [str(here.root), str(here.root / "src")] if here.root is not None else []
    places += [place for place in (os.environ.get("PYTHONPATH"),) if place]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    if not stage.alone:
        environment["FLA_CACHE_RESULTS"] = "0"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=here.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it starts ends with it
        )
        try:
            return process.wait(timeout=stage.seconds)
        except subprocess.TimeoutExpired:
            _tell(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE)
            return None
        finally:
            _tell(process, signal.SIGKILL)
            process.wait()


def _tell(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
