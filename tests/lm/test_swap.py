"""Recipes in other decoders: copied weights, and all functions of the decoder."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recollect as rc

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)
from transformers.cache_utils import DynamicCache

from recollect.lm import CheckpointError, cache_of, replace_attention
from recollect.lm.model import masks
from recollect.lm.model.cache import CACHE_KEY
from recollect.lm.replacement.swap import SwappedAttention

BASE = 10000.0
SMALL = {
    "vocab_size": 30,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
HOW = {"max_new_tokens": 5, "do_sample": False}


def decoder(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    result: PreTrainedModel = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),  # biases of q, k and v
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GROUPED)),  # one map for all three
    }[name]().eval()
    with torch.no_grad():  # biases are random too, so that a lost copy is detected
        for weight in result.parameters():
            if weight.dim() > 1 or not bool(weight.all()):
                nn.init.normal_(weight, std=0.2)
    return result


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = 0
    return ids, (ids != 0).long()


def softmax(name: str) -> tuple[rc.Recipe, rc.LayerOptions]:
    """Return the decoder's attention as a recipe."""
    preset = rc.zoo.get("softmax_attention")
    rope = None if name == "gpt2" else BASE
    return preset.recipe, dataclasses.replace(preset.options, rope_theta=rope)


def logits(net: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return logits of real tokens; positions count from the first of them, as in generation."""
    with torch.no_grad():
        position = (mask.cumsum(1) - 1).clamp_min(0)
        return net(ids, attention_mask=mask, position_ids=position).logits[mask != 0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "phi3"])
def test_softmax_attention_replaced_by_itself_changes_nothing(name: str) -> None:
    net, (ids, mask) = decoder(name), batch()
    want, text = logits(net, ids, mask), net.generate(ids, attention_mask=mask, **HOW)
    beams = net.generate(ids, attention_mask=mask, num_beams=3, **HOW)
    done = replace_attention(net, softmax(name))
    assert [layer.index for layer in done.layers] == [0, 1, 2]
    for layer in done.layers:
        assert layer.copied == ("q", "k", "v", "o")
        assert (layer.new, layer.dropped) == ({}, ())
    assert sum(isinstance(m, SwappedAttention) for m in net.modules()) == 3
    torch.testing.assert_close(logits(net, ids, mask), want, atol=1e-4, rtol=1e-4)
    assert torch.equal(net.generate(ids, attention_mask=mask, **HOW), text)
    assert torch.equal(net.generate(ids, attention_mask=mask, num_beams=3, **HOW), beams)


@pytest.mark.parametrize("layers", [None, [0], [-1]], ids=str)
@pytest.mark.parametrize("recipe", ["gated_delta_net", "titans", "rwkv7", "mamba"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_swapped_decoder_decodes_pads_and_trains(
    name: str, recipe: str, layers: list[int] | None
) -> None:
    net, (ids, mask) = decoder(name), batch()
    done = replace_attention(net, recipe, layers)
    assert [layer.index for layer in done.layers] == {None: [0, 1, 2]}.get(
        layers and layers[0], [0] if layers == [0] else [2]
    )
    # Padding: each row separately.
    result = logits(net, ids, mask)
    single = [logits(net, row[None], torch.ones_like(row)[None]) for row in (ids[0, 3:], ids[1])]
    torch.testing.assert_close(result, torch.cat(single), atol=1e-4, rtol=1e-4)
    # Decoding: the cache, mixed with keys and values of remaining layers.
    with torch.no_grad():
        out = net(ids[1:, :4], use_cache=True)
        steps = [out.logits]
        for t in range(4, 9):
            out = net(ids[1:, t : t + 1], **{CACHE_KEY: cache_of(out)})
            steps.append(out.logits)
        assert cache_of(out).get_seq_length() == 9
    torch.testing.assert_close(torch.cat(steps, 1)[0], single[1], atol=1e-4, rtol=1e-4)
    for beams in (1, 3):
        how = {**HOW, "attention_mask": mask, "num_beams": beams}
        assert torch.equal(net.generate(ids, **how), net.generate(ids, use_cache=False, **how))
    # Training.
    net.train()
    loss = net(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in net.parameters())


def test_report_of_copied_and_new_weights() -> None:
    net = decoder("llama")
    initial = {n: x.clone() for n, x in net.model.layers[0].self_attn.named_parameters()}
    done = replace_attention(net, "gated_delta_net", layers=[0])
    layer = net.model.layers[0].self_attn.layer
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim) == (4, 2, 8, 8)
    q, k, v = layer.qkv.weight.split([32, 16, 16])
    for part, result in (("q", q), ("k", k), ("v", v), ("o", layer.out.weight)):
        assert torch.equal(initial[f"{part}_proj.weight"], result)
    report = done.layers[0]
    named = dict(layer.named_parameters())
    assert report.new == {
        n: x.numel() for n, x in named.items() if n not in ("qkv.weight", "out.weight")
    }
    assert str(done).startswith(
        "layer 0 (model.layers.0.self_attn): kept q, k, v, o; new conv.weight"
    )
    fewer = replace_attention(decoder("llama"), "mamba").layers[0]  # keys of 16 channels
    assert fewer.copied == ("v", "o")
    assert fewer.new["qkv.weight (q)"] == 4 * 16 * 32
    assert fewer.dropped == ("q projection", "k projection")
    more = replace_attention(decoder("gpt2"), "delta_product").layers[0]  # several pairs per token
    assert more.copied == ("q", "o")


def test_packed_documents_are_separate() -> None:
    net, (ids, _) = decoder("llama"), batch()
    replace_attention(net, "gated_delta_net")
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        both = net(ids[1:], position_ids=position, use_cache=False).logits[0]
        one, two = net(ids[1:, :4]).logits[0], net(ids[1:, 4:]).logits[0]
    torch.testing.assert_close(both, torch.cat([one, two]), atol=1e-4, rtol=1e-4)
    document = position.eq(0).cumsum(1)
    mask = (document[:, :, None] == document[:, None]).tril()[:, None]
    with torch.no_grad():
        separate = net(ids[1:], attention_mask=mask, use_cache=False).logits[0]
    torch.testing.assert_close(separate, both, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="pass use_cache=False"):
        net(ids[1:], attention_mask=mask, use_cache=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_is_parsed_once_per_forward_pass(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that changes in place between two forward passes is parsed again."""
    net, (ids, mask) = decoder("llama"), batch()
    replace_attention(net, "gated_delta_net")
    parse, calls = masks._parse, []
    monkeypatch.setattr(masks, "_parse", lambda *args: calls.append(args) or parse(*args))
    with mode():
        expected = net(ids, attention_mask=mask, use_cache=False).logits[mask != 0]
        assert len(calls) == 1
        causal = (mask[:, None, None].bool() & mask[:, None, :, None].bool()).tril()
        other = causal.new_ones(causal.shape).tril()
        net(ids, attention_mask=other, use_cache=False)
        other.copy_(causal)
        logits = net(ids, attention_mask=other, use_cache=False).logits[mask != 0]
    assert len(calls) == 3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_eager_masks_bfloat16_and_a_saved_swap(tmp_path: object) -> None:
    net, (ids, mask) = decoder("llama"), batch()
    replace_attention(net, "gated_delta_net", layers=[1])
    want = logits(net, ids, mask)
    net.set_attn_implementation("eager")  # masks of numbers
    torch.testing.assert_close(logits(net, ids, mask), want, atol=1e-4, rtol=1e-4)
    repeated = decoder("llama")
    replace_attention(repeated, "gated_delta_net", layers=[1])
    repeated.load_state_dict(net.state_dict())
    torch.testing.assert_close(logits(repeated, ids, mask), want, atol=1e-4, rtol=1e-4)
    half = decoder("llama").bfloat16()
    replace_attention(half, "gated_delta_net")
    assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
    assert half(ids, attention_mask=mask).logits[mask != 0].isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "phi3"])
