"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# In CI hypothesis draws equal examples each time, so that a failed run can be repeated; elsewhere
# it explores. Neither has a deadline, because the first call of a torch op can be slow.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Give each xdist worker one thread; a single process has torch's default."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


HAS_GPU = torch.accelerator.is_available()
SLOW_LIMIT = 1800
"""Seconds of a slow test; others have the `timeout` of pyproject.toml."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))


def pytest_collection_finish() -> None:
    """Freeze collected objects for the garbage collector, and shorten the matmul benchmark.

    A collection of all tests and their modules takes a second, and some tests collect many times.
    The product for a training run's ceiling takes a tenth of a second in float32, and seconds in
    bfloat16 on some CPUs.
    """
    gc.collect()
    gc.freeze()
    if (flops := sys.modules.get("recollect.lm.memory_estimate.flops")) is not None:
        flops.__dict__["_MATRIX_SIZE"] = 256


def pytest_sessionfinish() -> None:
    """Unfreeze objects, so that the interpreter exits as usual."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Restore Python's signal handlers, also in background jobs of scripts that ignore signals.

    Tests that interrupt themselves, and children that inherit ignored signals, would wait forever.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    initial = {number: signal.signal(number, answer) for number, answer in usual.items()}
    yield
    for number, answer in initial.items():
        signal.signal(number, answer)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start each test from one seed, independent of earlier tests.

    Without a GPU `torch.manual_seed` formats the stack for three absent devices, in a millisecond,
    and stores it for their initialization.
    """
    if HAS_GPU:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """Return a seeded CPU generator."""
    return torch.Generator().manual_seed(0)
