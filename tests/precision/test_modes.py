"""The requested precision in every mode: pieces, packing, threads, checkpoints, graphs."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tests.contracts import generate
from tests.precision.setting import Watch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import recollect as rc
from recollect.choices.matmul_precision import PRECISIONS, matmul_precision
from recollect.engines.kernel import pieces
from recollect.functional.one_operation import use_custom_op
from recollect.layer.feed_forward import FeedForward
from recollect.layer.recipe_module import make_call

LAYERS = [name for name in rc.zoo.names() if rc.zoo.get(name).options.persistent == 0]
NAMES = ("gated_delta_net", "gla", "mamba", "rls", "titans", "atlas", "fox", "delta_former", "dot")
ELEMENTWISE = ("lru", "rg_lru", "mamba")
FUSED = ("softmax_attention", "qk_norm_attention", "sliding_window_attention", "fox")
NO_PRODUCTS = (*ELEMENTWISE, *FUSED, "memory_mosaics")  # of matrices, that the setting decides
CHOOSE = ("fox", "atlas")  # between two algorithms, by the precision
T = 20


@pytest.fixture(autouse=True)
def reduced() -> Iterator[None]:
    """A CPU may use bfloat16 for products of float32 unless float32 is requested."""
    backends: Any = torch.backends
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    for place in (backends.cuda.matmul, backends.mkldnn.matmul):
        place.fp32_precision = "none"


def memory(name: str) -> tuple[list[Tensor], Callable[..., tuple[Tensor, Any]], Any]:
    """Return tensors with gradients, the recall of a preset in float32, and its read."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=16, num_heads=2)
    assert isinstance(layer, rc.MemoryLayer)
    with torch.no_grad():
        result = layer.memory_inputs(torch.randn(2, T, 16))
    leaves = {"q": result.q, "k": result.k, "v": result.v, **result.gates}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    params = {n: x.detach().clone() for n, x in result.params.items()}
    init = layer.initial_memory

    def recall(cut: Any = slice(None), **more: Any) -> tuple[Tensor, Any]:
        q, k, v, *gates = (x[cut] for x in leaves.values())
        named = dict(zip(result.gates, gates, strict=True))
        start = None if "state" in more else init
        more = {"initial_memory": start, "precision": "float32", **more}
        return rc.recall(layer.recipe, q, k, v, named, params=params, **more)

    def read(q: Tensor, state: Any, **more: Any) -> Tensor:
        return rc.read(layer.recipe, q, state=state, params=params, **more)

    return [*leaves.values()], recall, read


def gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    total = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return list(torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True))


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_written_out_backward_passes(name: str) -> None:
    """In one call and in parts, padded and packed."""
    leaves, recall, read = memory(name)
    with Watch() as watch:
        y, state = recall()
        start, middle = recall((slice(None), slice(7)))
        rest, _ = recall((slice(None), slice(7, T)), state=middle)
        padded, _ = recall(attention_mask=torch.arange(T) < torch.tensor([[T], [9]]))
        packed, _ = recall((slice(0, 1), slice(None)), cu_seqlens=torch.tensor([0, 9, T]))
        gradients(torch.cat([y, start, rest, padded], 1), leaves)
        gradients(packed, leaves)
        read(leaves[0].detach(), state, precision="float32")
    assert watch.forward <= {"ieee"}
    assert watch.written_out <= {"ieee"}
    assert watch.forward or name in NO_PRODUCTS
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
    with Watch() as watch:
        recall(precision=None)
    assert watch.forward <= {"bf16"}