def test_a_swapped_decoder_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    net, (ids, mask) = decoder(name), batch()
    twin = type(net)(net.config)
    replace_attention(net, "gated_delta_net", layers=[1])
    assert type(twin.config) is not type(net.config)  # a shared configuration is unchanged
    replace_attention(net, softmax(name), layers=[0], engine="reference")
    want = logits(net, ids, mask)
    net.save_pretrained(tmp_path / "one")
    assert {p.suffix for p in (tmp_path / "one").iterdir()} == {".json", ".safetensors"}  # no code
    back, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "one", trust_remote_code=False, output_loading_info=True
    )
    assert isinstance(back, type(net)) and not any(info.values())
    assert torch.equal(logits(back.eval(), ids, mask), want)
    for module, other in zip(net.modules(), back.modules(), strict=True):
        if isinstance(module, SwappedAttention):
            assert other.layer.recipe == module.layer.recipe
            assert other.layer.options == module.layer.options
    back.save_pretrained(tmp_path / "two")  # a second time
    two = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float64).eval()
    assert two.dtype == torch.float64
    torch.testing.assert_close(logits(two, ids, mask).float(), want, atol=1e-4, rtol=1e-4)
    inner = AutoModel.from_pretrained(tmp_path / "one").eval()
    with torch.no_grad():
        shape = inner(ids, attention_mask=mask).last_hidden_state.shape
    assert shape == (*ids.shape, back.config.get_text_config().hidden_size)
    assert pickle.loads(pickle.dumps(net.config)) == net.config == copy.deepcopy(net.config)


