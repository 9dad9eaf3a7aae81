"""Generation resumes from a saved prompt as if it had read the text, or states the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from tests.lm.families import every_family, model, padded, text

from recollect.lm import CachedPrompt, CheckpointError, RecollectForCausalLM, cache_of
from recollect.lm.model.checkpoint import read_tensors
from recollect.lm.prompt import _parse_metadata, _sha256, model_fingerprint

HOW = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}


@pytest.mark.parametrize("name", [*every_family(), "hybrid"])
def test_a_saved_prompt_is_resumed(name: str, tmp_path: Path) -> None:
    net, (ids, mask), more = model(name), padded(), text(2, 3, seed=5)
    path = CachedPrompt.prefill(net, ids, mask).save(tmp_path / "deep" / "p.safetensors", net)
    prompt = CachedPrompt.load(path, net)
    assert prompt.cache.past_length == ids.shape[1] - 1
    for _ in range(2):
        assert torch.equal(
            net.generate(**prompt.generate_kwargs(), **HOW),
            net.generate(ids, attention_mask=mask, **HOW),
        )
    both = {"attention_mask": torch.cat([mask, torch.ones_like(more)], 1)}
    assert torch.equal(
        net.generate(**prompt.generate_kwargs(more), num_beams=2, **HOW),
        net.generate(torch.cat([ids, more], 1), num_beams=2, **both, **HOW),
    )
    assert [p.name for p in path.parent.iterdir()] == ["p.safetensors"]  # no partial file


def test_one_prompt_serves_several_questions() -> None:
    net, ids, more = model("gated_delta_net"), text(1), text(3, 2, seed=5)
    generated = net.generate(**CachedPrompt.prefill(net, ids).generate_kwargs(more), **HOW)
    want = net.generate(torch.cat([ids.expand(3, -1), more], 1), **HOW)
    assert torch.equal(generated, want)
    one = CachedPrompt.prefill(net, ids[:, :1])  # nothing to read before the last column
    assert torch.equal(
        net.generate(**one.generate_kwargs(), **HOW), net.generate(ids[:, :1], **HOW)
    )


def test_returned_cache_is_a_prompt(tmp_path: Path) -> None:
    net, ids = model("hybrid"), text()
    out = net.generate(ids, return_dict_in_generate=True, **HOW)
    prompt = CachedPrompt(input_ids=out.sequences, cache=cache_of(out))
    back = CachedPrompt.load(prompt.save(tmp_path / "p", net), net)
    want = net.generate(ids, **{**HOW, "max_new_tokens": 8})
    assert torch.equal(net.generate(**back.generate_kwargs(), **HOW), want)
    beams = net.generate(ids, num_beams=2, return_dict_in_generate=True, **HOW)
    with pytest.raises(ValueError, match="the cache of a beam search"):
        CachedPrompt(input_ids=beams.sequences, cache=cache_of(beams))


def test_bfloat16_is_stored_exactly(tmp_path: Path) -> None:
    net = RecollectForCausalLM(model("hybrid").config).bfloat16().eval()
    prompt = CachedPrompt.prefill(net, text())
    back = CachedPrompt.load(prompt.save(tmp_path / "p", net), net)
    for a, b in zip(prompt.cache, back.cache, strict=True):
        mine, its = a.to_dict(), b.to_dict()
        assert set(mine) == set(its)
        assert all(torch.equal(its[n], x) and its[n].dtype == x.dtype for n, x in mine.items())


def test_fingerprint_depends_on_computation(tmp_path: Path) -> None:
    net = model("gated_delta_net")
    net.save_pretrained(tmp_path)
    back = RecollectForCausalLM.from_pretrained(tmp_path)
    back.model.blocks[0].layer.engine = "reference"
    assert model_fingerprint(back) == model_fingerprint(net)
    with torch.no_grad():
        back.lm_head.weight[0, 0] += 1
    assert model_fingerprint(back)["weights"] != model_fingerprint(net)["weights"]
    assert model_fingerprint(back)["configuration"] == model_fingerprint(net)["configuration"]


def test_a_prompt_of_another_model_or_altered_is_refused(tmp_path: Path) -> None:
    net, path = model("gated_delta_net"), tmp_path / "p.safetensors"
    CachedPrompt.prefill(net, text()).save(path, net)
    full = path.read_bytes()

    def refused(says: str, other: object = net) -> None:
        with pytest.raises(CheckpointError, match=says) as caught:
            CachedPrompt.load(path, other)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)

    other = RecollectForCausalLM(net.config)
    refused("belongs to another model, which differs in its weights:", other)
    refused("belongs to another model, which differs in its configuration:", model("hybrid"))
    path.write_bytes(full[:-9])
    refused("cut short or altered")
    path.write_bytes(full[:-9] + bytes(9 * [7]))
    refused("was altered after it was written")
    path.write_bytes(b"")
    refused("cut short or altered")
    net.save_pretrained(tmp_path)
    path.write_bytes((tmp_path / "model.safetensors").read_bytes())
    refused("is not a saved prompt")
    path.unlink()
    refused("there is no file")

    # Changed together with the checksums: still a prompt, or refused.
    path.write_bytes(full)
    tensors, metadata = read_tensors(path)
    first = "layers.0.memory.weights.0"

    def forged(changes: dict[str, torch.Tensor | None], **fields: object) -> None:
        new = {n: x for n, x in {**tensors, **changes}.items() if x is not None}
        fields = {**_parse_metadata(path, metadata), "sha256": _sha256(new), **fields}
        save_file(new, path, metadata={"recollect": json.dumps(fields)})

    for changes, fields, says in (
        ({"layers.0.memory.evil": tensors[first].clone()}, {}, "not part of a recollect state"),
        ({"input_ids": None}, {}, "holds no prompt of this model"),
        (
            {"input_ids": tensors["input_ids"][:1]},
            {},
            "cache has 2 sequences and input_ids has 1",
        ),
        ({}, {"seen": 99}, "the cache has 99 columns"),
        ({}, {"format": 1}, "has format 1"),
        ({}, {"model": "x"}, "is not a saved prompt"),
        ({"layers.0.memory.sizes": torch.tensor(3)}, {}, "holds no prompt of this model"),
    ):
        forged(changes, **fields)  # type: ignore[arg-type]
        refused(says)
    path.write_bytes(full)
    assert CachedPrompt.load(path, net).cache.batch_size == 2
    assert load_file(path)["input_ids"].shape == (2, 9)


def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    net, path = model("gated_delta_net"), tmp_path / "p"
    prompt = CachedPrompt.prefill(net, text())
    prompt.save(path, net)
    initial = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        CachedPrompt.prefill(net, text(seed=9)).save(path, net)
    assert path.read_bytes() == initial
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_misuse_is_one_sentence() -> None:
    net, ids = model("gated_delta_net"), text()
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="pad it on the left"):
        CachedPrompt.prefill(net, ids, mask)
    prompt = CachedPrompt.prefill(net, ids)
    with pytest.raises(ValueError, match=r"new_ids must have shape \[2, t\], not \[3, 2\]"):
        prompt.generate_kwargs(text(3, 2))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[2, 9\]"):
        CachedPrompt(input_ids=ids, cache=prompt.cache, attention_mask=mask[:, 1:])
    prefix = CachedPrompt(input_ids=ids[:, :-1], cache=prompt.cache)
    with pytest.raises(ValueError, match="give at least one token more"):
        prefix.generate_kwargs()
