"""Launches of a compiled token on a GPU, counted in the generated code.

The targets are ours: 25 per layer and token of linear memories, 60 of deep ones.
"""

from __future__ import annotations

import pytest
from tests.gpu.printed import printed

pytest.importorskip("triton")

LINEAR = ("gated_delta_net", "mamba2", "gla", "retnet", "rwkv6", "rwkv7", "mlstm", "longhorn")
CHAINS = ("titans", "titans_minus", "ttt_linear", "ttt_mlp", "dla")
GENERAL = ("yaad", "moneta", "memora", "omega_net", "atlas", "atlas_plus_plus")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "maximum"),
    [
        pytest.param(LINEAR, 25, id="linear"),
        pytest.param(CHAINS, 60, id="chains"),
        pytest.param(GENERAL, 60, id="general"),
    ],
)
def test_launches_of_a_compiled_token(names: tuple[str, ...], maximum: int) -> None:
    result = printed("generated", *names)
    assert [one["name"] for one in result] == list(names)
    assert not [one for one in result if not 0 < one["mean"] <= maximum]
