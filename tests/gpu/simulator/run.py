"""The fused walk on a CPU: its own source, compiled by g++ over `sim.h` in place of PTX."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect.engines.deep.fused import walk
from recollect.engines.deep.fused.fitting import Build

HERE = Path(__file__).parent
CUDA = Path(recollect.__file__).parent / "engines/deep/fused/cuda"
FAULTS = (
    "",
    "a barrier is not reached by all",
    "a misaligned matrix load",
    "a block has ended",
    "an operand changes under a product",
    "an operand was not handed over",
    "a product without a fence",
    "an accumulator changes under a product",
    "warps of a product disagree",
    "a descriptor of nothing",
)


class Fault(Exception):
    """What the simulator found."""


def compiler() -> str:
    """g++, without which a test is skipped."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ to build the simulator of the CUDA kernels with")
    return found


def library(kernel: str, build: Build, folder: Path) -> ctypes.CDLL:
    """A kernel of a build, compiled once per folder."""
    given = build.macros(kernel)
    macros = [f"-D{name}={value}" for name, value in given.items()]
    digest = hashlib.sha256(" ".join(macros).encode()).hexdigest()[:12]
    path = folder / f"{kernel}_{digest}.so"
    source = {"trace": "walk", "token": "decode"}.get(kernel, kernel)
    text = HERE / f"{source}_sim.cpp"
    if not path.exists():
        flags = ["-O2", "-std=c++17", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
        command = [compiler(), *flags, *macros, f"-I{HERE}", f"-I{CUDA}"]
        made = path.with_suffix(".part")
        subprocess.run([*command, str(text), "-o", str(made)], check=True)
        made.rename(path)
    return ctypes.CDLL(str(path))


@contextmanager
def simulated(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    seed: int = 0,
    skip: int = -1,
    after: int = 0,
    kernels: Sequence[str] = ("walk", "trace", "back", "token"),
) -> Iterator[list[str]]:
    """Calls of `rc.recall` whose kernels the simulator runs; yields the names of those that ran.

    Args:
        seed: of the order of warps. skip: the barrier that is left out, or −1.
        after: how often each thread crosses it before that.
        kernels: those that leave it out.
    """
    ran: list[str] = []

    def launch(kernel: str, build: Build, task: ctypes.Structure, device: torch.device) -> None:
        run = library(kernel, build, folder).run
        without = skip if kernel in kernels else -1
        fault = run(ctypes.byref(task), ctypes.c_uint(seed), without, after)
        ran.append(kernel)
        if fault:
            raise Fault(FAULTS[fault])

    with monkeypatch.context() as patch:
        patch.setitem(walk.LAUNCHERS, "cpu", launch)
        patch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        yield ran


def unnoticed(
    digits: Callable[[], Sequence[Tensor]],
    places: Mapping[int, str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **only: Any,
) -> set[str]:
    """What can be left out, whatever the order of warps, without a fault or a digit that changes.

    Args:
        digits: all that a call gives.
        places: barriers, and what else orders a kernel, with their names.
        only: of `simulated`, from when on and of which kernels they are left out.
    """
    with simulated(monkeypatch, folder):
        right = digits()

    def noticed(place: int) -> bool:
        for seed in range(8):
            with simulated(monkeypatch, folder, seed=seed, skip=place, **only):
                try:
                    if not all(map(torch.equal, digits(), right)):
                        return True
                except Fault:
                    return True
        return False

    return {name for place, name in places.items() if not noticed(place)}


def _poisoned(make):
    """The same, NaN everywhere: what nobody writes shows."""

    def made(*args, **kwargs):
        x = make(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    return made
