"""The page about theory: its numbers equal the results of the functions."""

from __future__ import annotations

import math
from pathlib import Path

import recollect as rc
from recollect.theory import (
    averaged_inverse_snr,
    capacity_bound,
    inverse_snr,
    min_key_dim,
    truncation_order,
)

PAGE = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")


def test_numbers_on_the_page() -> None:
    for kernel in ("linear", "relu", "exp"):
        size = math.ceil(min_key_dim(kernel, num_distractors=4096, level=0.01))
        assert f"| {size:,} |" in PAGE, kernel
    titans = capacity_bound(rc.zoo.get("titans").recipe, K=64, V=64)
    assert titans.pairs == 512 and "most 512\npairs" in PAGE and "32,768 weights" in PAGE
    assert (truncation_order(2, 2.0**-8), truncation_order(3, 2.0**-8)) == (7, 8)
    assert "take order 7 and three order 8" in PAGE
    one = inverse_snr("exp", num_distractors=9, size=64)
    many = averaged_inverse_snr("exp", num_distractors=9, size=64, heads=10**7, sliced=False)
    assert abs(many / one - 1 / math.e) < 1e-6


def test_every_function_is_on_the_page() -> None:
    names = {*rc.theory.__all__} - {
        "Capacity", "Conditioning", "KernelName", "Loss", "Margin", "findings", "linearized",
        "memory_losses", "recipe_kernel", "atlas_upper_bound", "GeneralForm",
    }  # fmt: skip
    assert not {name for name in names if name not in PAGE}
