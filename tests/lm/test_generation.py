"""Generation with one cache for every recipe: decoded logits equal those of a forward pass."""

from __future__ import annotations

import copy

import pytest
import torch

import recollect as rc

pytest.importorskip("transformers")

from tests.lm.families import every_family, model, padded, text
from transformers.cache_utils import Cache, DynamicCache

from recollect.lm import RecollectCache, cache_of

ALL = [*every_family(), "hybrid"]
# float32: logits are sums of a few hundred products of order 1, here of order 4.
TOL = {"atol": 4e-4, "rtol": 1e-4}
# Solves for 153 coefficients around every query: float32 has three digits of them, so the test
# compares float64.
EXACT = ("local_quadratic_attention",)
HOW = {"max_new_tokens": 4, "pad_token_id": 0}


@pytest.mark.parametrize("name", ALL)
def test_left_padding_equals_single_rows(name: str) -> None:
    net, (ids, mask) = model(name), padded()
    net = copy.deepcopy(net).double() if name in EXACT else net
    with torch.no_grad():
        out = net(ids, attention_mask=mask, use_cache=True)
        rows = [net(ids[:1, 3:]), net(ids[1:])]
        for t in range(3):
            torch.testing.assert_close(out.logits[0, -1], rows[0].logits[0, -1], **TOL)
            torch.testing.assert_close(out.logits[1, -1], rows[1].logits[0, -1], **TOL)
            more = text(2, 1, seed=t)
            mask = torch.cat([mask, mask[:, -1:]], 1)
            out = net(more, attention_mask=mask, cache=cache_of(out))
            rows = [net(more[i : i + 1], cache=cache_of(row)) for i, row in enumerate(rows)]
    assert cache_of(out).get_seq_length() == ids.shape[1] + 3


@pytest.mark.parametrize("name", ALL)
def test_beams_with_and_without_the_cache(name: str) -> None:
    net, (ids, mask) = model(name), padded()
    how = {**HOW, "attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    result = net.generate(ids, do_sample=False, **how)
    repeated = net.generate(ids, do_sample=False, use_cache=False, **how)
    assert torch.equal(result, repeated)
    assert len({tuple(row) for row in result.tolist()}) == 4  # the rows and the beams differ


# One of each kind of cache: a state, a period of states, statistics, all tokens, and several.
SAMPLED = ("gated_delta_net", "titans", "rls", "softmax_attention", "hybrid")


@pytest.mark.parametrize(
    "name",
    [
        *SAMPLED,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in rc.zoo.names()
            if name not in SAMPLED
        ),
    ],
)
def test_sampling_is_reproducible_from_a_generator(name: str) -> None:
    net, (ids, mask) = model(name), padded()
    how = {**HOW, "attention_mask": mask, "do_sample": True, "top_k": 0}

    def draw(seed: int, **more: object) -> torch.Tensor:
        return net.generate(ids, generator=torch.Generator().manual_seed(seed), **how, **more)

    initial = torch.get_rng_state()
    first = draw(3)
    assert torch.equal(torch.get_rng_state(), initial)  # the global generator is unchanged
    torch.rand(5)
    assert torch.equal(draw(3), first)
    assert torch.equal(draw(3, use_cache=False), first)
    assert any(not torch.equal(draw(seed), first) for seed in (4, 5, 6))


