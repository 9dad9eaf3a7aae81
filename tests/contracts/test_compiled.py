"""A compiled layer is one graph and computes the outputs of the eager layer."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect as rc
from recollect.functional.binding import bind, bound_of, named
from recollect.testing.inputs import inputs

# The compiler warns, and the first graph of a process takes seconds.
pytestmark = pytest.mark.filterwarnings("ignore")

# One preset per engine. A compiled graph of a deep memory takes seconds: fast tests of masks,
# shapes and training compile the linear engine, those of states and gradients the deep engine.
QUICK = ("gated_delta_net", "titans", "softmax_attention")
B, T, D = 2, 20, 32


@pytest.fixture(autouse=True)
def reset_compiler() -> None:
    torch._dynamo.reset()


def cases(*quick: str, slow: Iterable[str]) -> list[Any]:
    return [*quick, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def all_presets(*quick: str) -> list[Any]:
    return cases(*quick, slow=[name for name in rc.zoo.names() if name not in quick])


def build(name: str, heads: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return rc.zoo.get(name).build(d_model=D, num_heads=heads)


def compiled(module: nn.Module, *, fullgraph: bool = True) -> Callable[..., Any]:
    return torch.compile(module, backend="aot_eager", fullgraph=fullgraph)


def run(call: Callable[..., Any], layer: nn.Module, x: Tensor, **more: Any) -> list[Tensor]:
    """Return outputs, and gradients of the input and of every parameter that has one."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y, _ = call(x, output_final_state=False, **more)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def tensors(state: rc.LayerState) -> list[Tensor]:
    """Return the tensors of a state without its cache, which compiled graphs leave out."""
    return replace(state.memory, cache={}).tensors()


