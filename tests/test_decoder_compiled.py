"""`rc.StaticDecoder` with a compiler: the layer's tokens, and errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.test_decoder import decodes_a_language_model, deep, recorded
from torch import Tensor, nn

import recollect as rc
from recollect.choices.runtime import (
    can_read_values,
    fake_shapes_mode,
    has_data,
    is_cacheable,
    tracing_mode,
)
from recollect.decoder import static

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

B, D = 2, 16
TITANS = rc.zoo.get("titans").recipe
SHORT = replace(TITANS, algorithm=replace(TITANS.algorithm, batch_size=4))
QUICK = ("gated_delta_net", "rls", "sliding_window_attention")
GROWS = {"mesa_net", "gated_kalmanet"} | {
    name
    for name in rc.zoo.names()
    if (recipe := rc.zoo.get(name).recipe).buffer_size is None or recipe.uses_kernel_rows
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run traced operations without a compiler."""

    monkeypatch.setattr("torch._inductor.compile", lambda graph, *_: graph)


def check_decoder(layer: nn.Module, *, tolerance: float = 1e-6, more: int = 3) -> None:
    """Compare tokens and states of the decoder with the layer's, over all positions plus one."""
    layer.eval()
    with torch.no_grad():
        _, state = layer(torch.randn(B, 3, D))
        decoder = rc.StaticDecoder(layer, state, compile=True)
        for _ in range(decoder.warmup_tokens + 2 * decoder.period + more):
            x = torch.randn(B, 1, D)
            y, state = layer(x, state)
            torch.testing.assert_close(decoder(x), y, rtol=tolerance, atol=tolerance)
        assert decoder.num_recorded == decoder.period
        later = decoder.state
        x = torch.randn(B, 7, D)
        torch.testing.assert_close(
            layer(x, later)[0], layer(x, state)[0], rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in rc.zoo.names()
            if name not in {*QUICK, *GROWS} and not name.startswith("ffn_")
        ),
    ],
)
@pytest.mark.usefixtures("traced")
def test_tokens_of_the_layer(name: str) -> None:
    torch.manual_seed(0)
    check_decoder(rc.zoo.get(name).build(d_model=D, num_heads=2))


@pytest.mark.parametrize(
    "name", ["titans", *(pytest.param(x, marks=pytest.mark.slow) for x in ("yaad", "omega_net"))]
)
@pytest.mark.usefixtures("traced")
def test_inner_batches(name: str) -> None:
    """Chains, the replay of an open batch, and windows that include the last batch."""
    torch.manual_seed(0)
    preset = rc.zoo.get(name)
    algorithm = replace(preset.recipe.algorithm, batch_size=3)
    check_decoder(rc.MemoryLayer(D, 2, replace(preset.recipe, algorithm=algorithm), preset.options))


@pytest.mark.slow  # `test_decoder` decodes compositions without a compiler
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("segment", [4, 6])
def test_compositions(segment: int) -> None:
    torch.manual_seed(0)
    mixed = rc.blocks.Sequential("gated_delta_net", SHORT)
    check_decoder(rc.blocks.build(mixed, D, 2))
    mac = rc.blocks.MemoryAsContext(SHORT, "softmax_attention", segment=segment, persistent=2)
    check_decoder(rc.blocks.build(mac, D, 2), tolerance=1e-5)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


MODES = [
    (nullcontext, torch.float64, None),
    (nullcontext, torch.bfloat16, None),
    (nullcontext, torch.float32, "tf32"),
    (torch.inference_mode, torch.float32, None),
    (autocast, torch.float32, None),
]


