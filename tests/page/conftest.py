"""Fixtures of the page's tests: the library's members, and pages of a few systems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from recollect.choices import member
from recollect.page.table import make_table
from recollect.page.write import render

SYSTEMS = ("gated_delta_net", "delta_net", "linear_attention", "titans", "bilinear_gated_attention")


@pytest.fixture(scope="module", autouse=True)
def _own_members() -> Iterator[None]:
    """Remove members that other tests have registered, because the page shows every member."""
    initial = dict(member._REGISTRY)
    for name, cls in initial.items():
        if not cls.__module__.startswith("recollect."):
            del member._REGISTRY[name]
    yield
    member._REGISTRY.clear()
    member._REGISTRY.update(initial)


@pytest.fixture(scope="module")
def table(_own_members: None) -> dict[str, Any]:
    return make_table(SYSTEMS)


@pytest.fixture(scope="module")
def page(_own_members: None) -> str:
    return render(SYSTEMS)