def check(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        scale = 1 + float(b.double().abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", all_presets(*QUICK))
def test_one_graph_and_its_gradients(name: str) -> None:
    layer, x = build(name), torch.randn(B, T, D)
    check(run(compiled(layer), layer, x), run(layer, layer, x))


@pytest.mark.parametrize("name", all_presets("titans"))
def test_states_go_in_and_come_out(name: str) -> None:
    layer, x = build(name), torch.randn(B, T, D)
    if name in ("performer", "rfa"):
        layer.eval()
    if name == "local_quadratic_attention":
        layer, x = layer.double(), x.double()  # float32 is 7e-4 off for a first token
    with torch.no_grad():
        expected, end = layer(x)
        call = compiled(layer)
        first, state = call(x[:, :11])
        second, later = call(x[:, 11:], state)
        third, last = layer(x[:, 11:], state)  # in the other mode
    check([torch.cat([first, second], 1), third], [expected, expected[:, 11:]])
    check(tensors(later), tensors(last))
    assert later.memory.recipe_id == end.memory.recipe_id


@pytest.mark.parametrize("name", cases("titans", slow=("gated_delta_net", "mamba2", "rwkv7")))
def test_block_has_no_graph_breaks(name: str) -> None:
    config = rc.lm.RecollectConfig.from_recipes(
        name, hidden_size=D, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    block = rc.lm.RecollectForCausalLM(config).model.blocks[0]
    report = torch._dynamo.explain(block)(torch.randn(B, T, D))
    assert report.graph_break_count == 0, [str(reason.reason) for reason in report.break_reasons]


@pytest.mark.parametrize("name", cases("gated_delta_net", slow=("titans",)))
def test_compiled_model_trains_as_the_eager_model(name: str) -> None:
    """Three steps of a compiled model with two layers of one recipe equal those of the eager model.

    In float64, because three steps multiply a rounding error of float32 by more than a hundred.
    """

    def trained(how: Callable[[nn.Module], Callable[..., Any]]) -> list[Tensor]:
        torch.manual_seed(0)
        config = rc.lm.RecollectConfig.from_recipes(
            name, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, vocab_size=16
        )
        model = rc.lm.RecollectForCausalLM(config).train().double()
        call, ids = how(model), torch.randint(16, (B, T))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            call(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    check(trained(lambda model: compiled(model, fullgraph=False)), trained(lambda model: model))


@pytest.mark.parametrize("name", all_presets("gated_delta_net"))
def test_padding_and_documents(name: str) -> None:
    layer, x = build(name), torch.randn(B, T, D)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :3], mask[1, 15:] = False, False
    call = compiled(layer, fullgraph=False)
    check(run(call, layer, x, attention_mask=mask), run(layer, layer, x, attention_mask=mask))
    with torch.no_grad():
        (y, state), (expected, plain) = call(x, attention_mask=mask), layer(x, attention_mask=mask)
        check([y, *tensors(state)], [expected, *tensors(plain)])
        more = torch.randn(B, 3, D)
        check([call(more, state)[0]], [layer(more, plain)[0]])
    row, borders = torch.randn(1, T, D), torch.tensor([0, 7, 7, T])
    packed = {"cu_seqlens": borders}
    check(run(call, layer, row, **packed), run(layer, layer, row, **packed))
    with torch.no_grad():
        check(tensors(call(row, **packed)[1]), tensors(layer(row, **packed)[1]))


@pytest.mark.parametrize("name", cases("gated_delta_net", slow=("titans",)))
def test_shapes_of_another_batch(name: str) -> None:
    layer = build(name)
    call = compiled(layer)
    for b, t in ((2, 9), (3, 20), (1, 1)):  # one inner batch, two inner batches, and one token
        x = torch.randn(b, t, D)
        with torch.no_grad():
            check([call(x)[0]], [layer(x)[0]])


@pytest.mark.parametrize("name", cases("ttt_mlp", slow=("gated_delta_net", "titans")))
def test_modes(name: str) -> None:
    """Inference mode and autocast, also for engines that take inner gradients by autograd."""
    layer, x = build(name), torch.randn(B, T, D)
    call = compiled(layer)
    with torch.inference_mode():
        check([call(x)[0]], [layer(x)[0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, expected = run(call, layer, x), run(layer, layer, x)
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * (1 + float(b.abs().max())))


def test_errors_have_the_message_of_the_eager_layer() -> None:
    layer, x = build("gated_delta_net"), torch.randn(B, T, D)
    x[1, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN at row 1") as plain:
        layer(x)
    call = compiled(layer)
    with pytest.raises(ValueError, match="NaN at row 1") as result:
        call(x)
    assert str(result.value).startswith(str(plain.value))  # torch 2.9 appends the graph's position


_MUON = rc.algorithm.Muon(batch_size=4, update_every="batch", normalized_steps=True)
FOLLOWED = {
    "border": (rc.Recipe(memory=rc.memory.MLP(), algorithm=_MUON), "auto"),
    "tokens": (
        rc.Recipe(memory=rc.memory.MLP(), algorithm=rc.algorithm.Muon(batch_size=4)),
        "auto",
    ),
    "table": (
        rc.Recipe(memory=rc.memory.GatedMLP(), algorithm=rc.algorithm.Momentum(batch_size=4)),
        "auto",
    ),
    "kernel": (rc.zoo.get("deep_transformer").recipe, "auto"),
    "reference": (rc.Recipe(memory=rc.memory.MLP()), "reference"),
    "linear": (rc.zoo.get("gated_delta_net").recipe, "auto"),
}


@pytest.mark.parametrize(
    "name", cases("border", "reference", slow=("table", "tokens", "kernel", "linear"))
)
def test_inner_gradients_of_a_compiled_call(name: str) -> None:
    """A graph break at an inner gradient keeps the gradients of lower maps."""
    recipe, method = FOLLOWED[name]
    x = inputs(recipe, B=1, T=10, H=1, K=4, V=4)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, _ = rc.recall(
            recipe, q, k, v, x.gates, params=x.params, initial_memory=x.init, engine=method
        )
        return y

    def differentiate(call: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        y = call(*leaves)
        with torch.no_grad():
            plain = call(*leaves)
        return [y, plain, *torch.autograd.grad(y.square().sum(), leaves)]

    check(differentiate(torch.compile(call, backend="aot_eager")), differentiate(call))


@pytest.mark.parametrize("mode", cases("plain", "inference", slow=("no gradients",)))
def test_compiled_read_of_an_open_batch(mode: str) -> None:
    recipe = FOLLOWED["table"][0]
    x = inputs(recipe, B=1, T=6, H=1, K=4, V=4).with_grad()  # inner batches of four
    _, state = rc.recall(recipe, x.q, x.k, x.v, x.gates, params=x.params, initial_memory=x.init)

    def read(q: Tensor) -> Tensor:
        return rc.read(recipe, q, state=state, params=x.params)

    modes = {"no gradients": torch.no_grad, "inference": torch.inference_mode}
    with modes.get(mode, nullcontext)():
        check([torch.compile(read, backend="aot_eager")(x.q)], [read(x.q)])


@pytest.mark.slow  # the test above compiles the read of an open batch
def test_segment_that_ends_within_a_batch() -> None:
    """`MemoryAsContext` reads the open batch of a segment."""
    torch.manual_seed(0)
    recipe = rc.Recipe(memory=rc.memory.GatedMLP(), algorithm=rc.algorithm.Momentum(batch_size=4))
    mixer = rc.blocks.MemoryAsContext(recipe, "softmax_attention", segment=6)
    layer = rc.blocks.build(mixer, D, num_heads=2)
    x = torch.randn(B, 9, D)
    call = compiled(layer, fullgraph=False)
    check(run(call, layer, x), run(layer, layer, x))


class Softplus(rc.bias.L2):
    """A bias defined by a user."""


def test_custom_members() -> None:
    recipe = rc.Recipe(
        memory=rc.memory.MLP(),
        bias=Softplus(),
        algorithm=rc.algorithm.GradientDescent(batch_size=4),
    )
    torch.manual_seed(0)
    layer, x = rc.MemoryLayer(D, 2, recipe), torch.randn(B, 6, D)
    check(run(compiled(layer), layer, x), run(layer, layer, x))


def test_second_gradient_raises() -> None:
    layer, x = build("gated_delta_net"), torch.randn(1, 5, D, requires_grad=True)
    y, _ = compiled(layer)(x, output_final_state=False)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        slope.sum().backward()


def names_of(batches: Sequence[int]) -> list[str]:
    result = []
    for batch in batches:
        algorithm = rc.algorithm.GradientDescent(batch_size=batch)
        recipe = rc.Recipe(memory=rc.memory.MLP(), algorithm=algorithm)
        result.append(str(named(bind(recipe, H=2, K=4, V=4)).name))
    return result


def test_names_of_bindings_are_equal_in_every_process() -> None:
    """Compiled graphs are stored on disk and contain the name."""
    four, eight, repeated = names_of([4, 8, 4])
    assert four == repeated != eight
    code = (
        "from tests.contracts.test_compiled import names_of; "
        "names_of([16]); print(*names_of([8, 4]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert output.stdout.split() == [eight, four]


def test_equal_looking_classes_have_different_names() -> None:
    def layer() -> rc.MemoryLayer:
        class Custom(rc.bias.L2):
            """A class that is defined again at every call, as in a notebook."""

        return rc.MemoryLayer(D, 2, rc.Recipe(bias=Custom()))

    one, other = layer(), layer()
    assert one._bound.name != other._bound.name
    assert bound_of(str(one._bound.name)).recipe is one.recipe
    assert copy.deepcopy(one)._bound.name == one._bound.name


INDUCTOR = """
import sys, torch, recollect as rc
torch.manual_seed(0)
algorithm = rc.algorithm.GradientDescent(batch_size=int(sys.argv[1]))
layer = rc.MemoryLayer(32, 2, rc.Recipe(memory=rc.memory.MLP(), algorithm=algorithm))
x = torch.randn(2, 21, 32)
with torch.no_grad():
    print(float((torch.compile(layer)(x)[0] - layer(x)[0]).abs().max()))
"""


@pytest.mark.slow
def test_graphs_cached_on_disk_by_another_process(tmp_path: Path) -> None:
    for batch in (4, 8):
        output = subprocess.run(
            [sys.executable, "-c", INDUCTOR, str(batch)],
            capture_output=True,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            timeout=600,
        )
        assert output.returncode == 0, output.stderr[-2000:]
        assert float(output.stdout) < 1e-5
