"""Decoding and training steps as recorded graphs, on a device that pretends to be a GPU.

`tests.gpu.pretend.record` acts like a CUDA graph: operations are replayed in the memory of the
first run, without Python code between them. The oracle is the layer on the CPU, token by token, in
float64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu.parity import MISSING
from tests.gpu.printed import printed
from tests.gpu.test_budgets import pytestmark

import recollect as rc

__all__ = ["pytestmark"]

QUICK = ("gated_delta_net", "titans", "sliding_window_attention")
COMPOSED = ("mac", "chain", "lm:titans", "lm:fox")
MORE = ("mag", "boosted", "lm:mac", "lm:delta_former", "beside attention")
REFUSED = {
    **dict.fromkeys(("mesa_net", "gated_kalmanet"), "cannot be recorded"),
    **dict.fromkeys(("deep_transformer", "swdt", "dot"), "needs the position on the host"),
}
REST = [name for name in rc.zoo.names() if name not in QUICK]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK[:2], id="a state, a period of states"),
        pytest.param(QUICK[2:], id="a cache", marks=pytest.mark.slow),
        pytest.param(COMPOSED, id="compositions", marks=pytest.mark.slow),
        pytest.param([*MORE, *REST], id="the rest", marks=pytest.mark.slow),
    ],
)
def test_tokens_of_replayed_graphs(names: tuple[str, ...]) -> None:
    result = printed("graphs", "decode", *names)
    assert [one["name"] for one in result] == list(names)
    for one in result:
        if one["name"] in REFUSED:
            assert REFUSED[one["name"]] in one["refused"], one
            continue
        assert one["decoded"] <= 1e-9, one
        assert one["state"] <= 1e-9, one
        period, graphs = one["places"]
        assert period == graphs
        assert one["launches"] == 1, "a replayed token asks the host to bring the token, no more"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("gated_delta_net", "titans"), id="linear, deep"),
        pytest.param(
            ("mamba2", "rwkv7", "softmax_attention", "mag"), id="others", marks=pytest.mark.slow
        ),
    ],
)
def test_a_recorded_training_step(names: tuple[str, ...]) -> None:
    result = printed("graphs", "train", *names)
    assert [one["name"] for one in result] == list(names)
    assert not [one for one in result if max(one["weights"], one["loss"]) > 1e-9]


CHECKED = """
import os, torch
from tests.gpu import pretend
from tests.gpu.graphs import decoded
import recollect.decoder.static as decoder
decoder.graph_recorder = lambda device: pretend.record
measure, write = decoder.warmup_and_period, decoder.copy_into
decoder.warmup_and_period = lambda module: (measure(module)[0], 8)
print("graphs" if "refused" not in decoded("titans") else "refused")
decoder.warmup_and_period, decoder.copy_into = measure, lambda first, after: None
print(decoded("gated_delta_net")["decoded"])
try:
    with pretend.counted():
        x = pretend.put(torch.ones(3))
        pretend.record(lambda: x.sum().item())
except pretend.Refused:
    print("refused")
os._exit(0)
"""


@pytest.mark.slow
def test_wrong_graphs_are_detected() -> None:
    """Wrong positions are refused, an unchanged state differs, and a read of a value is refused."""
    done = subprocess.run(
        [sys.executable, "-u", "-W", "ignore", "-c", CHECKED],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    places, distance, look = done.stdout.split()
    assert places == look == "refused", done.stderr[-2000:]
    assert float(distance) > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=MISSING)
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in QUICK),
        *((name, True) for name in ("gated_delta_net", "titans", "softmax_attention")),
    ],
)
def test_cuda_graphs(name: str, compiled: bool) -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=64, num_heads=2).cuda().eval()
    x = torch.randn(2, 400, 64, device="cuda")
    with torch.no_grad():
        _, state = layer(x[:, :7])
        slots = 400 if name == "softmax_attention" else None
        decoder = rc.StaticDecoder(layer, state, max_cache_len=slots, compile=compiled)
        for t in range(7, 7 + decoder.warmup_tokens + 3 * decoder.period + 20):
            y, state = layer(x[:, t : t + 1], state)
            torch.testing.assert_close(decoder(x[:, t : t + 1]), y, rtol=1e-4, atol=1e-5)
    assert decoder.num_recorded == decoder.period
