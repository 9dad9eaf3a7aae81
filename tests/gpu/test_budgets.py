"""Presets on a device that pretends to be a GPU: the CPU's results, within budgets.

`budgets.json` contains, for every preset, the launches, syncs and host-to-device copies of a
forward, a backward, a prompt and the tokens decoded after it (`tests.gpu.measure`). No number may
grow; ``python -m tests.gpu.measure --write`` lowers those that have shrunk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.printed import printed

import recollect as rc

FOLDER = Path(__file__).parent
BUDGETS: dict[str, Any] = json.loads((FOLDER / "budgets.json").read_text())
KINDS = ("launches", "syncs", "copies")

# Results of one algorithm in another order of operations.
NEAR = {"y": 1e-5, "decoded": 1e-5, "gradient": 1e-3}
# Its systems of K(K + 3)/2 monomials have a condition that multiplies rounding by a hundred.
LOOSE = {"local_quadratic_attention": 1e-4}

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    VERSION < (2, 10), reason="torch before 2.10 has no backend that is written in Python"
)

SLOW = (
    "f_divergence",
    "moneta_exact",
    "memora_per_token",
    "atlas_per_token",
    "atlas_plus_plus",
    "local_quadratic_attention",
)
"""Presets that solve again at every token, or in many steps: seconds each."""


QUICK = (
    "gated_delta_net",
    "rwkv7",
    "mamba",
    "momentum_delta_net",
    "geometric_rls",
    "titans",
    "yaad",
    "softmax_attention",
    "fox",
    "delta_former",
)
"""One preset per execution mode, for `make test`."""


def _groups() -> list[Any]:
    """Return the presets by family, in groups that share a process."""
    families: dict[str, list[str]] = {}
    for name in rc.zoo.names():
        if name not in SLOW:
            families.setdefault(rc.zoo.get(name).family, []).append(name)
    # Families of a few presets join others.
    groups: list[tuple[str, list[str]]] = []
    for family, names in families.items():
        if groups and len(groups[-1][1]) < 14:
            groups[-1] = (f"{groups[-1][0]}+{family}", groups[-1][1] + names)
        else:
            groups.append((family, names))
    slow = [*groups, ("token by token", [*SLOW])]
    return [
        pytest.param([*QUICK], id="quick"),
        *(pytest.param(names, id=family, marks=pytest.mark.slow) for family, names in slow),
    ]


def _grown(measured: dict[str, Any]) -> list[str]:
    """Return a line for every number of a preset that is above its budget."""
    name, lines = measured["name"], []
    budget = BUDGETS["presets"].get(name, {})
    for part, stretch in measured["stretches"].items():
        for kind, maximum in zip(KINDS, budget.get(part, (0, 0, 0)), strict=True):
            sites = stretch[kind]
            now = sites if kind == "launches" else sum(sites.values())
            if kind == "launches" and BUDGETS["torch"] != ".".join(map(str, VERSION)):
                continue  # another version divides its operations differently
            if now > maximum:
                details = "" if kind == "launches" else f": {sites}"
                lines.append(f"{name} {part}: {now} {kind}, budget {maximum}{details}")
    return lines


@pytest.mark.parametrize("names", _groups())
def test_presets_on_a_device(names: list[str]) -> None:
    result = printed("measure", *names)
    assert [one["name"] for one in result] == names
    errors = [
        f"{one['name']}: {what} {one[what]:.1e} from the CPU's"
        for one in result
        for what, near in NEAR.items()
        if not one.get(what, 0.0) <= max(near, LOOSE.get(one["name"], 0.0))
    ]
    mixed = [
        f"{one['name']} {part}: a CPU tensor beside the device's: {stretch['mixed']}"
        for one in result
        for part, stretch in one["stretches"].items()
        if stretch["mixed"]
    ]
    grown = [line for one in result for line in _grown(one)]
    assert not errors + mixed + grown, "\n".join(errors + mixed + grown)


TURNED = (
    ["gated_delta_net", "gla", "rwkv7", "rls", "geometric_rls"],
    ["ttt_linear", "titans", "dla"],
    ["softmax_attention", "fox", "moba", "kernel_regression_attention"],
    ["deep_transformer", "dot", "delta_former"],
)


@pytest.mark.parametrize(
    "names",
    [pytest.param(x, id=x[0], marks=pytest.mark.slow) for x in TURNED],
)
def test_decisions_without_values_are_exact(names: list[str]) -> None:
    """Padding, packing, resets, selected rows, changed weights, decays beyond float32."""
    result = printed("turns", *names)
    assert {name for name, _, _ in result} == set(names)
    assert not [one for one in result if not one[2] <= NEAR["y"]]


def test_every_preset_has_a_budget() -> None:
    assert list(BUDGETS["presets"]) == rc.zoo.names()


@pytest.mark.parametrize(
    ("name", "tokens", "limit"),
    [
        pytest.param("gated_delta_net", 4096, 385, marks=pytest.mark.slow),
        # About 77 launches in each of 32 inner batches, and 495 more. On CUDA a Triton kernel
        # takes their place.
        pytest.param("titans", 512, 2960, marks=pytest.mark.slow),
    ],
)
def test_launches_of_a_long_sequence(name: str, tokens: int, limit: int) -> None:
    """Forward and backward of a long sequence, by PyTorch operations."""
    (result,) = printed("measure", "--tokens", str(tokens), name)
    stretches = result["stretches"]
    assert stretches["forward"]["launches"] + stretches["backward"]["launches"] <= limit
    assert result["y"] <= NEAR["y"]
    assert result["gradient"] <= NEAR["gradient"]


@pytest.mark.parametrize(
    ("name", "maximum"),
    [(name, 25) for name in ("linear_attention", "gla", "mamba2", "delta_net", "gated_delta_net")],
)
def test_launches_of_a_decoded_token(name: str, maximum: int) -> None:
    tokens = 4  # of `tests.gpu.measure`
    launches, syncs, copies = BUDGETS["presets"][name]["decode"]
    assert launches <= tokens * maximum
    assert (syncs, copies) == (0, 0)


COUNTED = """
import os, torch
from tests.gpu import pretend