# Fast are all modes of the linear engine, and of the deep engine the mode with most casts.
@pytest.mark.parametrize(
    ("recipe", "mode", "dtype", "precision"),
    [
        *((rc.zoo.get("gated_delta_net").recipe, *mode) for mode in MODES),
        *(pytest.param(SHORT, *mode, marks=pytest.mark.slow) for mode in MODES[:-1]),
        (SHORT, *MODES[-1]),
    ],
)
@pytest.mark.usefixtures("traced")
def test_modes(
    mode: Callable[[], AbstractContextManager[object]],
    dtype: torch.dtype,
    precision: str | None,
    recipe: rc.Recipe,
) -> None:
    """To the last bit: casts are those of the mode, each made once."""
    torch.manual_seed(0)
    layer = rc.MemoryLayer(D, 2, recipe, precision=precision).to(dtype).eval()
    with mode(), torch.no_grad():
        _, state = layer(torch.randn(B, 3, D, dtype=dtype))
        decoder = rc.StaticDecoder(layer, state, compile=True)
        for _ in range(decoder.warmup_tokens + 2 * decoder.period + 3):
            x = torch.randn(B, 1, D, dtype=dtype)
            y, state = layer(x, state)
            result = decoder(x)
            assert result.dtype == y.dtype
            torch.testing.assert_close(result, y, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("traced")
def test_a_program_in_fixed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU records the program."""
    torch.manual_seed(0)
    runs: list[Callable[[], object]] = []

    def record(run: Callable[[], Any]) -> Any:
        runs.append(run)
        return recorded(run)

    monkeypatch.setattr(static, "graph_recorder", lambda _: record)
    check_decoder(rc.MemoryLayer(D, 2, deep()))
    assert len(runs) == 4


@pytest.mark.usefixtures("traced")
def test_a_language_model() -> None:
    decodes_a_language_model(compile=True)


@pytest.mark.usefixtures("traced")
def test_weights_that_change_in_place_are_read_again() -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get("gated_delta_net").build(d_model=D, num_heads=2).eval()
    with torch.no_grad():
        _, state = layer(torch.randn(B, 3, D))
        decoder = rc.StaticDecoder(layer, state, compile=True)
        for _ in range(3):
            for p in layer.parameters():
                p.mul_(1.1)
            x = torch.randn(B, 1, D)
            y, state = layer(x, state)
            torch.testing.assert_close(decoder(x), y)
        assert decoder.num_recorded == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_net", "titans"])
def test_compiled_for_this_machine(name: str) -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=D, num_heads=2)
    if name == "titans":
        layer = rc.MemoryLayer(D, 2, SHORT, rc.zoo.get("titans").options)
    check_decoder(layer, tolerance=1e-5)


@pytest.mark.usefixtures("traced")
def test_module_that_reads_a_value_is_refused() -> None:
    """Otherwise the program would contain the result of one token."""

    class ReadsValue(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    x = torch.randn(1, 1, 8)
    mesa = rc.zoo.get("mesa_net").build(d_model=8, num_heads=2)
    looking = rc.zoo.get("gla").build(d_model=8, num_heads=2)
    looking.out = nn.Sequential(looking.out, ReadsValue())
    for layer in (mesa, looking):
        layer.eval()
        decoder = rc.StaticDecoder(layer, layer(x)[1], compile=True)
        decoder(x)
        with pytest.raises(
            ValueError, match="MemoryLayer cannot be compiled: its step depends on a value"
        ):
            decoder(x)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def compiles(*_: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.compile", compiles)
    layer, x = rc.zoo.get("gla").build(d_model=8, num_heads=2).eval(), torch.randn(1, 1, 8)
    decoder = rc.StaticDecoder(layer, layer(x)[1], compile=True)
    decoder(x)
    with pytest.raises(ValueError, match=r"cannot be compiled: no working C\+\+ compiler"):
        decoder(x)


def test_recorded_program_checks_no_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones(2)
    with FakeTensorMode():
        fake = torch.ones(2)
    assert can_read_values(real)
    assert not has_data(fake)
    with tracing_mode():
        assert not can_read_values(real)
        assert has_data(fake), "numbers will be there"
        assert not is_cacheable(fake), "and the fake tensor will not"
    assert can_read_values(real)


def test_tracing_in_one_thread_does_not_affect_another() -> None:
    """A thread that traces must not switch off value checks of other threads."""
    x, meta = torch.ones(2), torch.ones(2, device="meta")
    with ThreadPoolExecutor(1) as other:
        with tracing_mode(), fake_shapes_mode():
            assert has_data(meta)
            assert not can_read_values(x)
            assert other.submit(can_read_values, x).result()
            assert not other.submit(has_data, meta).result()
        assert not has_data(meta)
