"""Every hybrid of the zoo saves, loads, decodes and counts parameters like other models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import recollect as rc

pytest.importorskip("transformers")

from tests.lm.families import enable_checkpointing, padded, text

from recollect.blocks import (
    CachedMemory,
    MemoryAsContext,
    MemoryAsGate,
    Mixer,
    MixtureOfMemories,
    RecipeMixer,
    ResidualMemory,
    Sequential,
)
from recollect.blocks.routed import record_routing
from recollect.lm import (
    CachedPrompt,
    RecollectConfig,
    RecollectForCausalLM,
    cache_of,
    count_parameters,
)

VOCAB = 24
HOW = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
# float32: logits are sums of a few hundred products of order 1, here of order 4.
TOL = {"atol": 4e-4, "rtol": 1e-4}
# Each composes like another hybrid, with other memories.
SLOW = ("atlas_mac", "atlas_mag", "atlas_mal", "moneta_h", "yaad_h")
# These decode like another hybrid, too.
SLOW_TO_GENERATE = (*SLOW, "gated_delta_net_h1", "hope_attention")


def hybrids(slow: tuple[str, ...]) -> pytest.MarkDecorator:
    names = rc.zoo.names(kind="hybrid")
    marked = [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]
    return pytest.mark.parametrize("name", marked)


HYBRIDS = hybrids(SLOW)


def small(name: object, **sizes: object) -> RecollectConfig:
    return RecollectConfig.from_recipes(
        name,  # type: ignore[arg-type]
        **{  # type: ignore[arg-type]
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            **sizes,
        },
    )


def model(name: object, **sizes: object) -> RecollectForCausalLM:
    net = RecollectForCausalLM(small(name, **sizes)).eval()
    with torch.no_grad():
        net.lm_head.weight.mul_(4)  # choices that do not depend on rounding
    return net


@HYBRIDS
def test_hybrid_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    net = model(name)
    net.save_pretrained(tmp_path)
    repeated = RecollectForCausalLM.from_pretrained(tmp_path)
    assert repeated.config == net.config
    assert repeated.config.layer_names == net.config.layer_names
    assert torch.equal(net(text()).logits, repeated(text()).logits)


@HYBRIDS
def test_parameters_are_counted_in_closed_form(name: str) -> None:
    config = small(name)
    weights = sum(p.numel() for p in RecollectForCausalLM(config).parameters())
    assert sum(count_parameters(config).values()) == weights


@HYBRIDS
def test_decoding_and_padding(name: str) -> None:
    net, (ids, mask) = model(name), padded()
    with torch.no_grad():
        out = net(ids, attention_mask=mask, use_cache=True)
        rows = [net(ids[:1, 3:]), net(ids[1:])]
        for i, row in enumerate(rows):
            torch.testing.assert_close(out.logits[i, -1], row.logits[0, -1], **TOL)
        more = text(2, 3, seed=5)
        mask = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1)
        out = net(more, attention_mask=mask, cache=cache_of(out))
        for i in range(2):
            full = torch.cat([ids[i : i + 1, 3 * (i == 0) :], more[i : i + 1]], 1)
            torch.testing.assert_close(out.logits[i], net(full).logits[0, -3:], **TOL)


@hybrids(SLOW_TO_GENERATE)
def test_greedy_and_beams_with_and_without_a_cache(name: str) -> None:
    # A layer of these takes ten times as long as one of the others.
    num_layers = 1 if name in ("hope", "tnt") else 3
    net, (ids, mask) = model(name, num_hidden_layers=num_layers), padded()
    for beams in (1, 3):
        with_cache = net.generate(ids, attention_mask=mask, num_beams=beams, **HOW)
        without = net.generate(ids, attention_mask=mask, num_beams=beams, use_cache=False, **HOW)
        assert torch.equal(with_cache, without)
        single = net.generate(ids[:1, 3:], num_beams=beams, **HOW)
        assert torch.equal(with_cache[0, ids.shape[1] :], single[0, ids.shape[1] - 3 :])


@pytest.mark.parametrize("name", ["titans_mac", "atlas_mag", "samba"])
def test_prompt_is_saved_to_a_file(name: str, tmp_path: Path) -> None:
    net = model(name)
    for length in (1, 2, 7):
        prompt = CachedPrompt.prefill(net, text(2, length))
        path = prompt.save(tmp_path / "prompt.safetensors", net)
        loaded = CachedPrompt.load(path, net)
        question = text(2, 2, seed=3)
        expected = net.generate(**prompt.generate_kwargs(question), **HOW)
        assert torch.equal(net.generate(**loaded.generate_kwargs(question), **HOW), expected)


@pytest.mark.parametrize(
    "mixer",
    [MemoryAsContext("gla", "softmax_attention", segment=2), CachedMemory("gla", segment=2)],
)
def test_a_prompt_survives_segments_that_end_with_it(mixer: Mixer, tmp_path: Path) -> None:
    """States before and after the start of a segment have different shapes."""
    net = model(mixer)
    for length in (2, 3, 4, 5):
        prompt = CachedPrompt.prefill(net, text(1, length))
        path = prompt.save(tmp_path / f"{length}.safetensors", net)
        assert CachedPrompt.load(path, net).cache.past_length == prompt.cache.past_length


def with_short_batches(leaf: RecipeMixer) -> RecipeMixer:
    """Return a recipe whose inner batches end within the text, if memories learn at their ends."""
    algorithm = leaf.recipe.algorithm
    if algorithm.update_every != "batch":
        return leaf
    changed = replace(algorithm, batch_size=4)  # type: ignore[type-var]
    return replace(leaf, recipe=leaf.recipe.replace(algorithm=changed))


@HYBRIDS
def test_a_training_step_reaches_every_parameter(name: str) -> None:
    # Longer than segments and inner batches, so that retrievals are not empty.
    mixers = dict(rc.zoo.get(name).layers)  # type: ignore[union-attr]
    mixers = {
        name: replace(mixer, segment=4)
        if isinstance(mixer, MemoryAsContext | CachedMemory)
        else mixer.map_leaves(with_short_batches)
        for name, mixer in mixers.items()
    }
    net = model(mixers).train()
    ids = text(2, 21)
    net(ids, labels=ids).loss.backward()
    for key, weight in net.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), key
        # A threshold above all errors of these few tokens has no gradient.
        assert "threshold" in key or weight.grad.abs().max() > 0, key


def test_pattern_defines_mixers_and_mlps() -> None:
    config = small("gated_delta_net_h2", num_hidden_layers=5)
    names = ["mamba2", "gated_delta_net", "sliding_window_attention"]
    assert config.layers == names
    assert config.layer_names == [*names, *names[:2]]
    assert config.has_mlp == [True] * 5
    custom = small(
        {
            "memory": MemoryAsGate("gla", "sliding_window_attention"),
            "swa": "sliding_window_attention",
        },
        layers=["memory", "swa", "mlp"],
        num_hidden_layers=4,
    )
    assert custom.layer_names == ["memory", "swa", "memory", "swa"]
    assert custom.has_mlp == [False, True, False, True]
    net = RecollectForCausalLM(custom)
    assert [block.mlp is not None for block in net.model.blocks] == custom.has_mlp
    weights = sum(p.numel() for p in net.parameters())
    assert sum(count_parameters(custom).values()) == weights
    (matched,) = rc.lm.match_parameters([custom], weights + 2000)
    assert abs(rc.lm.parameter_count(matched) - weights - 2000) <= 12 * 16 * 2


def test_mlps_follow_the_pattern() -> None:
    """The model against its parts: a memory without an MLP, and an attention with one."""
    net = model({"a": "gla", "b": "delta_net"}, layers=["a", "b", "mlp"], num_hidden_layers=2)
    ids = text(1, 7)
    first, second = net.model.blocks
    x = net.model.embed_tokens(ids)
    x = x + first.layer(first.memory_norm(x))[0]
    x = x + second.layer(second.memory_norm(x))[0]
    x = x + second.mlp(second.mlp_norm(x))
    torch.testing.assert_close(net(ids).logits, net.lm_head(net.model.norm(x)), **TOL)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["gla", "swa"], "layers names the recipe 'swa', which is not among: gla"),
        (["mlp", "gla"], "layers must begin with a recipe and have one between two 'mlp'"),
        (["gla", "mlp", "mlp"], "layers must begin with a recipe and have one between two 'mlp'"),
    ],
)
def test_pattern_with_an_unknown_mixer_is_refused(layers: list[str], message: str) -> None:
    with pytest.raises(rc.RecipeError) as caught:
        small({"gla": "gla"}, layers=layers)
    assert message in str(caught.value)


def test_meaningless_names_and_entries_are_refused() -> None:
    with pytest.raises(rc.RecipeError, match="a recipe cannot be named 'mlp'"):
        small({"mlp": "gla"})
    with pytest.raises(rc.RecipeError, match="samba is a pattern of layers"):
        small({"a": "samba"})
    config = small("titans_mac")
    with pytest.raises(rc.RecipeError, match="composes memory, attention, and one recipe"):
        config.recipe("titans_mac")
    data = config.to_dict()
    data["recipes"]["titans_mac"]["segment"] = 0
    with pytest.raises(rc.RecipeError, match="must be a whole number >= 1, not 0"):
        RecollectConfig.from_dict(data)
    with pytest.raises(rc.RecipeError, match="one recipe is expected here"):
        rc.lm.model.config.resolve_recipe("titans_mac")


def test_whether_a_cache_grows_is_known() -> None:
    assert not model("titans_mac").has_growing_cache
    assert model(Sequential("gla", "softmax_attention")).has_growing_cache
    assert not model("samba").has_growing_cache


def test_training_loss_includes_the_balance_loss() -> None:
    net = model(
        {"a": MixtureOfMemories(["gla"] * 3, top=1), "b": "delta_net"}, router_aux_loss_coef=0.5
    )
    ids, mask = padded()
    with record_routing(net) as routes:
        held_out = net(ids, attention_mask=mask, labels=ids)
    layers = [block.layer for block in net.model.blocks]
    routers = [layer.router for layer in layers if "0" in getattr(layer, "parts", {})]
    assert len(routes) == len(routers) == 2  # layers a, b, a
    losses = []
    for routing in routes:
        real = mask.bool()
        count = torch.nn.functional.one_hot(routing.chosen[real][:, 0], 3).double().mean(0)
        losses.append(3 * (count * routing.probabilities[real].double().mean(0)).sum())
    torch.testing.assert_close(held_out.aux_loss.double(), torch.stack(losses).mean(), **TOL)
    plain = torch.nn.functional.cross_entropy(
        held_out.logits[:, :-1].flatten(0, 1),
        ids[:, 1:].masked_fill(mask[:, :-1] == 0, -100).flatten(),
    )
    torch.testing.assert_close(held_out.loss, plain, **TOL)
    net.train()
    trained = net(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(trained.loss, plain + 0.5 * held_out.aux_loss, **TOL)
    trained.loss.backward()
    gradients = [router.scores.weight.grad.clone() for router in routers]
    # The weight of a single memory is 1, so a router learns from the balance alone.
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    net.zero_grad()
    count = 2 * int(mask[:, :-1].sum())
    half = net(ids, attention_mask=mask, labels=ids, num_items_in_batch=count)
    torch.testing.assert_close(half.loss, trained.loss / 2, **TOL)
    assert model("gla")(ids, labels=ids).get("aux_loss") is None


def test_checkpointed_layers_have_the_same_balance_gradient() -> None:
    net, ids = model(MixtureOfMemories(["gla"] * 3, top=2)).train(), text(2, 9)
    result = []
    for checkpointed in (False, True):
        net.model.gradient_checkpointing = checkpointed
        net.zero_grad()
        if checkpointed:
            enable_checkpointing(net)
        net(ids, labels=ids).loss.backward()
        result.append({name: p.grad.clone() for name, p in net.named_parameters()})
    for name, gradient in result[0].items():
        torch.testing.assert_close(gradient, result[1][name], **TOL)


@pytest.mark.parametrize(
    "mixer",
    [
        ResidualMemory("titans", "gla", clip=0.5),
        ResidualMemory("rls", "delta_net", read="before"),
        MixtureOfMemories(["titans", "gla", "softmax_attention"], top=2),
        MixtureOfMemories(
            ["gla", MemoryAsGate("gla", "sliding_window_attention")], top=1, shared="delta_net"
        ),
    ],
)
def test_numbers_of_the_new_compositions_are_counted(mixer: object) -> None:
    config = small(mixer)
    weights = sum(p.numel() for p in RecollectForCausalLM(config).parameters())
    assert sum(count_parameters(config).values()) == weights


def test_a_share_of_the_balance_loss_is_a_number() -> None:
    with pytest.raises(rc.RecipeError, match=r"router_aux_loss_coef.* number in \[0, 1000\)"):
        small("gla", router_aux_loss_coef=-1.0)
