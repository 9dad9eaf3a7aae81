"""A compiled token's launches on a GPU, counted in the code that is generated for one.

An aim of ours, not a law: 25 a layer and token of linear memories, 60 of deep ones.
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
    ("names", "most"),
    [
        pytest.param(LINEAR, 25, id="linear"),
        pytest.param(CHAINS, 60, id="chains"),
        pytest.param(GENERAL, 60, id="general"),
    ],
)
def test_launches_of_a_compiled_token(names: tuple[str, ...], most: int) -> None:
    result = printed("generated", *names)
    assert [one["name"] for one in result] == list(names)
    assert not [one for one in result if not 0 < one["mean"] <= most]
