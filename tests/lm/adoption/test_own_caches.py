"""Models whose state is not in a layer of the cache: RecurrentGemma, MiniMax and xLSTM."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.lm.adoption.models import OWN_CACHES, make_model
from torch import Tensor, nn

import recollect as rc
import recollect.lm
from recollect.lm.model.cache import CACHE_KEY, cache_of

FAMILIES = {"recurrent_gemma": "rg-lru", "minimax": "lightning attention", "xlstm": "mlstm"}
IDS = torch.randint(8, 64, (2, 40), generator=torch.Generator().manual_seed(0))


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a model and its adopted copy."""
    original = make_model(name, **options)
    adopted = copy.deepcopy(original)
    rc.lm.adopt(adopted)
    return original, adopted


def error(y: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected value."""
    return float((y - expected).abs().max() / expected.abs().max())


def call(model: Any, ids: Tensor, cache: Any = None, **options: Any) -> Any:
    """Return the output of a model that reads and writes a cache."""
    name = (
        CACHE_KEY if model.config.model_type != "xlstm" or CACHE_KEY == "cache" else "cache_params"
    )
    return model(ids, use_cache=True, **{name: cache}, **options)


@pytest.mark.parametrize("name", OWN_CACHES)
@torch.no_grad()
def test_an_adopted_model_equals_the_original(name: str) -> None:
    family = next(family for family in rc.lm.families() if family.name == FAMILIES[name])
    report = rc.testing.check_family(
        family, lambda: make_model(name), exchanges_caches=name != "recurrent_gemma"
    )
    assert not report.adoption.unchanged


@pytest.mark.parametrize("name", OWN_CACHES)
@torch.no_grad()
def test_another_prompt_between_two_calls_changes_nothing(name: str) -> None:
    _, adopted = pair(name)
    cache, outputs = cache_of(call(adopted, IDS[:, :11])), []
    for piece in IDS[:, 11:].split([12, 1, 16], 1):
        call(adopted, IDS[:, :7].flip(0, 1))
        outputs.append(call(adopted, piece, cache).logits)
    assert error(torch.cat(outputs, 1), adopted(IDS, use_cache=False).logits[:, 11:]) < 1e-5


@pytest.mark.parametrize("name", OWN_CACHES)
@torch.no_grad()
def test_a_sequence_may_begin_in_a_later_call(name: str) -> None:
    _, adopted = pair(name)
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0  # no token of this sequence is in the first call
    cache, positions = None, (mask.cumsum(1) - 1).clamp_min(0)
    for start, stop in ((0, 6), (6, 20), (20, 40)):
        options: dict[str, Any] = {"attention_mask": mask[:, :stop]}
        if name != "xlstm":
            options["position_ids"] = positions[:, start:stop]
        output = call(adopted, IDS[:, start:stop], cache, **options)
        cache = cache_of(output)
    expected = adopted(IDS[1:, 9:], use_cache=False).logits[0, 11:]
    assert error(output.logits[1], expected) < 1e-5


@pytest.mark.parametrize("name", OWN_CACHES)
@torch.no_grad()
def test_a_cache_can_be_reordered_reset_and_copied(name: str) -> None:
    _, adopted = pair(name)
    expected = adopted(IDS, use_cache=False).logits
    cache = cache_of(call(adopted, IDS[:, :20]))
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert error(call(adopted, IDS[:, 20:].flip(0), cache).logits, expected[:, 20:].flip(0)) < 1e-5
    assert error(call(adopted, IDS[:, 20:], copied).logits, expected[:, 20:]) < 1e-5
    cache.reset()
    assert error(call(adopted, IDS, cache).logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["minimax", "xlstm"])
@torch.no_grad()
def test_tokens_of_another_model_are_not_cropped(name: str) -> None:
    original, adopted = pair(name)
    cache = cache_of(call(adopted, IDS[:, :10]))
    cache.activate_past_recording()
    call(adopted, IDS[:, 10:20], cache)
    call(original, IDS[:, 20:24], cache)
    with pytest.raises(ValueError, match="cannot remove 2 tokens"):
        cache.crop(-2)


@pytest.mark.parametrize("name", ["minimax", "xlstm"])
@torch.no_grad()
def test_undo_restores_generation(name: str) -> None:
    original = make_model(name)
    attributes = set(vars(original))
    adopted = copy.deepcopy(original)
    rc.lm.adopt(adopted).undo()
    assert set(vars(adopted)) == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in adopted.modules())


# -- RecurrentGemma -------------------------------------------------------------------------------


@torch.no_grad()
def test_modules_of_recurrent_gemma_store_no_state() -> None:
    _, adopted = pair("recurrent_gemma")
    adopted.generate(IDS, max_new_tokens=3, do_sample=False)
    block = adopted.model.layers[0].temporal_block
    assert block.conv1d_state is None
    assert block.rg_lru.recurrent_states is None


@torch.no_grad()
def test_a_cache_of_the_original_recurrent_gemma_is_refused() -> None:
    from transformers import DynamicCache

    original, adopted = pair("recurrent_gemma")
    cache = DynamicCache(config=original.config)
    call(original, IDS[:, :10], cache)
    with pytest.raises(ValueError, match="tokens of the original model"):
        call(adopted, IDS[:, 10:], cache)


def test_the_derivative_of_the_input_scale_is_bounded() -> None:
    models = pair("recurrent_gemma")
    gradients = []
    for model in models:
        rg_lru = model.model.layers[0].temporal_block.rg_lru
        nn.init.constant_(rg_lru.recurrent_param, -40.0)  # 1 − α² = 0, at which √ has no derivative
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append(rg_lru.recurrent_gate_weight.grad)
    original, adopted = gradients
    assert original.isfinite().all()
    assert original.abs().max() > 0
    assert error(adopted, original) < 1e-4


# -- MiniMax --------------------------------------------------------------------------------------


@torch.no_grad()
def test_minimax_may_begin_with_a_linear_layer() -> None:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    _, adopted = pair("minimax", layer_types=layers)
    cache = cache_of(call(adopted, IDS[:, :20]))
    y = torch.cat([call(adopted, x, cache).logits for x in IDS[:, 20:].split([13, 1, 6], 1)], 1)
    assert cache.get_seq_length() == 40
    assert error(y, adopted(IDS, use_cache=False).logits[:, 20:]) < 1e-5


@torch.no_grad()
def test_caches_of_minimax_are_exchanged_in_half_precision() -> None:
    original, adopted = (model.bfloat16() for model in pair("minimax"))
    expected = original(IDS, use_cache=False).logits
    for first, second in ((original, adopted), (adopted, original)):
        cache = cache_of(call(first, IDS[:, :20]))
        assert error(call(second, IDS[:, 20:], cache).logits, expected[:, 20:]) < 0.03


# -- xLSTM ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_tensors_in_the_cache_of_xlstm_are_those_of_the_original() -> None:
    caches = [cache_of(call(model, IDS)) for model in pair("xlstm")]
    for index in range(2):
        for theirs, ours in zip(*(cache.rnn_state[index] for cache in caches), strict=True):
            assert ours.shape == theirs.shape
            assert error(ours, theirs) < 1e-5


@torch.no_grad()
def test_xlstm_with_joined_projections() -> None:
    _, single = pair("xlstm")
    model: Any = copy.deepcopy(single)
    for block in model.backbone.blocks:
        layer = block.mlstm_layer
        join(layer, "qkv_opreact", ("q", "k", "v", "ogate_preact"))
        join(layer, "ifgate_preact", ("igate_preact", "fgate_preact"))
    assert error(model(IDS, use_cache=False).logits, single(IDS, use_cache=False).logits) < 1e-5


def join(layer: Any, name: str, parts: tuple[str, ...]) -> None:
    """Replace linear maps of a layer by one map."""
    maps = [getattr(layer, part) for part in parts]
    joined = nn.Linear(maps[0].in_features, sum(m.out_features for m in maps))
    joined.weight.copy_(torch.cat([m.weight for m in maps]))
    biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in maps]
    joined.bias.copy_(torch.cat(biases))
    setattr(layer, name, joined)
    for part in parts:
        delattr(layer, part)


@torch.no_grad()
def test_xlstm_in_pieces_of_the_model() -> None:
    _, adopted = pair("xlstm")
    expected, mask = adopted(IDS, use_cache=False).logits, torch.ones_like(IDS)
    adopted.config.max_inference_chunksize = 16
    assert error(call(adopted, IDS).logits, expected) < 1e-5
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="40 tokens, of which the model passes 16 "):
        call(adopted, IDS, attention_mask=mask)


def test_an_xlstm_with_a_large_eps_is_unchanged() -> None:
    report = rc.lm.adopt(make_model("xlstm", eps=1e-3))
    assert not report.adopted
    assert "config.eps" in str(report)