def test_generators_of_other_devices_keep_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` seeds all devices of the machine, and the model is on the CPU."""
    net, ids = model("gated_delta_net"), text()

    def fail(seed: int) -> None:
        raise AssertionError("the generators of another device were seeded")

    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "manual_seed_all", fail)
    monkeypatch.setattr(torch.mps, "manual_seed", fail)
    generator = torch.Generator().manual_seed(0)
    net.generate(ids, generator=generator, **{**HOW, "do_sample": True})


def test_a_generator_moves_on_and_must_be_one() -> None:
    net, ids, generator = model("gated_delta_net"), text(), torch.Generator().manual_seed(0)
    how = {**HOW, "do_sample": True, "max_new_tokens": 8}
    assert not torch.equal(
        net.generate(ids, generator=generator, **how), net.generate(ids, generator=generator, **how)
    )
    with pytest.raises(ValueError, match=r"must be a torch\.Generator, not 3"):
        net.generate(ids, generator=3, **how)


@pytest.mark.parametrize("name", ALL[:-1])
def test_cache_grows_only_if_a_recipe_stores_all_tokens(name: str) -> None:
    net, preset = model(name), rc.zoo.get(name)
    priced = (
        rc.cost(preset.recipe, K=16, V=16).state_bytes_per_token > 0
        and not preset.options.persistent
    )
    assert net.has_growing_cache == priced
    lengths = (5, 70) if priced else (3, 5, 21)  # 70 is beyond an inner batch of 64
    with torch.no_grad():
        sizes = {T: cache_of(net(text(1, T))).nbytes_per_sequence for T in lengths}
    assert (len(set(sizes.values())) > 1) == priced, sizes


@pytest.mark.parametrize("name", ["gated_delta_net", "softmax_attention", "hybrid"])
def test_a_returned_cache_is_continued(name: str) -> None:
    net, (ids, mask) = model(name), padded()
    how = {"pad_token_id": 0, "do_sample": False}
    full = net.generate(ids, attention_mask=mask, max_new_tokens=8, **how)
    out = net.generate(
        ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True, **how
    )
    cache = cache_of(out)
    assert isinstance(cache, RecollectCache)
    assert isinstance(cache, Cache)
    assert cache.past_length == out.sequences.shape[1] - 1  # the last token is not read yet
    longer = torch.cat([mask, torch.ones(2, 3).long()], 1)
    rest = {"attention_mask": longer, "cache": cache, "max_new_tokens": 5, **how}
    for _ in range(2):  # twice from one cache
        assert torch.equal(net.generate(out.sequences, **rest), full)
    only_new = net.generate(out.sequences[:, -1:], **rest)
    assert torch.equal(only_new[:, 1:], full[:, -5:])
    beams = net.generate(out.sequences, num_beams=3, **rest)
    single = net.generate(
        out.sequences, attention_mask=longer, num_beams=3, max_new_tokens=5, **how
    )
    assert torch.equal(beams, single)


@pytest.mark.parametrize("name", ["gated_delta_net", "softmax_attention"])
def test_a_long_prompt_is_read_in_pieces(name: str) -> None:
    net, (ids, mask) = model(name), padded()
    how = {**HOW, "attention_mask": mask, "do_sample": False}
    pieces = net.generate(ids, cache=RecollectCache(), prefill_chunk_size=4, **how)
    assert torch.equal(pieces, net.generate(ids, **how))


@pytest.mark.parametrize("name", ["gated_delta_net", "softmax_attention"])
def test_embeddings_may_replace_the_prompt(name: str) -> None:
    net, (ids, mask) = model(name), padded()
    how = {**HOW, "attention_mask": mask, "do_sample": False}
    result = net.generate(inputs_embeds=net.get_input_embeddings()(ids), **how)
    assert torch.equal(result, net.generate(ids, **how)[:, ids.shape[1] :])


def test_cache_argument_has_two_names() -> None:
    net, ids = model("gated_delta_net"), text()
    cache, last = cache_of(net(ids[:, :-1])), ids[:, -1:]
    for part in (net, net.model):
        for names in ({"cache": cache}, {"past_key_values": cache}):
            assert torch.equal(part(last, **names)[0], part(last, cache=cache)[0])
        assert not torch.equal(part(last, cache=cache)[0], part(last)[0])
        with pytest.raises(ValueError, match="two names of one argument: give cache"):
            part(last, cache=cache, past_key_values=cache_of(net(ids[:, :2])))
    generated = net.generate(ids, past_key_values=cache, **HOW)
    assert torch.equal(generated, net.generate(ids, cache=cache, **HOW))


def test_invalid_caches_give_one_sentence() -> None:
    net, ids = model("gated_delta_net"), text()
    cache = cache_of(net(ids))
    with pytest.raises(ValueError, match="cache has 9 tokens and input_ids has 9, so none is new"):
        net.generate(ids, cache=cache, **HOW)
    with pytest.raises(ValueError, match=r"must be the RecollectCache .* of 2 layers"):
        net(ids, cache=DynamicCache())
    with pytest.raises(ValueError, match="not one of 3 layers"):
        net(ids, cache=cache_of(model("hybrid")(ids)))


def test_repr_of_a_cache() -> None:
    cache = cache_of(model("gated_delta_net")(text(2, 5)))
    assert repr(cache) == (
        f"RecollectCache(2 layers, 2 sequences, 5 tokens, {cache.nbytes // 2} bytes per sequence)"
    )
    assert (cache.batch_size, cache.is_compileable, cache.is_croppable) == (2, False, False)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert cache.batch_size == 2
    cache.reset()
    assert (len(cache), cache.get_seq_length()) == (0, 0)
