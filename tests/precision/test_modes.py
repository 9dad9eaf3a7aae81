"""The same products in every mode: pieces, padding, packing, threads, checkpoints, graphs."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.contracts import generate, outside
from tests.precision.dispatched import Unrounded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import recollect as rc
from recollect.choices.products import PRECISIONS
from recollect.functional.one_operation import use_custom_op
from recollect.layer.memory_layer import make_call

NAMES = ("gated_delta_net", "gla", "mamba", "rls", "titans", "fox", "delta_former", "dot")
T = 20


Read = Callable[..., Tensor]


def memory(name: str) -> tuple[rc.Recipe, list[Tensor], Callable[..., tuple[Tensor, Any]], Read]:
    """A recipe, tensors that gradients are asked for, its recall by bfloat16, and its read."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=16, num_heads=2)
    with torch.no_grad():
        made = layer.memory_inputs(torch.randn(2, T, 16))
    given = {"q": made.q, "k": made.k, "v": made.v, **made.gates}
    given = {n: x.detach().clone().requires_grad_() for n, x in given.items()}
    params = {n: x.detach().clone() for n, x in made.params.items()}
    init = layer.initial_memory

    def recall(cut: Any = slice(None), **more: Any) -> tuple[Tensor, Any]:
        q, k, v, *gates = (x[cut] for x in given.values())
        named = dict(zip(made.gates, gates, strict=True))
        more = {"initial_memory": None if "state" in more else init, "precision": "bf16", **more}
        return rc.recall(layer.recipe, q, k, v, named, params=params, **more)

    def read(q: Tensor, state: Any, **more: Any) -> Tensor:
        return rc.read(layer.recipe, q, state=state, params=params, **more)

    return layer.recipe, [*given.values()], recall, read


def slopes(y: Tensor, given: list[Tensor]) -> list[Tensor]:
    total = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return list(torch.autograd.grad(total, given, materialize_grads=True, allow_unused=True))


def near(found: Tensor, exact: Tensor, far: float = 2e-2) -> None:
    found, exact = found.detach(), exact.detach()
    assert float((found - exact).norm() / exact.norm()) <= far


def first(tokens: int) -> Any:
    return slice(None), slice(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_padding_and_packing(name: str) -> None:
    """Each is close to the whole, and multiplies nothing of more bits on its way."""
    _, given, recall, _ = memory(name)
    y, _ = recall()
    rows = (slice(0, 1), slice(None))
    with Unrounded() as watch:
        start, state = recall(first(7))
        rest, _ = recall((slice(None), slice(7, T)), state=state)
        mask = torch.arange(T) < torch.tensor([[T], [9]])
        padded, _ = recall(attention_mask=mask)
        packed, _ = recall(rows, cu_seqlens=torch.tensor([0, 9, T]))
        chunked, _ = recall(chunk_size=5)
        slopes(torch.cat([start, rest, padded, chunked], 1), given)
        slopes(packed, given)
    assert watch.products
    assert not watch.found, watch.found
    near(torch.cat([start, rest], 1), y)
    near(chunked, y)
    near(padded[0], y[0])
    near(padded[1, :9], y[1, :9])
    near(packed[:, :9], y[:1, :9])


@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "delta_former", "fox"])
def test_everything_first_then_reading(name: str) -> None:
    _, given, recall, read = memory(name)
    exact, state = recall(causal=False, precision=None)
    with Unrounded() as watch:
        y, state = recall(causal=False)
        again = read(given[0], state, precision="bf16") if name != "fox" else y
        slopes(y + again, given)
    assert watch.products
    assert not watch.found, watch.found
    near(y, exact)
    near(again, exact)