def test_new_head_over_a_swapped_decoder_is_saved(tmp_path: Path) -> None:
    net, (ids, mask) = decoder("llama"), batch()
    replace_attention(net, "gated_delta_net", layers=[1])
    net.config.pad_token_id = 0
    net.save_pretrained(tmp_path / "lm")
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3).eval()
    head.save_pretrained(tmp_path / "head")
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head").eval()
    with torch.no_grad():
        outputs = [net(ids, attention_mask=mask).logits for net in (head, back)]
    assert outputs[0].shape == (len(ids), 3) and torch.equal(*outputs)
    theirs, ours = net.state_dict(), head.state_dict()
    for name, weight in ours.items():
        assert name.startswith("score.") or torch.equal(weight, theirs[name])
    weights = load_file(tmp_path / "head" / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "head" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks the weight 'score\.weight'"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "head")


PLAIN = """
import sys
from transformers import AutoModelForCausalLM, LlamaForCausalLM

for kind in (AutoModelForCausalLM, LlamaForCausalLM):
    try:
        kind.from_pretrained(sys.argv[1])
        print("loaded")
    except Exception as error:
        print(" ".join(str(error).split()))
assert not any(name.startswith("recollect") for name in sys.modules)
"""


@pytest.mark.slow
def test_without_recollect_a_swapped_decoder_is_not_loaded_in_part(tmp_path: Path) -> None:
    net = decoder("llama")
    replace_attention(net, "gated_delta_net", layers=[1])
    net.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)], capture_output=True, text=True, check=True
    )
    automatic, named = done.stdout.splitlines()
    assert "has model type `recollect_swapped` but Transformers does not recognize" in automatic
    assert "replaced by recollect's: import recollect.lm and load it with" in named


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(schema=9), "has schema 9 and this version of recollect reads schema 2"),
        (lambda c: c.pop("swaps"), "lacks its decoder or what replaced its layers"),
        (lambda c: c.update(swaps=[{"layers": [1]}]), "lacks its decoder or what replaced"),
        (lambda c: c.update(decoder_type="recollect_swapped"), "names the decoder 'recollect_sw"),
        (lambda c: c.update(decoder_type="nope"), "names the decoder 'nope'"),
        (lambda c: c["swaps"][0].update(layers=[7]), "layers names 7"),
        (lambda c: c["swaps"][0].update(layers=[0]), "lacks the weight"),
        (
            lambda c: c["swaps"][0]["recipe"]["bias"].update(member="os.system"),
            "no member named 'os.system' is registered",
        ),
    ],
)
def test_changed_saved_swap_gives_one_sentence(
    change: Callable[[dict], object], says: str, tmp_path: Path
) -> None:
    net = decoder("llama")
    replace_attention(net, "gated_delta_net", layers=[1])
    net.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_unsupported_decoders_give_one_sentence() -> None:
    net, ids = decoder("llama"), batch()[0]
    initial = net.state_dict().keys()
    for says, kind, ask in (
        ("reads learned pairs and no tokens", rc.RecipeError, {"recipe": "ffn_relu"}),
        ("layers names 3, and", ValueError, {"recipe": "gla", "layers": [0, 3]}),
        ("layers is empty", ValueError, {"recipe": "gla", "layers": []}),
        ("unknown|no architecture|nope", rc.RecipeError, {"recipe": "nope"}),
        ("zoo name, a preset", rc.RecipeError, {"recipe": 3}),
        ("cannot run", rc.RecipeError, {"recipe": "gla", "engine": "kernel"}),
    ):
        with pytest.raises(kind, match=says):
            replace_attention(net, **ask)
    assert net.state_dict().keys() == initial  # a refusal changes nothing
    with pytest.raises(TypeError, match="expected a model of transformers, not str: load it by"):
        rc.lm.replace_attention("a/llama", "gla")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LlamaMLP has no attention that could be replaced"):
        replace_attention(net.model.layers[0].mlp, "gla")

    used = cache_of(net(ids, use_cache=True))
    replace_attention(net, "gla", layers=[1])
    with pytest.raises(ValueError, match="filled by the attention that was replaced"):
        net(ids[:, :1], **{CACHE_KEY: used})
    static = StaticCache(config=net.config, max_cache_len=20)
    with pytest.raises(ValueError, match="leave cache_implementation out"):
        net(ids, **{CACHE_KEY: static})
    full = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match="give a causal mask"):
        net(ids, attention_mask=full)
    assert isinstance(cache_of(net(ids, use_cache=True)), DynamicCache)
