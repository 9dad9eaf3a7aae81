"""Overhead of a call: Python calls into the package, and files on its path.

Python calls limit the decoding of single tokens, and a reader who follows a call opens these files.
Everything that depends on the recipe and the sizes alone is derived when a layer is built
(`recollect.recipe.bound`).
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import recollect as rc
from recollect.functional import binding, one_operation
from recollect.functional.binding import bind
from recollect.zoo.preset import decay_from

PACKAGE = str(Path(rc.__file__).parent)


def _calls(run: Callable[[], object]) -> tuple[int, set[str]]:
    """Return the number of Python functions of the package that ``run`` enters, and their files."""
    count, files = 0, set[str]()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            count += 1
            files.add(name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count, files


@pytest.mark.parametrize("name", ["gated_delta_net", "softmax_attention"])
@torch.no_grad()
def test_one_decoded_token_makes_few_calls(name: str) -> None:
    layer = rc.zoo.get(name).build(d_model=32, num_heads=2)
    _, state = layer(torch.randn(1, 5, 32))
    token = torch.randn(1, 1, 32)
    _, state = layer(token, state)
    count, _ = _calls(lambda: layer(token, state))
    assert 20 < count <= 58  # four of them check that the state belongs to the layer


@torch.no_grad()
def test_a_gated_delta_net_layer_passes_through_few_files() -> None:
    layer = rc.zoo.get("gated_delta_net").build(d_model=32, num_heads=2)
    x = torch.randn(1, 64, 32)
    layer(x)
    _, files = _calls(lambda: layer(x))
    assert 10 < len(files) <= 16, sorted(files)


@pytest.mark.parametrize(("normalize", "maximum"), [(False, 30), (True, 33)])
def test_a_titans_layer_goes_through_few_files(normalize: bool, maximum: int) -> None:
    """The norm after the maps takes six files, and measured steps and keys take three more."""
    preset = rc.zoo.get("titans")
    options = (
        preset.options
        if normalize
        else rc.LayerOptions(gate_options={"log_decay": decay_from(0.999)})
    )
    limit = "measured" if normalize else "worst_case"
    step = rc.algorithm.Momentum(batch_size=16, normalized_steps=normalize, batch_overlap=limit)
    recipe = preset.recipe.replace(algorithm=step)
    assert normalize == (recipe == preset.recipe)
    layer = rc.MemoryLayer(32, 2, recipe, options)
    x = torch.randn(1, 40, 32)
    _, files = _calls(lambda: layer(x))
    assert 10 < len(files) <= maximum, sorted(files)


def test_binding_is_built_once_and_copied_by_its_arguments() -> None:
    recipe = rc.zoo.get("titans").recipe
    bound = bind(recipe, H=2, K=8, V=8)
    repeated = rc.Recipe.from_json(recipe.to_json())
    assert bind(repeated, H=2, K=8, V=8) is bound
    assert bind(recipe, H=3, K=8, V=8) is not bound
    assert bind(recipe, H=2, K=8, V=8, engine="reference").engine.name == "reference"
    assert copy.deepcopy(bound) is bound
    assert pickle.loads(pickle.dumps(bound)) is bound
    layer = rc.zoo.get("titans").build(d_model=32, num_heads=2)
    x = torch.randn(1, 5, 32)
    assert torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0])


def test_registries_drop_the_entries_of_deleted_layers() -> None:
    """Layers that are built, compiled and deleted leave no names and no state layouts."""
    gc.collect()
    names, layouts = len(binding._by_name), len(one_operation._state_layouts)
    x = torch.randn(1, 3, 8)
    for number in (1, 2):
        layer = rc.MemoryLayer(8, 2, rc.Recipe(bias=rc.bias.Huber(threshold=0.1 * number)))
        with torch.no_grad():
            torch.compile(layer, backend="eager")(x)
        assert len(binding._by_name) == names + 1
        assert len(one_operation._state_layouts) == layouts + 1
        del layer
        torch.compiler.reset()
        gc.collect()
    assert (len(binding._by_name), len(one_operation._state_layouts)) == (names, layouts)