def sends(): return torch.tensor([1.0], device=pretend.DEVICE)
def moves(): return host.to(pretend.DEVICE)
def asks(): return bool((x > 0).all())
def lists(): return x.tolist()
def picks(): return x[x > 0]
def mixes(): return x + host
def computes(): return (x @ x.mT).view(-1)[:2] + torch.zeros(2, device=pretend.DEVICE)

host = torch.ones(3, 3)
x = pretend.put(host)
for call in (sends, moves, asks, lists, picks, mixes, computes):
    with pretend.counted() as made:
        try:
            call()
        except RuntimeError:  # of the CPU's tensor beside the device's
            pass
    kinds = (made.syncs, made.copies, made.mixed)
    print(call.__name__, made.launches, *(sum(kind.values()) for kind in kinds))
os._exit(0)
"""


def test_device_counts_the_work_of_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-u", "-W", "ignore", "-c", COUNTED],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    result = {name: tuple(map(int, n)) for name, *n in map(str.split, done.stdout.splitlines())}
    assert set(result) == {"sends", "moves", "asks", "lists", "picks", "mixes", "computes"}, (
        done.stderr[-2000:]
    )
    # (syncs, copies, mixed)
    assert result["sends"][1:] == result["moves"][1:] == (0, 1, 0)
    assert result["asks"][1:] == result["lists"][1:] == result["picks"][1:] == (1, 0, 0)
    assert result["mixes"][3] == 1
    assert result["computes"] == (3, 0, 0, 0), "a product, a fill and a sum; views are free"


FEWER = {10: (3e-3, 5e-2), 7: (2e-2, 4e-1)}
"""By bits of operands (10: TF32, 7: bfloat16): outputs, worst gradient."""

ROUNDED = ("gated_delta_net", "titans", "softmax_attention", "rls")
LEAP = "elastic_net_proximal"  # its soft threshold: a number on the other side has another slope
OTHERS = [name for name in rc.zoo.names() if name not in (*SLOW, *ROUNDED, LEAP)]


@pytest.mark.parametrize(
    "bits",
    # `test_precision_of_a_layer` rounds the same products to 10 bits.
    [pytest.param(x, marks=pytest.mark.slow) for x in FEWER],
)
@pytest.mark.parametrize(
    "names",
    [pytest.param(ROUNDED, id="some"), pytest.param(OTHERS, id="rest", marks=pytest.mark.slow)],
)
def test_products_of_tensor_cores(names: tuple[str, ...], bits: int) -> None:
    """Rounded operands and float32 sums: outputs and decoded tokens are off by the rounding."""
    tolerance, slope = FEWER[bits]
    for one in printed("measure", "--bits", str(bits), *names):
        assert 2.0 ** -(bits + 6) < one["y"] <= tolerance, one["name"]
        assert one.get("decoded", 0.0) <= 2 * tolerance, one["name"]
        assert one["gradient"] <= slope, one["name"]


CANCELS = ("mlstm", LEAP)
"""A normaliser leaves almost no gradient by the bias of a log rate; a threshold's has jumps."""

FLOAT64 = ("swdt",)
"""A device that does not read decays has such keys in float64, and multiplies them in float64."""


@pytest.mark.parametrize(
    ("precision", "bits"),
    [
        ("tf32", 10),
        pytest.param("float32", 23, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ROUNDED, id="some"),
        pytest.param([*OTHERS, LEAP], id="rest", marks=pytest.mark.slow),
    ],
)
def test_precision_of_a_layer(names: tuple[str, ...], precision: str, bits: int) -> None:
    """The layer's option: only the products of its memory have fewer bits, in every pass.

    PyTorch's switch is TF32 while the device multiplies, and unchanged at other times.
    """
    tolerance, slope = FEWER.get(bits, (NEAR["y"], NEAR["gradient"]))
    for one in printed("measure", "--precision", precision, *names):
        name, recipe = one["name"], rc.zoo.get(one["name"]).recipe
        engine = rc.select_engine(recipe).engine
        exact = bits == 23 or engine.float32_reason(recipe) is not None
        maximum = max(NEAR["y"], LOOSE.get(name, 0.0)) if exact else tolerance
        assert one["y"] <= maximum, name
        assert one.get("decoded", 0.0) <= 2 * maximum, name
        if name not in CANCELS or exact:
            assert one["gradient"] <= max(slope, LOOSE.get(name, 0.0)), name
        # Fused attention follows no switch, and some memories multiply no matrices.
        fused = engine.name == "kernel" and precision == "tf32"
        if not exact and not fused and name not in ("lru", "rg_lru", *FLOAT64):
            assert one["y"] > 2.0 ** -(bits + 9), name
