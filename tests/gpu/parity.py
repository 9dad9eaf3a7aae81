"""A preset on a device against the CPU, and the lines at which the host waits.

On CUDA torch reports waits (`torch.cuda.set_sync_debug_mode`): a value that the host reads, and
numbers from memory that is not pinned. The report is incomplete (linear algebra may wait inside
CUDA's libraries), and the first pass is ignored, because it builds constants and loads libraries.
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
"""Device of the GPU tests; ``cpu`` shows only that they run."""

IS_AVAILABLE = DEVICE.type != "cuda" or torch.cuda.is_available()
MISSING = "torch sees no CUDA device"


class Waits:
    """Runs stretches, and records the lines at which the host waited."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _debug("warn")
            try:
                result = call()
            finally:
                _debug("default")
        self.lines[name] = [
            f"{Path(one.filename).name}:{one.lineno}"
            for one in caught
            if "synchronizing CUDA operation" in str(one.message)
        ]
        return result


def _debug(mode: str) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def moved(layer: nn.Module) -> nn.Module:
    """Return a copy on the device."""
    return copy.deepcopy(layer).to(DEVICE)


def compare(name: str, *, precision: str | None = None) -> dict[str, Any]:
    """Return distances of a preset's results from the CPU's, and lines at which the host waited.

    Args:
        name: of the preset.
        precision: of the layer's products on the device; the CPU's have all bits.
    """
    preset = rc.zoo.get(name)
    torch.manual_seed(0)
    cpu = preset.build(d_model=WIDTH, num_heads=HEADS)
    moved_layer, waits, unwatched = moved(cpu), Waits(), Unwatched()
    if precision is not None:
        moved_layer.precision = precision
    x = torch.randn(1, length(preset), WIDTH)
    y, slopes = passes(cpu, x.clone(), unwatched)
    passes(moved_layer, x.to(DEVICE, copy=True), unwatched)
    moved_layer.zero_grad()
    y_there, slopes_there = passes(moved_layer, x.to(DEVICE, copy=True), waits)
    result: dict[str, Any] = {
        "y": distance(y_there, y),
        "gradient": max(distance(slopes_there[n], slope) for n, slope in slopes.items()),
    }
    if isinstance(cpu, rc.MemoryLayer):
        parts = pieces(x.detach())
        sent = [part.to(DEVICE) for part in parts]
        decode(moved_layer, sent, unwatched)
        result["decoded"] = distance(
            decode(moved_layer, sent, waits), decode(cpu, parts, unwatched)
        )
    return {**result, "waits": waits.lines}