@pytest.mark.parametrize("name", NAMES)
def test_backward_elsewhere(name: str) -> None:
    """In another thread, as autograd has one per device, and once more in a checkpoint."""
    _, given, recall, _ = memory(name)
    plain = slopes(recall()[0], given)
    found: list[Any] = []
    y, _ = recall()

    def backward() -> None:
        with Unrounded() as watch:
            found.extend([slopes(y, given), watch])

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not found[1].found, found[1].found
    again = checkpoint(lambda: recall()[0], use_reentrant=False)
    assert isinstance(again, Tensor)
    with Unrounded() as watch:
        kept = slopes(again, given)
    assert not watch.found, watch.found
    for mine in (found[0], kept):
        assert all(torch.equal(x, y) for x, y in zip(mine, plain, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_autocast_inference_and_no_grad(name: str) -> None:
    """They change no bit of the outputs; autocast none of the gradients either."""
    _, given, recall, _ = memory(name)
    y, _ = recall()
    plain = slopes(y, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = recall()
        cast = slopes(inside, given)
    assert torch.equal(inside, y)
    assert all(torch.equal(x, g) for x, g in zip(cast, plain, strict=True))
    calm = {}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Unrounded() as watch:
            calm[mode], _ = recall()
        assert not watch.found
    near(calm[torch.no_grad], y.detach())
    assert torch.equal(calm[torch.no_grad], calm[torch.inference_mode])


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba", "gla"])
def test_gradients_of_gradients(name: str) -> None:
    _, given, recall, _ = memory(name)

    def bends(precision: str | None, watch: Any) -> list[Tensor]:
        with watch:
            y, _ = recall(precision=precision)
            pulled = torch.autograd.grad(y.square().sum(), given, create_graph=True)
            total = torch.stack([x.square().sum() for x in pulled]).sum()
            return list(torch.autograd.grad(total, given))

    watch = Unrounded()
    found, exact = bends("bf16", watch), bends(None, nullcontext())
    # The second derivative of a triangular solve is torch's own, as the first is.
    assert set(watch.found) <= {"bmm in BmmBackward0"}, watch.found
    assert sum(watch.found.values()) <= 2 < watch.products
    near(torch.cat([x.flatten() for x in found]), torch.cat([x.flatten() for x in exact]), 1e-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "softmax_attention"])
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
def test_compiled_layers(name: str) -> None:
    """One graph, and the same bits; set to another precision it is compiled anew."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(d_model=16, num_heads=2)
    x, found = torch.randn(1, T, 16), {}
    for precision in ("bf16", "float32"):
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
        found[precision] = y.detach()
    assert not torch.allclose(found["bf16"], found["float32"], rtol=1e-5, atol=1e-5)


def test_a_compiled_call_is_of_one_precision() -> None:
    """What a graph keeps a call under says its precision, and no such call is followed."""
    names = set[str]()
    layer = rc.zoo.get("softmax_attention").build(d_model=16, num_heads=2)
    made = layer.memory_inputs(torch.randn(1, 3, 16))
    for precision in (None, *PRECISIONS):
        layer.precision = precision
        call = make_call(layer, made, None)
        names.add(str(call.bound.name))
        assert use_custom_op(call) == (precision is not None)
    assert len(names) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_around_recall() -> None:
    """The graph breaks there, and the products are the same."""
    torch._dynamo.reset()
    _, _, recall, _ = memory("gated_delta_net")
    y = torch.compile(lambda: recall()[0] * 2, backend="eager")()
    assert torch.equal(y, recall()[0] * 2)


def test_a_static_decoder() -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get("titans").build(d_model=16, num_heads=2, precision="bf16")
    x = torch.randn(1, 24, 16)
    with torch.no_grad():
        _, state = layer(x[:, :4])
        decoder = rc.StaticDecoder(layer, state)
        for t in range(4, 24):
            y, state = layer(x[:, t : t + 1], state)
            assert torch.equal(decoder(x[:, t : t + 1]), y)


def test_layers_carry_it_along() -> None:
    layer = rc.zoo.get("gated_delta_net").build(d_model=16, num_heads=2, precision="bf16")
    assert "precision='bf16'" in repr(layer)
    x = torch.randn(1, T, 16)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert made.precision == "bf16"
        assert torch.equal(made(x)[0], layer(x)[0])
    low = layer(x)[0]
    layer.precision = None
    assert "precision" not in repr(layer)
    assert not torch.equal(layer(x)[0], low)
    with pytest.raises(ValueError, match="precision must be"):
        layer.precision = "half"
    assert layer.precision is None


class Curved(torch.nn.Module):
    """Somebody's own memory."""

    def __init__(self, F: int, V: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(F, 6), torch.nn.Linear(6, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


rc.memory.module_factory("precision_curved")(Curved)


def test_a_module_as_a_memory() -> None:
    """It runs in the reference alone, which keeps all bits and says so."""
    memory = rc.memory.Module(factory="precision_curved")
    recipe = rc.Recipe(memory=memory, algorithm=rc.algorithm.GradientDescent(lr=0.1, batch_size=4))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 10, 2, 4)
    init = [torch.randn(2, *shape) * 0.5 for shape in memory.shapes(4, 4)]
    exact, _ = rc.recall(recipe, q, k, v, initial_memory=init)
    assert torch.equal(rc.recall(recipe, q, k, v, initial_memory=init, precision="bf16")[0], exact)
    said = "products of float32, not bf16: the reference is what others are compared with"
    assert said in str(rc.explain(recipe, precision="bf16"))


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_drawn_recipes(count: int) -> None:
    """Combinations of all members, those of other packages among them."""
    assert outside  # registers its members, which are drawn too
    ran = 0
    for index, recipe in generate.valid(count, seed=11):
        engine = rc.select_engine(recipe).engine
        if engine.needs_digits(recipe) is not None:
            continue
        x = generate.small_inputs(recipe, index, longest=5)
        x = x.map(lambda t: t.float() if t.is_floating_point() else t).leaves()
        with Unrounded() as watch:
            y, _ = generate.run(recipe, x, precision="bf16")
            y.square().sum().backward()
        assert not watch.found, (recipe, watch.found)
        ran += watch.products > 0
    assert ran > count / 4
