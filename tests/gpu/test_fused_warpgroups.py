"""Products of whole warpgroups, in batches of 64 tokens: what orders them is needed, each in turn.

They run while their warps go on: operands in shared memory must have been handed over to them and
must stay, sums are there behind a wait. The simulator (`simulator/warpgroup_sim.h`) reads the same
descriptors and registers as a device and reports what is not ordered.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.gpu.simulator.run import Fault, simulated
from tests.gpu.test_fused_walk import PLACES, drawn, missed, plain, titans, walked
from torch import Tensor

HANDED, ORDERED = 50, 100
"""Where the simulator counts what hands memory over, and what orders products, from."""

PRODUCTS = ("hidden units", "prediction", "turned back", "state", "scores", "reads")
HANDS = ("begin", "hidden units", "error", "moved", "read")
ORDER = {HANDED + PLACES.index(name): f"{name} handed over" for name in HANDS} | {
    ORDERED + 3 * i + j: f"{kind} of {name}"
    for (i, name), (j, kind) in itertools.product(
        enumerate(PRODUCTS), enumerate(("fence", "commit", "wait"))
    )
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulator")


def unseen(folder: Path, monkeypatch: pytest.MonkeyPatch, T: int, after: int) -> set[str]:
    """What can be left out, after so many crossings, without a fault or another digit."""
    recipe = titans(b=64)
    x = drawn(recipe, T)

    def digits() -> list[Tensor]:
        y, state = walked(recipe, x)
        return [y, *state.tensors()]

    with simulated(monkeypatch, folder):
        right = digits()
    found: set[str] = set()
    for place, name in ORDER.items():
        for seed in range(4):
            with simulated(monkeypatch, folder, seed=seed, skip=place, after=after):
                try:
                    same = all(map(torch.equal, digits(), right))
                except Fault:
                    break
            if not same:
                break
        else:
            found.add(name)
    return found


def test_every_barrier_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missed(titans(b=64), 150, folder, monkeypatch, after=0) == set()


def test_every_fence_commit_and_wait_is_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unseen(folder, monkeypatch, 150, after=0) == set()


@pytest.mark.slow
def test_they_are_needed_later_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory holds what was there a batch or two ago, and not NaN."""
    assert unseen(folder, monkeypatch, 330, after=2) == {"begin handed over"}  # crossed once
    once = {"begin", "end"}
    assert missed(titans(b=64), 330, folder, monkeypatch, after=2) == once
    # One side of what peers read is enough because a cluster's barrier stands where shares would.
    assert missed(plain(b=64), 150, folder, monkeypatch, after=0) == set()


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (ORDERED, "a product without a fence"),
        (HANDED + PLACES.index("error"), "an operand was not handed over"),
        (PLACES.index("moved"), "an operand changes under a product"),
        (ORDERED + 3 * PRODUCTS.index("state") + 2, "an operand changes under a product"),
        (ORDERED + 3 * PRODUCTS.index("prediction") + 2, "an accumulator changes under a product"),
    ],
)
def test_faults_have_names(
    place: int, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = titans(b=64)
    x = drawn(recipe, 150)
    with simulated(monkeypatch, folder, skip=place), pytest.raises(Fault, match=fault):
        walked(recipe, x)


def test_the_order_of_warps_changes_no_digit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = titans(b=64)
    x = drawn(recipe, 200)
    outputs: list[Tensor] = []
    for seed in range(4):
        with simulated(monkeypatch, folder, seed=seed):
            outputs.append(walked(recipe, x)[0])
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(outputs))
