"""The page about tasks names all of them, and its calls run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import recollect as rc
from recollect import tasks

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
CALLS = {
    "cues": lambda g: tasks.cues(tasks.CueConfig(pairs=4, length=8), 2, g),
    "swap_stream": lambda g: tasks.swap_stream(6, 8, 3, g),
    "mad": lambda g: tasks.mad(tasks.mad_settings("compression")[0].config, 2, g),
    "draw_mapping": lambda g: tasks.draw_mapping(
        tasks.MappingConfig(name="mlp", size=32, length=3), 2, g
    ),
    "mqar": lambda g: tasks.mqar(tasks.MqarConfig(vocab=64, pairs=8, length=64), 2, g),
    "needles": lambda g: tasks.needles(tasks.NeedleConfig(), (), 2, g),
    "reachability": lambda g: tasks.reachability(tasks.ReachConfig(), 2, g),
    "story_bytes": lambda g: tasks.story_bytes(tasks.StoryConfig(task=2), ("A.", "B."), 2, g),
    "swap_batch": lambda g: tasks.swap_batch(tasks.SwapConfig(), 2, g),
    "switching": lambda g: tasks.switching(tasks.SwitchingConfig(), 2, g),
    "word_batch": lambda g: tasks.word_batch(tasks.word_config("S5"), 2, g),
}


def tensors(value: object) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple) else vars(value).values()
    return [x for x in parts if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_tasks_depend_on_configuration_and_generator_only(name: str) -> None:
    """A seed determines the numbers, for any global generator; another seed gives others."""
    one, two, other = [], [], []
    for results, seed in ((one, 5), (two, 5), (other, 6)):
        torch.manual_seed(len(results) + seed * 31)
        initial = torch.get_rng_state()
        results += tensors(CALLS[name](torch.Generator().manual_seed(seed)))
        assert torch.equal(torch.get_rng_state(), initial), "the global generator is left alone"
        torch.rand(3)
    assert one
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_page_names_every_task() -> None:
    called = set(re.findall(r"`(\w+)\(", PAGE))
    assert called >= {*CALLS, "load_text"}
    for name in called:
        assert hasattr(rc.tasks, name) or name == "welch", name
