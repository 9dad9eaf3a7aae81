"""Rejected tokens have no effect: assisted generation, prompt lookup and `crop` are exact."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from tests.lm.families import every_family, model, text
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from recollect.lm import RecollectCache, cache_of, replace_attention
from recollect.lm.model.cache import CACHE_KEY, StateLayer

HYBRIDS = ["titans_mac", "samba", "mixture_of_memories", "residual_delta_net"]
NAMES = ["gated_delta_net", "mamba2", "titans", "rls", "softmax_attention", *HYBRIDS]
ALL = [*every_family(), *HYBRIDS, "titans_mag"]
SLOW = pytest.mark.slow
TOL = {"atol": 1e-10, "rtol": 1e-10}
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 0, "max_new_tokens": 6}


class Drafts:
    """Counts of the forward passes of a model during generation.

    Attributes:
        passes: number of forward passes.
        drafted: number of draft tokens that they verified.
    """

    def __init__(self) -> None:
        self.passes = self.drafted = 0


@contextmanager
def counted(net: PreTrainedModel, prompt: Tensor) -> Iterator[Drafts]:
    """Count drafts that are verified in the context."""
    drafts = Drafts()

    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Tensor]) -> None:
        known = 1 if drafts.passes else prompt.shape[1]
        drafts.passes += 1
        drafts.drafted += kwargs["input_ids"].shape[1] - known

    handle = net.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield drafts
    finally:
        handle.remove()


def check_drafts(net: PreTrainedModel, ids: Tensor, **drafter: object) -> None:
    """Drafts change no token of greedy search; some are accepted, and some rejected."""
    expected = net.generate(ids, **GREEDY)
    with counted(net, ids) as drafts:
        generated = net.generate(ids, **GREEDY, **drafter)
    assert torch.equal(generated, expected)
    num_tokens = generated.shape[1] - ids.shape[1]
    accepted = num_tokens - drafts.passes
    print(f"{drafts.passes} passes, {num_tokens} tokens, {accepted} of {drafts.drafted} accepted")
    assert 0 < accepted < drafts.drafted

    def sampled(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return net.generate(ids, **SAMPLED, **drafter)

    assert torch.equal(sampled(1), sampled(1))
    likeliest = net.generate(ids, **{**SAMPLED, "top_k": 1}, **drafter)
    assert torch.equal(likeliest, expected[:, : likeliest.shape[1]])


def repeated_prompt() -> Tensor:
    """A text that occurs three times, so that prompt lookup finds drafts."""
    return text(1, 5, seed=12).repeat(1, 3)


def noisy(net: PreTrainedModel, std: float) -> PreTrainedModel:
    """A model that often, but not always, predicts the tokens of ``net``."""
    assistant = copy.deepcopy(net)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(std * weight.std(correction=0) * torch.randn_like(weight))
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


@pytest.mark.parametrize("name", NAMES)
def test_prompt_lookup_is_greedy_search(name: str) -> None:
    check_drafts(model(name), repeated_prompt(), prompt_lookup_num_tokens=5)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gated_delta_net", "titans") else pytest.param(name, marks=SLOW)
        for name in NAMES
    ],
)
def test_assisted_generation_is_greedy_search(name: str) -> None:
    check_drafts(model(name), text(1), assistant_model=noisy(model(name), 0.1))


def test_an_assistant_of_another_kind() -> None:
    net, llama = model("gated_delta_net"), decoder()
    for main, assistant in ((net, llama), (llama, net)):
        expected = main.generate(text(1), **GREEDY)
        generated = main.generate(text(1), assistant_model=assistant, **GREEDY)
        assert torch.equal(generated, expected)


# -- the cache ------------------------------------------------------------------------------------


def check_equal(cropped: RecollectCache, expected: RecollectCache) -> None:
    """Both caches have equal tensors and counts."""
    assert cropped.get_seq_length() == expected.get_seq_length()
    assert [layer.past_length for layer in cropped.layers] == [
        layer.past_length for layer in expected.layers
    ]
    for state, other in zip(cropped.states, expected.states, strict=True):
        assert state.host_position == other.host_position
        (names, tensors), (other_names, other_tensors) = state.flatten(), other.flatten()
        assert names == other_names
        for name, x, y in zip(names, tensors, other_tensors, strict=True):
            torch.testing.assert_close(x, y, **TOL, msg=lambda m, name=name: f"{name}: {m}")


def recording(cache: RecollectCache | None = None) -> RecollectCache:
    cache = RecollectCache() if cache is None else cache
    cache.activate_past_recording()
    return cache


def check_crop(name: str, mask: Tensor) -> None:
    """A cropped cache equals one that has not read the tokens, and so do the next logits."""
    net, ids = copy.deepcopy(model(name)).double(), text(2, mask.shape[1])
    token = text(2, 1, seed=2)

    def read(cache: RecollectCache | None, start: int, stop: int) -> RecollectCache:
        return cache_of(net(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache))

    def continuation(cache: RecollectCache) -> Tensor:
        return net(token, cache=cache).logits

    with torch.no_grad():
        for start, stops in ((0, (6,)), (7, (8, 19))):  # 16 is the end of an inner batch
            begin = read(None, 0, start) if start else RecollectCache()
            recorded = read(recording(begin), start, ids.shape[1])
            for stop in stops:
                cropped, expected = recorded.copy(), read(begin, start, stop)
                cropped.crop(stop - ids.shape[1])
                check_equal(cropped, expected)
                torch.testing.assert_close(continuation(cropped), continuation(expected), **TOL)


@pytest.mark.parametrize("name", NAMES)
def test_cropped_cache_equals_one_without_the_tokens(name: str) -> None:
    check_crop(name, torch.ones(2, 24, dtype=torch.long))


@pytest.mark.parametrize("name", ALL)
def test_a_cropped_cache_of_a_ragged_batch(name: str) -> None:
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :3] = mask[1, 20:] = 0
    check_crop(name, mask)


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "softmax_attention", "titans_mac"])
def test_a_cache_is_cropped_across_calls(name: str) -> None:
    """Calls since the last crop are undone, and a cropped call can be cropped again."""
    net, ids = copy.deepcopy(model(name)).double(), text(2, 16)
    cache = recording()
    with torch.no_grad():
        for piece in ids.split([9, 4, 1, 1, 1], dim=1):
            cache = cache_of(net(piece, cache=cache))
        shortened = cache.copy()
        shortened.crop(0)
        with pytest.raises(ValueError, match="the 1 token that was recorded"):
            shortened.crop(-2)
        for removed, remaining in ((5, 11), (1, 10)):
            cache.crop(-removed)
            assert cache.get_seq_length() == remaining
        first = cache_of(net(ids[:, :9]))
        check_equal(cache, cache_of(net(ids[:, 9:10], cache=first)))
        cache.crop(-1)
        check_equal(cache, first)
        with pytest.raises(ValueError, match="the 0 tokens that were recorded"):
            cache.crop(-1)
        continued = cache_of(net(ids[:, 9:], cache=cache))
        check_equal(continued, cache_of(net(ids[:, 9:], cache=first)))


@pytest.mark.parametrize("name", ["gated_delta_net", "samba", "titans_mac"])
def test_all_tokens_can_be_cropped(name: str) -> None:
    net, ids = model(name), text()
    cache = cache_of(net(ids, cache=recording()))
    cache.crop(-torch.tensor(ids.shape[1]))  # transformers 5.17 passes a tensor
    assert (len(cache), cache.get_seq_length(), cache.batch_size) == (0, 0, 0)
    assert cache.is_croppable
    assert torch.equal(net(ids, cache=cache).logits, net(ids).logits)


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2", "titans", "rls", "rwkv7"])
def test_crop_projects_nothing(name: str) -> None:
    net, called = model(name), []
    cache = cache_of(net(text(), cache=recording()))
    hooks = [
        module.register_forward_hook(lambda module, *_: called.append(module))
        for module in net.modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.inference_mode():
        cache.crop(-4)
    for hook in hooks:
        hook.remove()
    assert not called


def test_nothing_is_stored_without_recording() -> None:
    net, ids = copy.deepcopy(model("gated_delta_net")).double(), text(1)
    plain = cache_of(net(ids))
    assert not plain.is_croppable
    assert all(layer.calls == () for layer in plain.layers)
    # Generation with drafts does not change the cache that it receives.
    kwargs = {"attention_mask": torch.ones(1, 10, dtype=torch.long), **GREEDY}
    longer = torch.cat([ids, ids[:, :1]], dim=1)
    states = plain.states
    net.generate(longer, cache=plain, prompt_lookup_num_tokens=3, **kwargs)
    assert not plain.is_croppable
    assert plain.get_seq_length() == 9
    assert all(a is b for a, b in zip(plain.states, states, strict=True))
    # A recorded cache keeps its calls when another cache continues it.
    recorded = cache_of(net(ids, cache=recording()))
    net(ids, cache=recorded)
    recorded.crop(-2)
    check_equal(recorded, cache_of(net(ids[:, :7])))
    # Copies share the tensors and layers.
    assert copy.deepcopy(recorded).layers[0].calls == recorded.layers[0].calls


def test_refusals_of_crop_are_one_sentence() -> None:
    net, ids = model("gated_delta_net"), text()
    cache = cache_of(net(ids))
    cache.crop(0)
    with pytest.raises(ValueError, match=r"call cache\.activate_past_recording\(\) before"):
        cache.crop(-1)
    cache = cache_of(net(ids[:, :4], cache=recording(cache)))
    with pytest.raises(ValueError, match=r"crop takes minus the number of tokens.*not 3"):
        cache.crop(3)
    with pytest.raises(ValueError, match=r"-5\) .* the 4 tokens that were recorded"):
        cache.crop(-5)
    assert cache.get_seq_length() == 13
    cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ValueError, match="the 0 tokens that were recorded"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="this cache has none"):
        recording().crop(-1)
    packed = net(ids[:1], cu_seqlens=torch.tensor([0, 4, 9]), cache=recording(), use_cache=True)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache_of(packed).crop(-1)


# -- replaced layers ------------------------------------------------------------------------------


def decoder(recipe: str | None = None, layers: list[int] | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    net = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.2)
    if recipe is not None:
        replace_attention(net, recipe, layers)
    return net


@pytest.mark.parametrize("layers", [None, [1]], ids=str)
@pytest.mark.parametrize("recipe", ["gated_delta_net", pytest.param("titans", marks=SLOW)])
def test_a_decoder_with_replaced_layers(recipe: str, layers: list[int] | None) -> None:
    net = decoder(recipe, layers)
    check_drafts(net, repeated_prompt(), prompt_lookup_num_tokens=5)
    check_drafts(net, text(1), assistant_model=noisy(net, 0.1))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_of_a_decoder_with_replaced_layers(
    duplicate: Callable[[PreTrainedModel], PreTrainedModel],
) -> None:
    net = decoder("gated_delta_net")
    other = duplicate(net)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    check_drafts(other, repeated_prompt(), prompt_lookup_num_tokens=5)


@pytest.mark.parametrize("layers", [None, [1]], ids=str)
def test_the_cache_of_a_decoder_with_replaced_layers(layers: list[int] | None) -> None:
    net, ids = decoder("gated_delta_net", layers).double(), text(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    caches = []
    with torch.no_grad():
        for stop in (12, 9):
            cache = DynamicCache(config=net.config)
            net(ids[:, :6], attention_mask=mask[:, :6], **{CACHE_KEY: cache})
            cache.activate_past_recording()
            net(ids[:, 6:stop], attention_mask=mask[:, :stop], **{CACHE_KEY: cache})
            cache.crop(9 - stop)
            caches.append(cache)
        cropped, expected = caches
        assert cropped.get_seq_length() == expected.get_seq_length() == 9
        for layer, other in zip(cropped.layers, expected.layers, strict=True):
            if isinstance(layer, StateLayer):
                for x, y in zip(*(c.state.flatten()[1] for c in (layer, other)), strict=True):
                    torch.testing.assert_close(x, y, **TOL)
        a, b = (
            net(ids[:, 9:], attention_mask=mask, **{CACHE_KEY: cache}).logits for cache in caches
        )
    torch.testing.assert_close(a, b, **TOL)


def test_a_loaded_decoder_with_replaced_layers(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    decoder("gated_delta_net").save_pretrained(tmp_path)
    net = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    check_drafts(net, repeated_prompt(), prompt_lookup_num_tokens=5)


def test_a_saved_cache_has_no_recorded_calls() -> None:
    net, ids, buffer = model("gated_delta_net"), text(), io.BytesIO()
    cache = RecollectCache()
    cache.activate_past_recording()
    with torch.no_grad():
        cache = cache_of(net(ids, cache=cache, use_cache=True))
        torch.save(cache, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        y = net(ids[:, :1], cache=loaded).logits
        torch.testing.assert_close(y, net(ids[:, :1], cache=cache).logits)
    with pytest.raises(ValueError, match="crop"):
        loaded.crop(-1)
