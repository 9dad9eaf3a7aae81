"""Mixers as data: files, equality, and refusals."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from tests.blocks import loops

import recollect as rc
from recollect.blocks import (
    Levels,
    MemoryAsContext,
    MemoryAsGate,
    MixtureOfMemories,
    RecipeMixer,
    ResidualMemory,
    Sequential,
    as_mixer,
    build,
    read_mixer,
)


def sinks(first: int) -> rc.Recipe:
    """Attention to the last three tokens and the first ones."""
    context = rc.context.KernelWeighted(
        restrictions=(rc.context.SinkWindow(size=3, num_sinks=first),)
    )
    local, analytic = rc.memory.LocalConstant(), rc.algorithm.Analytic()
    return rc.Recipe(memory=local, context=context, algorithm=analytic)


DEEP = Sequential(
    MemoryAsGate("titans", "softmax_attention", persistent=2),
    MemoryAsContext("gla", "fox", segment=3),
)


@pytest.mark.parametrize(
    "mixer",
    [
        as_mixer("gated_delta_net"),
        Sequential("gla"),
        MemoryAsGate("titans", "sliding_window_attention"),
        MemoryAsContext("titans", "softmax_attention", segment=16, persistent=4),
        DEEP,
        Sequential("gla", DEEP, persistent=1),
        ResidualMemory("gla", "delta_net"),
        ResidualMemory(
            *("gated_delta_net", "gated_delta_net"),
            clip=0.5,
            read="before",
            share=["log_decay"],
            weigh_first="log_decay",
            weigh_second="lr",
        ),
        MixtureOfMemories(["gla", DEEP, ResidualMemory("gla", "gla")], top=2),
        MixtureOfMemories(["gla", "gla"], top=1, shared="titans"),
        Levels("gated_delta_net", num_levels=5),
    ],
)
def test_mixer_round_trips_through_json(mixer: Any) -> None:
    repeated = read_mixer(json.loads(json.dumps(mixer.to_dict())))
    assert repeated == mixer and hash(repeated) == hash(mixer)


def test_leaves_have_names_and_can_be_changed() -> None:
    assert [*DEEP.leaves] == ["0.memory", "0.attention", "1.memory", "1.attention"]
    plain = DEEP.map_leaves(
        lambda leaf: dataclasses.replace(
            leaf, options=dataclasses.replace(leaf.options, conv_size=0)
        )
    )
    assert all(leaf.options.conv_size == 0 for leaf in plain.leaves.values())
    assert [leaf.recipe for leaf in plain.leaves.values()] == [
        leaf.recipe for leaf in DEEP.leaves.values()
    ]
    assert plain.to_dict()["parts"][0]["persistent"] == 2
    assert build(DEEP, 8, 2).leaves.keys() == DEEP.leaves.keys()


def test_values_that_name_a_mixer() -> None:
    preset = rc.zoo.get("gla")
    same = RecipeMixer(recipe=preset.recipe, options=preset.options)
    assert as_mixer("gla") == as_mixer(preset) == as_mixer((preset.recipe, preset.options)) == same
    assert as_mixer(preset.recipe) == RecipeMixer(recipe=preset.recipe)
    assert as_mixer("titans_mag") == rc.zoo.get("titans_mag").mixer
    assert not Sequential("gla", loops.attention(3)).grows
    assert MemoryAsGate("gla", "softmax_attention").grows
    assert not MemoryAsContext("gla", "softmax_attention", segment=4).grows


REFUSED = {
    "a segment of 0": (
        lambda: MemoryAsContext("gla", "softmax_attention", segment=0),
        "MemoryAsContext(segment=...) must be a whole number >= 1, not 0",
    ),
    "half a segment": (
        lambda: MemoryAsContext("gla", "softmax_attention", segment=2.5),  # type: ignore[arg-type]
        "MemoryAsContext(segment=...) must be a whole number >= 1, not 2.5",
    ),
    "a skip": (
        lambda: MemoryAsContext("mamba2", "softmax_attention", segment=4),
        "MemoryAsContext reads its memory without writing, and LayerOptions(value_skip=True) adds "
        "the value",
    ),
    "a bonus": (
        lambda: MemoryAsContext("rwkv6", "softmax_attention", segment=4),
        "MemoryAsContext reads its memory without writing, and Matrix(read=Read(when=",
    ),
    "never written": (
        lambda: MemoryAsContext("ffn_relu", "softmax_attention", segment=4),
        "MemoryAsContext reads its memory without writing, and LayerOptions(persistent=...) is "
        "never",
    ),
    "a composed memory": (
        lambda: MemoryAsContext(Sequential("gla"), "softmax_attention", segment=4),
        "MemoryAsContext reads its memory without writing, and rc.blocks.Sequential is not a "
        "single memory",
    ),
    "levels of a deep memory": (
        lambda: Levels("titans"),
        "Levels needs a matrix memory whose write is linear in the values, and memory.MLP is not "
        "linear in its parameters: take a memory such as gated_delta_net",
    ),
    "levels of a loss that is not affine": (
        lambda: Levels(rc.Recipe(bias=rc.bias.Huber(threshold=1.0))),
        "the error of bias.Huber is not affine in the prediction: take a memory",
    ),
    "levels of a normalised read": (
        lambda: Levels("normalized_linear_attention"),
        "reads more than the matrix after the write",
    ),
    "levels with momentum": (lambda: Levels("momentum_delta_net"), "has momentum: take"),
    "levels of several associations": (
        lambda: Levels("delta_product"),
        "writes 2 associations per token: take",
    ),
    "levels of decays of values": (
        lambda: Levels(rc.Recipe(retention=rc.retention.Decay(per="value"))),
        "log_decay of retention.Decay depends on the value channel: take",
    ),
    "levels of attention": (lambda: Levels("softmax_attention"), "LocalConstant() is none: take"),
    "levels of a composition": (
        lambda: Levels(Sequential("gla")),
        "rc.blocks.Sequential is not a single memory: take",
    ),
    "one level": (
        lambda: Levels("gla", num_levels=1),
        "Levels(num_levels=...) must be a whole number >= 2, not 1",
    ),
    "no parts": (lambda: Sequential(), "Sequential(parts=...) needs at least one mixer"),
    "a name that nothing has": (
        lambda: Sequential("gla", "titan"),
        "no architecture named 'titan'",
    ),
    "a pattern of layers": (lambda: Sequential("samba"), "samba is a pattern of layers"),
    "a number": (lambda: MemoryAsGate("gla", 3), "a mixer must be a zoo name"),
    "fewer than none": (
        lambda: MemoryAsGate("gla", "softmax_attention", persistent=-1),
        "MemoryAsGate(persistent=...) must be a whole number >= 0, not -1",
    ),
    "a window that loses them": (
        lambda: MemoryAsGate("gla", "sliding_window_attention", persistent=4),
        "restrict it by context.SinkWindow(size=128, num_sinks=4)",
    ),
    "a kind that there is not": (
        lambda: read_mixer({"mixer": "sum", "parts": []}),
        "there is no mixer 'sum'; there are sequential, memory_as_gate, memory_as_context",
    ),
    "a field that there is not": (
        lambda: read_mixer({**Sequential("gla").to_dict(), "window": 3}),
        "Sequential has no field 'window'; it has parts, persistent",
    ),
    "a field that is missing": (
        lambda: read_mixer({"mixer": "memory_as_gate", "memory": as_mixer("gla").to_dict()}),
        "MemoryAsGate needs attention, which is missing",
    ),
    "parts that are none": (
        lambda: read_mixer({"mixer": "sequential", "parts": 3}),
        "Sequential: parts must be a list of mixers, not 3",
    ),
    "no mapping": (
        lambda: read_mixer([1]),
        "a mixer is {'recipe': ..., 'options': ...} or {'mixer': kind, ...}, not [1]",
    ),
    "no recipe": (lambda: read_mixer({"options": {}}), "not {'options': {}}"),
    "sinks and a window": (
        lambda: rc.Recipe(
            memory=rc.memory.LocalConstant(),
            context=rc.context.KernelWeighted(
                restrictions=(
                    rc.context.Window(size=10, gated=False),
                    rc.context.SinkWindow(size=4, num_sinks=2),
                )
            ),
            algorithm=rc.algorithm.Analytic(),
        ),
        "context.SinkWindow drops associations between the first and the last",
    ),
    "tokens before tokens": (
        lambda: Sequential(Sequential(sinks(2), persistent=2), persistent=2),
        "restrict it by context.SinkWindow(size=3, num_sinks=4)",
    ),
    "tokens before a segment": (
        lambda: MemoryAsContext("gla", Sequential(sinks(2), persistent=2), segment=4, persistent=2),
        "all tokens must read the persistent=4 tokens, which leave the window of attention.0",
    ),
    "sinks and blocks": (
        lambda: rc.Recipe(
            memory=rc.memory.LocalConstant(),
            context=rc.context.KernelWeighted(
                restrictions=(
                    rc.context.SinkWindow(size=3, num_sinks=0),
                    rc.context.TopBlocks(size=2, top_k=1),
                )
            ),
            algorithm=rc.algorithm.Analytic(),
        ),
        "context.SinkWindow drops associations between the first and the last",
    ),
    "blocks in a window": (
        lambda: rc.Recipe(
            memory=rc.memory.LocalConstant(),
            context=rc.context.KernelWeighted(
                restrictions=(
                    rc.context.TopBlocks(size=2, top_k=3, weighting="softmax"),
                    rc.context.Window(size=1, gated=False),
                )
            ),
            algorithm=rc.algorithm.Analytic(),
        ),
        "context.TopBlocks scores blocks by all of their keys, and",
    ),
    "a size of build": (
        lambda: build("gla", 8, 2, window=3),
        "build has no argument 'window'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence(name: str) -> None:
    make, pattern = REFUSED[name]
    with pytest.raises(rc.RecipeError) as caught:
        make()
    message = str(caught.value)
    assert pattern in message
    assert "\n" not in message


def test_reset_parameters_redraws_all_weights() -> None:
    layer = build(Sequential("mamba2", "gla", persistent=2), d_model=16, num_heads=2)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.fill_(7.125)
    layer.reset_parameters()
    assert not any(bool((weight == 7.125).any()) for weight in layer.parameters())


def test_sinks_include_learned_tokens() -> None:
    assert Sequential(Sequential(sinks(4), persistent=2), persistent=2).persistent == 2


def test_attributes_of_parts_that_are_missing() -> None:
    """A chain has no part of these names, and a memory under a gate is a part without a recipe."""
    chain = build(Sequential("gla", "softmax_attention"), 16, 2)
    assert not hasattr(chain, "memory") and not hasattr(chain, "first")
    gated = build(MemoryAsGate(Sequential("gla", "gla"), "softmax_attention"), 16, 2)
    assert "memory" in gated.parts and not hasattr(gated, "memory")
    with pytest.raises(AttributeError, match="no attribute 'memory'"):
        _ = gated.memory
    plain = build(MemoryAsGate("gla", "softmax_attention"), 16, 2)
    assert plain.memory is plain.parts["memory"]
