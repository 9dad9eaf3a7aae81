"""Requests of presets to a device, and the distance of their results from a CPU's.

``python -m tests.gpu.measure NAME...`` prints one JSON object per preset, and ``python -m
tests.gpu.measure --write [NAME...]`` lowers `budgets.json` if these presets, or all, need less
(with ``--raise`` it takes the measured numbers, for a justified change). It is a separate program
because the pretended device changes its process (`tests.gpu.pretend`).

A preset runs on the CPU and on the device: forward and backward of one sequence, then a prompt and
tokens after it one by one. Counts are sums over each stretch, with one sum for the decoded tokens.
Constants are not counted, because each stretch runs once before. Deep memories run by PyTorch
operations (`tests.gpu.recurrence` has their kernels).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tests.gpu import pretend
from tests.gpu.passes import HEADS, WIDTH, decode, distance, length, passes, pieces

import recollect as rc

BUDGETS = Path(__file__).with_name("budgets.json")
KINDS = ("launches", "syncs", "copies")


class Stretches:
    """The requests of each stretch of a run to the device."""

    def __init__(self, *, counts: bool) -> None:
        self.counts, self.by_name = counts, dict[str, dict[str, Any]]()

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        with pretend.counted() if self.counts else nullcontext(None) as built:
            result = call()
        if built is not None:
            self.by_name[name] = {
                "launches": built.launches,
                **{kind: dict(getattr(built, kind)) for kind in ("syncs", "copies", "mixed")},
            }
        return result


def measure(
    name: str, *, tokens: int | None = None, precision: str | None = None
) -> dict[str, Any]:
    """Return counts of a preset by stretch, and the distance of its results from the CPU's.

    Args:
        name: of the preset.
        tokens: of forward and backward.
        precision: of the layer's products on the device; the CPU's have all bits.
    """
    preset = rc.zoo.get(name)
    torch.manual_seed(0)
    cpu = preset.build(d_model=WIDTH, num_heads=HEADS)
    moved = pretend.put_module(cpu)
    if precision is not None:
        moved.precision = precision
    x = torch.randn(1, tokens or length(preset), WIDTH)
    uncounted, stretches = Stretches(counts=False), Stretches(counts=True)
    y, slopes = passes(cpu, x.clone(), uncounted)
    passes(moved, pretend.put(x), Stretches(counts=True))  # constants are built and stored
    moved.zero_grad()
    y_there, slopes_there = passes(moved, pretend.put(x), stretches)
    result: dict[str, Any] = {
        "name": name,
        "y": distance(y_there, y),
        "gradient": max(distance(slopes_there[n], slope) for n, slope in slopes.items()),
    }
    if isinstance(cpu, rc.MemoryLayer):
        parts = pieces(x)
        sent = [pretend.put(piece) for piece in parts]
        decode(moved, sent, Stretches(counts=True))
        outputs = decode(moved, sent, stretches)
        result["decoded"] = distance(outputs, decode(cpu, parts, uncounted))
    return {**result, "stretches": stretches.by_name}


# -- budgets --------------------------------------------------------------------------------------


def totals(stretch: Mapping[str, Any]) -> list[int]:
    """Return launches, syncs and copies of a stretch."""
    return [stretch["launches"], *(sum(stretch[kind].values()) for kind in KINDS[1:])]


def version() -> str:
    """Return the major and minor version of torch, on which numbers of launches depend."""
    return ".".join(torch.__version__.split(".")[:2])


def write(names: list[str], *, higher: bool) -> None:
    """Measure presets; lower their budgets, and raise them if allowed."""
    old = json.loads(BUDGETS.read_text())["presets"] if BUDGETS.exists() else {}
    presets: dict[str, dict[str, list[int]]] = {}
    for name in rc.zoo.names():
        if name not in names and name in old:
            presets[name] = old[name]
            continue
        print(name, file=sys.stderr, flush=True)
        initial: dict[str, list[int]] = old.get(name, {})
        presets[name] = {}
        for part, stretch in measure(name)["stretches"].items():
            now = totals(stretch)
            pairs = zip(now, now if higher else initial.get(part, now), strict=True)
            presets[name][part] = [min(pair) for pair in pairs]
    lines = [f"    {json.dumps(name)}: {json.dumps(parts)}" for name, parts in presets.items()]
    head = f'{{\n  "torch": "{version()}",\n  "numbers": {json.dumps(KINDS)},\n  "presets": {{\n'
    BUDGETS.write_text(head + ",\n".join(lines) + "\n  }\n}\n")


def main() -> None:
    """Measure the named presets, or all for their budgets."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--bits", type=int, help="of what products multiply: 10 TF32, 7 bfloat16")
    parser.add_argument("--precision", help="of the layers' products on the device")
    parser.add_argument("--write", action="store_true", help="lower budgets.json")
    parser.add_argument("--raise", action="store_true", dest="higher", help="or raise it")
    args = parser.parse_args()
    pretend.bits = args.bits
    warnings.simplefilter("ignore")  # torch: the Python backend is experimental
    if args.write:
        write(args.names or rc.zoo.names(), higher=args.higher)
    else:
        for name in args.names:
            result = measure(name, tokens=args.tokens, precision=args.precision)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
    # Autograd has a thread per device, which torch cannot end for a device written in Python.
    os._exit(0)
