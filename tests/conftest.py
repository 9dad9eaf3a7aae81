"""Settings that every test shares."""

from __future__ import annotations

import os

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


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start each test from one seed, so that none depends on those that ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded CPU generator of the test's own."""
    return torch.Generator().manual_seed(0)
