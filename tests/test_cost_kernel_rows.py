"""Costs and explanations of memories over a kernel's features."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.contracts import generate
from torch.utils.flop_counter import FlopCounterMode

import recollect as rc

NAMES = ("delta_former", "deep_transformer", "swdt", "dot")


@pytest.mark.parametrize("name", NAMES)
def test_state_bytes_equal_those_of_a_state(name: str) -> None:
    """Rows without initial pairs, and the open inner batch."""
    recipe = rc.zoo.get(name).recipe
    x = generate.inputs(recipe, B=2, T=128, H=3, K=8, V=8, dtype=torch.float32)
    if recipe.needs_init():
        assert x.init is not None
        widths = len(recipe.row_widths(8))
        empty = tuple(a[:, :0] for a in x.init[: 1 + widths])
        x = dataclasses.replace(x, init=(*empty, *x.init[1 + widths :]))
    else:
        x = dataclasses.replace(x, init=None)
    with torch.no_grad():
        _, state = generate.run_recall(recipe, x)
    price = rc.cost(recipe, B=2, T=128, H=3, K=8, V=8)
    assert state.nbytes == price.state_bytes
    assert price.state_bytes_per_token == price.state["rows"] // 128


@pytest.mark.parametrize("name", NAMES)
def test_attention_flops_equal_the_count_of_torch(name: str) -> None:
    """The four products over pairs; blocks compare up to their end, half a block more."""
    recipe, T = rc.zoo.get(name).recipe, 512
    if recipe.memory.linear:  # torch does not count its attention, which the softmax would use
        recipe = recipe.replace(memory=rc.memory.Matrix())
    x = generate.inputs(recipe, B=1, T=T, H=1, K=32, V=32, dtype=torch.float32, zero=True)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        generate.run_recall(recipe, x)
    counted = counter.get_total_flops()
    assert counted == pytest.approx(rc.cost(recipe, T=T, H=1, K=32, V=32).total, rel=0.25)


def test_cost_grows_with_the_length() -> None:
    recipe = rc.zoo.get("delta_former").recipe
    short, long = (rc.cost(recipe, T=T, H=1, K=64, V=64) for T in (1024, 2048))
    assert long.total / short.total == pytest.approx(4, rel=0.01)
    assert long.decode / short.decode == pytest.approx(2, rel=0.01)


def test_delta_former_is_explained() -> None:
    text = str(rc.explain("delta_former"))
    assert "y_t = W_t φ*(q_t)" in text
    assert "Σ_i κ(k_i, x) u_i / Σ_i κ(k_i, x)" in text
    assert "erased is Σ_i κ₁(k_i, w_t) u_i" in text
    assert "517 B per token, row and head" in text  # 64 + 64 + 1 numbers, and a mask
    assert "kernel (block substitution over the keys" in text


def test_several_probe_keys_are_explained() -> None:
    recipe = rc.Recipe(
        features=rc.features.Exponential(),
        bias=rc.bias.L2(probe=rc.bias.Probe(at="token", heads=4, normalize="rms")),
    )
    text = str(rc.explain(recipe))
    assert "Σ_j a_j Σ_i κ₁(k_i, w_tj) u_i, divided by its root mean square" in text
    assert "not kernel: the RMS norm of an erased value is not linear in the rows" in text
    assert "gate probe [B, T, H, J, K]" in text
    assert "param mix [H, J]" in text


def test_deep_transformer_names_its_initial_pairs() -> None:
    text = str(rc.explain("deep_transformer"))
    assert "init m keys [m×64], m rows [m×128], W1 [64×128]" in text
    assert "a key [64] and rows [128] per token" in text