@pytest.mark.parametrize("name", LAYERS)
def test_presets(name: str) -> None:
    leaves, recall, _ = memory(name)
    with Watch() as watch:
        gradients(recall()[0], leaves)
    assert watch.forward <= {"ieee"}
    assert watch.written_out <= {"ieee"}
    assert watch.forward or name in NO_PRODUCTS


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_drawn_recipes(count: int) -> None:
    """Combinations of all members, with members of other packages."""
    num_with_products = 0
    for index, recipe in generate.valid(count, seed=11):
        x = generate.small_inputs(recipe, index, longest=5)
        x = x.map_tensors(lambda t: t.float() if t.is_floating_point() else t).with_grad()
        with Watch() as watch:
            y, _ = generate.run_recall(recipe, x, precision="float32")
            y.square().sum().backward()
        assert watch.forward <= {"ieee"}, recipe
        assert watch.written_out <= {"ieee"}, recipe
        num_with_products += bool(watch.forward)
    assert num_with_products > count / 4


def test_gradients_that_autograd_derives_follow_the_setting() -> None:
    """These gradients do not restore the precision of the forward pass."""
    leaves, recall, _ = memory("titans")
    for name, value in (("medium", "bf16"), ("highest", "ieee")):
        y, _ = recall()
        torch.set_float32_matmul_precision(name)
        with Watch() as watch:
            gradients(y, leaves)
        assert watch.settings["BmmBackward0"] == {value}
        assert watch.written_out == {"ieee"}


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "delta_former"])
def test_read_after_all_tokens_in_every_precision(name: str) -> None:
    leaves, recall, read = memory(name)
    with Watch() as watch:
        y, state = recall(causal=False)
        y_read = read(leaves[0], state, precision="float32")
        gradients(y + y_read, leaves)
    assert watch.forward == {"ieee"}
    assert watch.written_out <= {"ieee"}


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "delta_former"])
def test_backward_elsewhere(name: str) -> None:
    """In another thread, like autograd's thread per device, and in a checkpoint."""
    leaves, recall, _ = memory(name)
    y, _ = recall()
    watches: list[Watch] = []

    def backward() -> None:
        with Watch() as watch:
            gradients(y, leaves)
        watches.append(watch)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    checkpointed = checkpoint(lambda: recall()[0], use_reentrant=False)
    assert isinstance(checkpointed, Tensor)
    with Watch() as watch:
        gradients(checkpointed, leaves)
    for one in (*watches, watch):
        assert one.written_out == {"ieee"}


def test_recomputed_pieces_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    def recorded(precision: str, device_type: str) -> AbstractContextManager[None]:
        entered.append(precision)
        return matmul_precision(precision, device_type)

    leaves, recall, _ = memory("bilinear_gated_attention")
    first, _ = recall()
    monkeypatch.setattr(pieces, "matmul_precision", recorded)
    second, _ = recall()
    gradients(first + second, leaves)
    assert set(entered) == {"float32"}


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_gives_the_same_bits(name: str) -> None:
    """In float32 and TF32, and the same outputs under autocast."""
    leaves, recall, _ = memory(name)
    torch.set_float32_matmul_precision("highest")
    y, _ = recall(precision=None)
    plain = gradients(y, leaves)
    for precision in PRECISIONS if name not in CHOOSE else ("float32",):
        result, _ = recall(precision=precision)
        assert torch.equal(result, y)
        for a, b in zip(gradients(result, leaves), plain, strict=True):
            assert torch.equal(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(recall()[0], recall(precision=None)[0])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(recall()[0], recall(precision=None)[0])


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba", "gla"])
def test_gradients_of_gradients(name: str) -> None:
    leaves, recall, _ = memory(name)
    torch.set_float32_matmul_precision("highest")

    def second_gradients(precision: str | None) -> list[Tensor]:
        y, _ = recall(precision=precision)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        total = torch.stack([x.square().sum() for x in first]).sum()
        return list(torch.autograd.grad(total, leaves))

    for a, b in zip(second_gradients("float32"), second_gradients(None), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "softmax_attention"])
