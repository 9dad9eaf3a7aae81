"""Mixers as data: files, equality, what they refuse."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from tests.blocks import loops

import recollect as rc
from recollect.blocks import (
    AsContext,
    Boosted,
    Chain,
    Gated,
    Leaf,
    Routed,
    Together,
    build,
    mixer_of,
    read_mixer,
)


def sinks(first: int) -> rc.Recipe:
    """Attention to the last three tokens and the first ones."""
    context = rc.context.Similar(within=(rc.context.SinkWindow(size=3, first=first),))
    local, analytic = rc.memory.LocalConstant(), rc.algorithm.Analytic()
    return rc.Recipe(memory=local, context=context, algorithm=analytic)


DEEP = Chain(Gated("titans", "softmax_attention", persistent=2), AsContext("gla", "fox", segment=3))


@pytest.mark.parametrize(
    "mixer",
    [
        mixer_of("gated_delta_net"),
        Chain("gla"),
        Gated("titans", "sliding_window_attention"),
        AsContext("titans", "softmax_attention", segment=16, persistent=4),
        DEEP,
        Together("gla", DEEP, persistent=1),
        Boosted("gla", "delta_net"),
        Boosted(
            *("gated_delta_net", "gated_delta_net"),
            clip=0.5,
            read="before",
            share=["log_decay"],
            weigh_first="log_decay",
            weigh_second="lr",
        ),
        Routed(["gla", DEEP, Boosted("gla", "gla")], top=2),
        Routed(["gla", "gla"], top=1, shared="titans"),
    ],
)
def test_a_mixer_is_what_its_json_says(mixer: Any) -> None:
    again = read_mixer(json.loads(json.dumps(mixer.to_dict())))
    assert again == mixer and hash(again) == hash(mixer)


def test_leaves_have_names_and_can_be_changed() -> None:
    assert [*DEEP.leaves] == ["0.memory", "0.attention", "1.memory", "1.attention"]
    plain = DEEP.with_leaves(
        lambda leaf: dataclasses.replace(leaf, options=dataclasses.replace(leaf.options, conv=0))
    )
    assert all(leaf.options.conv == 0 for leaf in plain.leaves.values())
    assert [leaf.recipe for leaf in plain.leaves.values()] == [
        leaf.recipe for leaf in DEEP.leaves.values()
    ]
    assert plain.to_dict()["parts"][0]["persistent"] == 2
    assert build(DEEP, 8, 2).leaves.keys() == DEEP.leaves.keys()


def test_what_stands_for_a_mixer() -> None:
    preset = rc.zoo.get("gla")
    same = Leaf(recipe=preset.recipe, options=preset.options)
    assert mixer_of("gla") == mixer_of(preset) == mixer_of((preset.recipe, preset.options)) == same
    assert mixer_of(preset.recipe) == Leaf(recipe=preset.recipe)
    assert mixer_of("titans_mag") == rc.zoo.find("titans_mag").mixer
    assert not Chain("gla", loops.attention(3)).grows
    assert Gated("gla", "softmax_attention").grows
    assert not AsContext("gla", "softmax_attention", segment=4).grows


REFUSED = {
    "a segment of 0": (
        lambda: AsContext("gla", "softmax_attention", segment=0),
        "AsContext(segment=...) must be a whole number >= 1, not 0",
    ),
    "half a segment": (
        lambda: AsContext("gla", "softmax_attention", segment=2.5),  # type: ignore[arg-type]
        "AsContext(segment=...) must be a whole number >= 1, not 2.5",
    ),
    "a skip": (
        lambda: AsContext("mamba2", "softmax_attention", segment=4),
        "AsContext reads its memory without writing, and LayerOptions(skip=True) adds the value",
    ),
    "a bonus": (
        lambda: AsContext("rwkv6", "softmax_attention", segment=4),
        "AsContext reads its memory without writing, and Matrix(read=Read(when=",
    ),
    "never written": (
        lambda: AsContext("ffn_relu", "softmax_attention", segment=4),
        "AsContext reads its memory without writing, and LayerOptions(persistent=...) is never",
    ),
    "a composed memory": (
        lambda: AsContext(Chain("gla"), "softmax_attention", segment=4),
        "AsContext reads its memory without writing, and rc.blocks.Chain is no single memory",
    ),
    "no parts": (lambda: Chain(), "Chain(parts=...) needs at least one mixer"),
    "a name that nothing has": (lambda: Chain("gla", "titan"), "no architecture named 'titan'"),
    "a pattern of layers": (lambda: Chain("samba"), "samba is a pattern of layers"),
    "a number": (lambda: Gated("gla", 3), "a mixer is given as a zoo name"),
    "fewer than none": (
        lambda: Gated("gla", "softmax_attention", persistent=-1),
        "Gated(persistent=...) must be a whole number >= 0, not -1",
    ),
    "a window that loses them": (
        lambda: Gated("gla", "sliding_window_attention", persistent=4),
        "loses them: restrict it by context.SinkWindow(size=128, first=4)",
    ),
    "a kind that there is not": (
        lambda: read_mixer({"mixer": "sum", "parts": []}),
        "there is no mixer 'sum'; there are chain, gated, as_context",
    ),
    "a field that there is not": (
        lambda: read_mixer({**Chain("gla").to_dict(), "window": 3}),
        "Chain has no field 'window'; it has parts, persistent",
    ),
    "a field that is missing": (
        lambda: read_mixer({"mixer": "gated", "memory": mixer_of("gla").to_dict()}),
        "Gated needs attention, which is missing",
    ),
    "parts that are none": (
        lambda: read_mixer({"mixer": "chain", "parts": 3}),
        "Chain: parts must be a list of mixers, not 3",
    ),
    "no mapping": (lambda: read_mixer([1]), "a mixer is a mapping of fields, not"),
    "no recipe": (lambda: read_mixer({"options": {}}), "this one has no recipe"),
    "sinks and a window": (
        lambda: rc.Recipe(
            memory=rc.memory.LocalConstant(),
            context=rc.context.Similar(
                within=(
                    rc.context.Window(size=10, gated=False),
                    rc.context.SinkWindow(size=4, first=2),
                )
            ),
            algorithm=rc.algorithm.Analytic(),
        ),
        "context.SinkWindow lets associations go between the first and the last",
    ),
    "tokens before tokens": (
        lambda: Chain(Chain(sinks(2), persistent=2), persistent=2),
        "restrict it by context.SinkWindow(size=3, first=4)",
    ),
    "tokens before a segment": (
        lambda: AsContext("gla", Chain(sinks(2), persistent=2), segment=4, persistent=2),
        "persistent=4 tokens are to be seen by every token, and the window of attention.0",
    ),
    "sinks and blocks": (
        lambda: rc.Recipe(
            memory=rc.memory.LocalConstant(),
            context=rc.context.Similar(
                within=(
                    rc.context.SinkWindow(size=3, first=0),
                    rc.context.Blocks(size=2, top=1),
                )
            ),
            algorithm=rc.algorithm.Analytic(),
        ),
        "context.SinkWindow lets associations go between the first and the last",
    ),
    "blocks in a window": (
        lambda: rc.Recipe(
            memory=rc.memory.LocalConstant(),
            context=rc.context.Similar(
                within=(
                    rc.context.Blocks(size=2, top=3, share="softmax"),
                    rc.context.Window(size=1, gated=False),
                )
            ),
            algorithm=rc.algorithm.Analytic(),
        ),
        "context.Blocks scores blocks by all of their keys, and",
    ),
    "a size of build": (
        lambda: build("gla", 8, 2, window=3),
        "build has no argument 'window'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(rc.RecipeError) as caught:
        make()
    message = str(caught.value)
    assert said in message
    assert "\n" not in message


def test_all_weights_are_drawn_anew() -> None:
    layer = build(Chain("mamba2", "gla", persistent=2), d_model=16, heads=2)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.fill_(7.125)
    layer.reset_parameters()
    assert not any(bool((weight == 7.125).any()) for weight in layer.parameters())


def test_tokens_before_tokens_are_seen_by_sinks_of_both() -> None:
    assert Chain(Chain(sinks(4), persistent=2), persistent=2).persistent == 2
