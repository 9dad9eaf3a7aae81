"""The papers' sizes, and the parts of parameter counts against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recollect.lm import RecollectConfig, RecollectForCausalLM
from recollect.lm.model.counts import count_parameters
from recollect.lm.model.paper_sizes import PAPER_SIZES, paper_config

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_parts_of_parameter_counts() -> None:
    """Summed by hand for 2 layers of width 80 with 4 heads of 20."""
    config = RecollectConfig.from_recipes("linear_attention", **SMALL, intermediate_size=8)
    result = count_parameters(config)
    _, options = config.recipe("linear_attention")
    assert result["embedding"] == 2 * 50 * 80
    assert result["norms"] == 5 * 80
    assert result["mlp"] == 2 * 3 * 80 * 8
    assert result["maps"] == 2 * (80 * 240 + (2 if options.output_gate == "silu" else 1) * 80 * 80)


@pytest.mark.parametrize(
    ("size", "name"),
    [*((size, "gated_delta_net") for size in PAPER_SIZES), ("170M", "titans"), ("1.3B", "retnet")],
)
def test_the_papers_sizes_on_the_meta_device(size: str, name: str) -> None:
    config = paper_config(size, name)
    with torch.device("meta"):
        model = RecollectForCausalLM(config)
    result = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert sum(count_parameters(config).values()) == result
    named = {"170M": 170e6, "340M": 340e6, "760M": 760e6, "1.3B": 1.3e9}[size]
    # The papers round the sizes of backbones whose MLP and embeddings they do not state.
    assert 0.75 < result / named < 1.35


def test_an_unknown_size_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean '340M'"):
        paper_config("34M", "gla")