@pytest.mark.filterwarnings("ignore")  # the compiler warns
def test_compiled_layers(name: str) -> None:
    """One graph, and the numbers of the layer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=16, num_heads=2)
    x = torch.randn(1, T, 16)
    for precision in PRECISIONS:
        layer.precision = precision
        call = torch.compile(layer, backend="aot_eager", fullgraph=True)
        inside = x.clone().requires_grad_()
        y, state = call(inside)
        y.square().sum().backward()
        outside = x.clone().requires_grad_()
        exact, _ = layer(outside)
        exact.square().sum().backward()
        torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(inside.grad, outside.grad, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            token, _ = call(x[:, :1], state)
            torch.testing.assert_close(token, layer(x[:, :1], state)[0], rtol=1e-5, atol=1e-5)


def test_a_compiled_call_is_of_one_precision() -> None:
    """The name of a call in a graph depends on its precision, and no such call is traced."""
    names = set[str]()
    layer = rc.zoo.get("softmax_attention").build(d_model=16, num_heads=2)
    assert isinstance(layer, rc.MemoryLayer)
    result = layer.memory_inputs(torch.randn(1, 3, 16))
    for precision in (None, *PRECISIONS):
        layer.precision = precision
        call = make_call(layer, result, None)
        names.add(str(call.bound.name))
        assert use_custom_op(call) == (precision is not None)
    assert len(names) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_around_recall() -> None:
    """The graph breaks there, and the products are the same."""
    torch._dynamo.reset()
    _, recall, _ = memory("gated_delta_net")
    y = torch.compile(lambda: recall()[0] * 2, backend="eager")()
    assert torch.equal(y, recall()[0] * 2)


def test_a_static_decoder() -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get("titans").build(d_model=16, num_heads=2, precision="float32")
    x = torch.randn(1, 24, 16)
    with torch.no_grad():
        _, state = layer(x[:, :4])
        decoder = rc.StaticDecoder(layer, state)
        for t in range(4, 24):
            y, state = layer(x[:, t : t + 1], state)
            with Watch() as watch:
                assert torch.equal(decoder(x[:, t : t + 1]), y)
            assert watch.forward == {"bf16", "ieee"}  # projections and the memory


def test_layers_carry_it_along() -> None:
    layer = rc.zoo.get("gated_delta_net").build(d_model=16, num_heads=2, precision="tf32")
    assert "precision='tf32'" in repr(layer)
    for result in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert result.precision == "tf32"
    layer.precision = None
    assert "precision" not in repr(layer)
    with pytest.raises(ValueError, match="precision must be"):
        layer.precision = "half"
    with pytest.raises(ValueError, match="use autocast or a bfloat16 model"):
        layer.precision = "bf16"
    assert layer.precision is None


def test_a_memory_that_is_only_read() -> None:
    layer = rc.zoo.get("ffn_relu").build(d_model=16, num_heads=2)
    assert isinstance(layer, FeedForward)
    layer.out = None  # a projection, and no product of the memory
    layer.precision = "float32"
    with Watch() as watch, torch.no_grad():
        layer(torch.randn(1, T, 16))
    assert watch.forward == {"ieee"}


class Curved(torch.nn.Module):
    """A memory of a user."""

    def __init__(self, F: int, V: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(F, 6), torch.nn.Linear(6, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


rc.memory.module_factory("precision_curved")(Curved)


def test_a_module_as_a_memory() -> None:
    """It runs in the reference only, which keeps all bits."""
    memory = rc.memory.Module(factory="precision_curved")
    recipe = rc.Recipe(memory=memory, algorithm=rc.algorithm.GradientDescent(lr=0.1, batch_size=4))
    q, k, v = torch.randn(3, 1, 10, 2, 4)
    init = [torch.randn(2, *shape) * 0.5 for shape in memory.shapes(4, 4)]
    with Watch() as watch:
        rc.recall(recipe, q, k, v, initial_memory=init, precision="tf32")
    assert watch.forward == {"ieee"}
    message = "products of float32, not tf32: all other engines are compared with the reference"
    assert message in str(rc.explain(recipe, precision="tf32"))
