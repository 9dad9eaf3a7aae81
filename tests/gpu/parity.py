"""A preset on a device against the same preset on the CPU, and where the host waits for it.

On CUDA torch itself says where (`torch.cuda.set_sync_debug_mode`): a value that is asked for, and
numbers that are sent from memory that is not pinned. Its word does not cover everything (linear
algebra may wait inside CUDA's libraries), and the first pass is not looked at: constants are made
there, and libraries loaded.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.gpu.passes import (
    HEADS,
    WIDTH,
    Unwatched,
    decode,
    distance,
    length,
    passes,
    pieces,
)
from torch import nn

import recollect as rc

DEVICE = torch.device(os.environ.get("RECOLLECT_TEST_DEVICE", "cuda"))
"""Where tests of a GPU run; ``cpu`` shows that they run, and nothing else."""

HERE = DEVICE.type != "cuda" or torch.cuda.is_available()
MISSING = "torch sees no CUDA device"


class Waits:
    """Runs stretches, and keeps the lines at which the host waited."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _debug("warn")
            try:
                result = call()
            finally:
                _debug("default")
        self.lines[name] = [
            f"{Path(one.filename).name}:{one.lineno}"
            for one in said
            if "synchronizing CUDA operation" in str(one.message)
        ]
        return result


def _debug(mode: str) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def moved(layer: nn.Module) -> nn.Module:
    """A copy on the device."""
    return copy.deepcopy(layer).to(DEVICE)


def compare(name: str, *, precision: str | None = None) -> dict[str, Any]:
    """Distances of a preset's numbers from the CPU's, and the lines at which the host waited.

    Args:
        name: of the preset.
        precision: of the layer's products on the device; the CPU's have all bits.
    """
    preset = rc.zoo.get(name)
    torch.manual_seed(0)
    cpu = preset.build(d_model=WIDTH, num_heads=HEADS)
    there, waits, quiet = moved(cpu), Waits(), Unwatched()
    if precision is not None:
        there.precision = precision
    x = torch.randn(1, length(preset), WIDTH)
    y, slopes = passes(cpu, x.clone(), quiet)
    passes(there, x.to(DEVICE, copy=True), quiet)
    there.zero_grad()
    y_there, slopes_there = passes(there, x.to(DEVICE, copy=True), waits)
    result: dict[str, Any] = {
        "y": distance(y_there, y),
        "gradient": max(distance(slopes_there[n], slope) for n, slope in slopes.items()),
    }
    if isinstance(cpu, rc.MemoryLayer):
        parts = pieces(x.detach())
        sent = [part.to(DEVICE) for part in parts]
        decode(there, sent, quiet)
        result["decoded"] = distance(decode(there, sent, waits), decode(cpu, parts, quiet))
    return {**result, "waits": waits.lines}
