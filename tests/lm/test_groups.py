"""Weight decay applies to maps and embeddings only, and every trained number is in one group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recollect as rc

pytest.importorskip("transformers")

from recollect.lm.training.weight_decay import decay_parameter_names

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
# The presets contain gates of low and full rank, static params, ties, shifts, phases, skips,
# convolutions, initial memories (matrices and MLPs) and learned pairs.
NAMES = ["gated_delta_net", "rwkv7", "mamba2", "titans", "lru", "mlstm", "dot", "ffn_swiglu"]
# The last part of a parameter's path in maps that decay.
MAPS = ("qkv.weight", "out.weight", "output_gate.weight", "gate_up.weight", "down.weight")


def build(name: str, **sizes: object) -> nn.Module:
    return rc.lm.RecollectForCausalLM(
        rc.lm.RecollectConfig.from_recipes(name, **{**SIZES, **sizes})  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", NAMES)
def test_only_maps_embeddings_and_feed_forward_pairs_decay(name: str) -> None:
    model = build(name)
    decayed = set(decay_parameter_names(model))
    for path, _ in model.named_parameters():
        in_gates = ".gates." in path or ".params." in path
        is_map = path.endswith(MAPS) and not in_gates
        is_embedding = path in ("model.embed_tokens.weight", "lm_head.weight")
        # Feed-forward memories store their weights as pairs.
        is_pair = name.startswith("ffn") and path.split(".")[-1] in ("keys", "values")
        is_pair = is_pair or (name.startswith("ffn") and in_gates)
        assert (path in decayed) == (is_map or is_embedding or is_pair), path


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_number_is_in_one_group(name: str) -> None:
    model = build(name, tie_word_embeddings=True)
    groups = rc.lm.parameter_groups(model, weight_decay=0.3)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    ids = [id(p) for group in groups for p in group["params"]]  # type: ignore[attr-defined]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sorted(ids) == sorted(id(p) for p in trained)


def test_decay_changes_only_its_group() -> None:
    """With zero gradients AdamW changes weights by decay alone."""
    model = build("titans")
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.AdamW(rc.lm.parameter_groups(model, weight_decay=0.5), lr=0.1).step()
    decayed = set(decay_parameter_names(model))
    for name, p in model.named_parameters():
        expected = initial[name] * (1 - 0.1 * 0.5) if name in decayed else initial[name]
        torch.testing.assert_close(p.detach(), expected)


def test_other_models() -> None:
    """Other models' parameters decay from two axes on; a group without members is left out."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    assert decay_parameter_names(model) == ["0.weight"]
    assert len(rc.lm.parameter_groups(nn.LayerNorm(4))) == 1
    model[0].weight.requires_grad_(False)
    assert decay_parameter_names(model) == []
