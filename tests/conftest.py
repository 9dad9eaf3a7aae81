"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# In CI the same examples are drawn each time, so that a red run can be run again; elsewhere
# hypothesis explores. Neither has a deadline: the first call of a torch op may take long.
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
    """Give each xdist worker one thread; a lone process keeps torch's own choice."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


HAS_GPU = torch.accelerator.is_available()
SLOW_LIMIT = 1800
"""Seconds that a slow test may take; others have `timeout` of pyproject.toml."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))


def pytest_collection_finish() -> None:
    """Keep what was collected out of garbage collections, and measure the matmul ceiling quickly.

    A collection of all tests and their modules takes a second, and some tests collect many times.
    The product of a training run's ceiling takes a tenth of a second in float32, and seconds in
    bfloat16 on some CPUs.
    """
    gc.collect()
    gc.freeze()
    if (flops := sys.modules.get("recollect.lm.memory_estimate.flops")) is not None:
        flops.__dict__["_MATRIX_SIZE"] = 256


def pytest_sessionfinish() -> None:
    """Let the interpreter end as it does otherwise: it frees what it can collect."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Answers to signals as Python has them, also where a script's background job ignores them.

    Tests that interrupt themselves, and children that inherit what is ignored, would wait for ever.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    initial = {number: signal.signal(number, answer) for number, answer in usual.items()}
    yield
    for number, answer in initial.items():
        signal.signal(number, answer)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start each test from one seed, so that none depends on those that ran before it.

    Without a GPU `torch.manual_seed` formats the stack for three absent devices, in a millisecond,
    and stores it for their initialization.
    """
    if HAS_GPU:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded CPU generator of the test's own."""
    return torch.Generator().manual_seed(0)
