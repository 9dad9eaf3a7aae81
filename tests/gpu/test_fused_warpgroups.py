"""Products of whole warpgroups, in batches of 64 tokens: what orders them is needed, each in turn.

They run while their warps go on: operands in shared memory must have been handed over to them and
must stay, sums are there behind a wait. The simulator (`simulator/warpgroup_sim.h`) reads the same
descriptors and registers as a device and reports what is not ordered.
"""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch
from tests.gpu.simulator.run import FAULTS, Fault, library, simulated, unnoticed
from tests.gpu.test_fused_offline import build
from tests.gpu.test_fused_walk import PLACES, drawn, plain, titans, walked
from torch import Tensor

import recollect as rc

HANDED, ORDERED = 50, 100
"""From where the simulator counts what hands memory over, and what orders products."""

BARRIERS = dict(enumerate(PLACES))
ASKED = {len(PLACES): "asked"}
HANDS = {
    HANDED + PLACES.index(name): f"{name} handed over"
    for name in ("begin", "hidden units", "error", "moved", "read")
}
PRODUCTS = ("hidden units", "prediction", "turned back", "state", "scores", "reads")
ORDER = {
    ORDERED + 3 * i + j: f"{kind} of {name}"
    for (i, name), (j, kind) in itertools.product(
        enumerate(PRODUCTS), enumerate(("fence", "commit", "wait"))
    )
}
ALL = BARRIERS | HANDS | ORDER


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulator")


def unseen(
    recipe: rc.Recipe,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    places: dict[int, str] = ALL,
    T: int = 150,
    D: int = 64,
    after: int = 0,
) -> set[str]:
    """What can be left out, after so many crossings, without a fault or another digit."""
    x = drawn(recipe, T, D=D)

    def digits() -> list[Tensor]:
        y, state = walked(recipe, x)
        return [y, *state.tensors()]

    return unnoticed(digits, places, folder, monkeypatch, after=after)


def test_all_that_orders_a_walk_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every barrier, fence, commit, wait, and all that is handed over."""
    assert unseen(titans(b=64), folder, monkeypatch) == set()


@pytest.mark.slow
def test_it_is_needed_later_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When memory holds what was there a batch or two ago, and not NaN."""
    once = {"begin", "end", "begin handed over"}
    assert unseen(titans(b=64), folder, monkeypatch, T=330, after=2) == once
    # One side of what peers read is enough: a cluster waits where shares would be summed.
    assert unseen(plain(b=64), folder, monkeypatch) == set()


@pytest.mark.slow
def test_wide_heads_need_it_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 channels, where hidden units at queries take the place of queries that all have read.

    With momentum a block has 32 hidden units, and its state is moved by products of warps.
    """
    places = ALL | ASKED
    made = plain("silu", b=64, expansion=2)
    assert unseen(made, folder, monkeypatch, places=places, D=128) == set()
    by_warps = {name for name in ORDER.values() if name.endswith("of state")}
    made = titans(b=64, expansion=1)
    assert unseen(made, folder, monkeypatch, places=places, D=128) == by_warps


@pytest.mark.parametrize(
    ("left_out", "fault"),
    [
        ("fence of scores", "a product without a fence"),
        ("error handed over", "an operand was not handed over"),
        ("moved", "an operand changes under a product"),
        ("wait of state", "an operand changes under a product"),
        ("wait of prediction", "an accumulator changes under a product"),
    ],
)
def test_faults_have_names(
    left_out: str, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = titans(b=64)
    x = drawn(recipe, 150)
    place = next(place for place, name in ALL.items() if name == left_out)
    with simulated(monkeypatch, folder, skip=place), pytest.raises(Fault, match=fault):
        walked(recipe, x)


class Given(ctypes.Structure):
    """``Given`` of ``simulator/product_sim.cpp``."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("left", ctypes.c_ulonglong),
        ("right", ctypes.c_ulonglong),
        ("out", ctypes.c_void_p),
        ("bytes", ctypes.c_int),
        ("transposed", ctypes.c_int),
    ]


SIZE = 8192
"""Bytes of shared memory of one product."""


def laid(memory: Tensor, x: Tensor, start: int, along: int, across: int, transposed: bool) -> int:
    """Puts a matrix [rows, 16] where PTX's manual says that it lies, and returns its descriptor.

    Args:
        memory: in halves. x: summed over its columns. start, along, across: in bytes.
        transposed: whether a row's entries lie apart and a column's eight together.
    """
    for row, column in itertools.product(range(x.shape[0]), range(16)):
        within = (column % 8 * 8 + row % 8) if transposed else (row % 8 * 8 + column % 8)
        place = (start + column // 8 * along + row // 8 * across) // 2 + within
        assert memory[place].isnan()
        memory[place] = x[row, column]
    return start >> 4 | (along >> 4) << 16 | (across >> 4) << 32


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("along", "across"), [(128, 256), (1024, 128), (144, 656)])
def test_descriptors_are_read_as_the_manual_says(
    transposed: bool, along: int, across: int, folder: Path
) -> None:
    made = build(b=64)
    assert made is not None
    g = torch.Generator().manual_seed(along)
    a, b = torch.randn(64, 16, generator=g).bfloat16(), torch.randn(32, 16, generator=g).bfloat16()
    memory = torch.full((SIZE // 2,), float("nan")).bfloat16()
    out = torch.full((64, 32), float("nan"))
    left = laid(memory, a, 4096, 2048, 256, False)
    right = laid(memory, b, 64, along, across, transposed)

    def run(left: int) -> str:
        given = Given(memory.data_ptr(), left, right, out.data_ptr(), SIZE, int(transposed))
        found = library("product", made, folder).run(ctypes.byref(given), ctypes.c_uint(1), -1, 0)
        return FAULTS[found]

    assert run(left) == ""
    torch.testing.assert_close(out.double(), a.double() @ b.double().mT, rtol=1e-5, atol=1e-5)
    assert run(left | 1 << 62) == "a descriptor of nothing"  # a swizzle
    assert run(left | SIZE >> 4) == "a descriptor of nothing"  # behind the end
