"""The fused walk on the device that it is for, against the definition in float64 on the CPU.

The cases and bounds are those of the simulator (`test_fused_walk`, `test_fused_back`): what is
asked here is whether the device does what the simulator says, and whether a walk comes out alike
each time it is run. ``make test-gpu`` runs these; ``make gpu`` runs the same kernels under
compute-sanitizer (`tests.gpu.sanitizer`). Decoded tokens are held to the bounds of
`test_fused_decode`, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu import test_fused_back as back
from tests.gpu import test_fused_decode as one_by_one
from tests.gpu import test_fused_walk as forth
from tests.gpu.parity import MISSING

import recollect as rc
from recollect.engines.deep.fused import launch, walk

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY is None, reason=MISSING),
    pytest.mark.skipif(
        CAPABILITY not in (None, (9, 0)),
        reason=f"cases of the fused walk are for compute capability 9.0, not {CAPABILITY}",
    ),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    names: list[str] = []

    def noting(name: str, *rest: Any) -> None:
        names.append(name)
        launch.launch(name, *rest)

    monkeypatch.setitem(walk.LAUNCHERS, "cuda", noting)
    return names


def there(x: Any) -> Any:
    """The same arguments on the device."""
    if isinstance(x, dict):
        return {name: there(part) for name, part in x.items()}
    return [there(part) for part in x] if isinstance(x, list) else x.cuda()


@pytest.mark.parametrize("case", [*forth.CASES, *forth.SLOW])
def test_outputs_are_the_definitions(
    case: str, launched: list[str], record_property: Callable[[str, object], None]
) -> None:
    recipe, T = (forth.CASES | forth.SLOW)[case][:2]
    x = forth.drawn(recipe, T)
    y, state = forth.walked(recipe, there(x))
    assert launched == ["walk"]
    again, _ = forth.walked(recipe, there(x))
    assert torch.equal(again, y), "the same walk gives other numbers"
    found = y.cpu(), state.map(torch.Tensor.cpu)
    worst = forth.worst(recipe, x, found, forth.told(recipe, x))
    record_property("worst", worst)
    assert worst < forth.NEAR


@pytest.mark.parametrize("case", [*back.CASES, *back.SLOW])
def test_gradients_are_the_definitions(
    case: str, launched: list[str], record_property: Callable[[str, object], None]
) -> None:
    recipe, T, D = (back.CASES | back.SLOW)[case]
    x = forth.drawn(recipe, T, D=D)
    said = back.gradients(recipe, x, "reference", torch.float64)
    found = back.gradients(recipe, there(x), "fused", torch.float32)
    assert launched == ["trace", "back"]
    errors = {name: back.far(found[name].cpu(), g) for name, g in said.items()}
    record_property("worst", max(errors.values()))
    assert all(error < back.NEAR for error in errors.values()), errors


@pytest.mark.parametrize("case", [*one_by_one.CASES, *one_by_one.SLOW])
def test_tokens_are_the_definitions(
    case: str, launched: list[str], record_property: Callable[[str, object], None]
) -> None:
    recipe, T, D = (one_by_one.CASES | one_by_one.SLOW)[case]
    x = forth.drawn(recipe, T, H=2, D=D)
    y, state = one_by_one.decoded(recipe, there(x))
    assert launched == ["token"] * T
    again, _ = one_by_one.decoded(recipe, there(x))
    assert torch.equal(again, y), "the same tokens give other numbers"
    found = y.cpu(), state.map(torch.Tensor.cpu)
    worst = forth.worst(recipe, x, found, forth.told(recipe, x))
    record_property("worst", worst)
    assert worst < one_by_one.NEAR


def test_tokens_of_replayed_graphs(launched: list[str]) -> None:
    """A layer's tokens after a prompt by the walk, recorded as CUDA graphs."""
    torch.manual_seed(0)
    layer = rc.MemoryLayer(256, 4, forth.by_keys(), engine="fused").cuda().eval()
    x = torch.randn(3, 120, 256, device="cuda")
    with torch.no_grad():
        _, state = layer(x[:, :37])
        decoder = rc.StaticDecoder(layer, state)
        for t in range(37, 120):
            said, state = layer(x[:, t : t + 1], state)
            torch.testing.assert_close(decoder(x[:, t : t + 1]), said, rtol=1e-5, atol=1e-6)
    assert decoder.num_recorded == decoder.period == 16
    assert launched[0] == "walk" and set(launched[1:]) == {"token"}


def test_many_memories_at_once(launched: list[str]) -> None:
    """More clusters than a device holds at a time, each its own memory; rows do not mix."""
    recipe = forth.by_keys()
    x = there(forth.drawn(recipe, 64, B=16, H=16))
    y, _ = forth.walked(recipe, x)
    one = {name: part[5:6] for name, part in x.items() if isinstance(part, torch.Tensor)}
    gates = {name: gate[5:6] for name, gate in x["gates"].items()}
    init = [w[5:6] for w in x["initial_memory"]]
    alone, _ = forth.walked(recipe, {**one, "gates": gates, "initial_memory": init})
    assert launched == ["walk"] * 2
    assert back.far(alone.cpu(), y[5:6].cpu().double()) < forth.NEAR
