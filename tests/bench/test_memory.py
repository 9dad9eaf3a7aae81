"""Live tensors are counted until they are freed, and segments of a row bound the peak."""

from __future__ import annotations

import functools

import pytest
import torch

from recollect.lm.memory_estimate.live_memory import LiveMemory

pytest.importorskip("transformers")

from recollect.benchmarks.cases.memory import measure_peak


def test_live_tensors_are_counted_until_they_are_freed() -> None:
    weight = torch.zeros(100, requires_grad=True)
    with LiveMemory([weight]) as memory:
        assert memory.current == 400
        x = weight * 2
        y = x.view(10, 10)  # of the same storage
        assert memory.current == 800
        (y.square().sum()).backward()
        assert memory.peak >= 1200  # a gradient next to them
        del x, y
    assert memory.current == 800  # the weight and its gradient
    memory.reset_peak()
    assert memory.peak == 800


@functools.cache
def peak(context: int, **read: str | int) -> int:
    return measure_peak(
        {
            "model": {"recipe": "gated_delta_net", "width": 32, "depth": 2, "heads": 1},
            "data": {"context": context, **read},
            "optimizer": {"steps": 1, "batch": 1},
            "run": {"save_every": 0},
        }
    ).live


@pytest.mark.parametrize("gradient", ["cut", pytest.param("kept", marks=pytest.mark.slow)])
def test_memory_is_that_of_a_segment(gradient: str) -> None:
    one = peak(512, segments=1)
    assert peak(4096, segments=1) > 4 * one
    assert peak(4096, segments=8, segment_gradient=gradient) < 1.1 * one
