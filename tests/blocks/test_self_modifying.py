"""`SelfModifyingMemory`: memories compute keys, values and gates, and learn them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.blocks import loops
from torch import Tensor, nn
from torch.nn import functional

import recollect as rc
from recollect.blocks import SelfModifyingMemory, build, read_mixer
from recollect.lm.distributed.head_sharding import check_divisible

TOL = {"atol": 1e-10, "rtol": 1e-10}  # float64, sums of order 1
NAMES = ("memory", "keys", "values", "log_decay", "lr")


def derivative(z: Tensor) -> Tensor:
    """Return the derivative of the GELU."""
    return 0.5 * (1 + torch.erf(z / 2**0.5)) + z * torch.exp(-0.5 * z * z) / (2 * torch.pi) ** 0.5


def output(W: list[Tensor], x: Tensor) -> Tensor:
    """M(x) = x + W_1 gelu(W_2 x)."""
    return x + W[1] @ functional.gelu(W[0] @ x)


def step(W: list[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
    """−∇½‖M(k) − v‖² − W_l h_l h_lᵀ for every map, by the chain rule."""
    z = W[0] @ k
    h = functional.gelu(z)
    error = k + W[1] @ h - v
    delta = derivative(z) * (W[1].T @ error)
    return [-torch.outer(delta + z, k), -torch.outer(error + W[1] @ h, h)]


def self_referential(layer: Any, x: Tensor, size: int) -> Tensor:
    """Behrouz et al. 2025, eqs. 83-90, one sequence: every memory writes its output at k_t.

    Tokens of ``size`` read the memories at the start of their inner batch. Decays and erasures act
    at its end.
    """
    first, H = layer.memory, layer.memory.num_heads
    u = functional.silu(x @ first.qkv.weight.T)
    q, k, v = (part.unflatten(-1, (H, -1)) for part in u.split(first.qkv_sizes, dim=-1))
    start = [
        torch.cat(pair) for pair in zip(first.memory(), layer.projections.memory(), strict=True)
    ]
    M = {name: [[w[i * H + h] for w in start] for h in range(H)] for i, name in enumerate(NAMES)}
    outputs, changes, decays = [], {}, []
    for t in range(len(x)):
        if t % size == 0:
            changes = {name: [[torch.zeros_like(w) for w in W] for W in M[name]] for name in NAMES}
            decays = [x.new_ones(()) for _ in range(H)]
        outputs.append([output(M["memory"][h], loops.unit(q[t, h])) for h in range(H)])
        keys = [loops.unit(output(M["keys"][h], loops.unit(k[t, h]))) for h in range(H)]
        v_unit = [loops.unit(v[t, h]) for h in range(H)]
        values = [loops.unit(output(M["values"][h], v_unit[h])) for h in range(H)]
        gates = {}
        for name in ("log_decay", "lr"):
            read = torch.cat([output(M[name][h], v_unit[h]) for h in range(H)])
            gates[name] = first.gates[name](layer.gate_map(read)[None, None])[0, 0]
        for h in range(H):
            decays[h] = decays[h] * gates["log_decay"][h].exp()
            for name in NAMES:
                own_value = output(M[name][h], values[h])
                moves = step(M[name][h], keys[h], own_value)
                changes[name][h] = [
                    total + gates["lr"][h] * move
                    for total, move in zip(changes[name][h], moves, strict=True)
                ]
        if (t + 1) % size == 0:
            M = {
                name: [
                    [decays[h] * w + c for w, c in zip(M[name][h], changes[name][h], strict=True)]
                    for h in range(H)
                ]
                for name in NAMES
            }
    y = torch.stack(
        [torch.stack([loops.rms(o, first.norm.weight) for o in row]) for row in outputs]
    )
    gate = nn.functional.silu(x @ first.output_gate.weight.T)
    return (y.flatten(1) * gate) @ first.out.weight.T


@pytest.mark.parametrize("size", [1, 3])
def test_the_layer_is_the_loop_of_its_equations(size: int) -> None:
    layer: Any = build(SelfModifyingMemory(loops.self_modifying(size)), 8, 2).double()
    x = torch.randn(2, 8, 8, dtype=torch.float64).requires_grad_()
    y = layer(x)[0]
    expected = torch.stack([self_referential(layer, row, size) for row in x])
    torch.testing.assert_close(y, expected, **TOL)
    leaves, direction = [x, *layer.parameters()], torch.randn_like(y)
    ours = torch.autograd.grad((y * direction).sum(), leaves)
    theirs = torch.autograd.grad((expected * direction).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)
        assert b.abs().max() > 1e-9


def test_the_state_has_a_memory_per_gate() -> None:
    mixer = SelfModifyingMemory(loops.self_modifying(4))
    assert tuple(mixer.children) == NAMES
    layer = build(mixer, 8, 2)
    _, state = layer(torch.randn(1, 8, 8))
    memory, projections = (state.parts[name].memory for name in ("memory", "projections"))
    assert [w.shape[1] for w in memory.weights] == [2, 2]
    assert [w.shape[1] for w in projections.weights] == [8, 8]
    # Each memory has two maps of 4 x 8 numbers per head, and 3 open associations.
    price = rc.cost(mixer, K=4, V=4, H=2, T=8)
    stored = sum(w.numel() * w.element_size() for w in (*memory.weights, *projections.weights))
    assert sum(size for name, size in price.state.items() if "open" not in name) >= stored
    assert rc.explain(mixer).parts.keys() == set(NAMES)


def test_grouped_queries_read_one_memory() -> None:
    layer: Any = build(SelfModifyingMemory(loops.self_modifying(2)), 8, 4, num_kv_heads=2).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    weight = layer.memory.qkv.weight.detach().clone()
    y = layer(x)[0]
    with torch.no_grad():  # both queries of a memory are exchanged, and the output map too
        swap = torch.tensor([1, 0, 3, 2])
        layer.memory.qkv.weight[:8] = weight[:8].view(4, 2, 8)[swap].flatten(0, 1)
        gate, out = layer.memory.output_gate.weight, layer.memory.out.weight
        gate.copy_(gate.view(4, 2, 8)[swap].flatten(0, 1))
        out.copy_(out.view(8, 4, 2)[:, swap].flatten(1))
    torch.testing.assert_close(layer(x)[0], y, **TOL)


def test_heads_are_not_divided_over_ranks() -> None:
    layer = build(SelfModifyingMemory(loops.self_modifying(4)), 8, 2)
    with pytest.raises(rc.RecipeError, match="has gates from the outputs of all heads"):
        check_divisible(layer, 2, name="layer 0")


def test_round_trip() -> None:
    mixer = SelfModifyingMemory(loops.self_modifying(4))
    assert read_mixer(mixer.to_dict()) == mixer


def with_options(memory: rc.Memory | None = None, **options: Any) -> SelfModifyingMemory:
    recipe = rc.Recipe(memory=memory or rc.memory.MLP())
    return SelfModifyingMemory((recipe, rc.LayerOptions(**options)))


@pytest.mark.parametrize(("size", "high"), [(4, 0.05), (16, 0.025), (64, 0.00625)])
def test_the_default_rate_is_bounded_per_inner_batch(size: int, high: float) -> None:
    algorithm = rc.algorithm.GradientDescent(batch_size=size, update_every="batch", erasure=1.0)
    recipe = rc.Recipe(memory=rc.memory.MLP(), retention=rc.retention.Decay(), algorithm=algorithm)
    mixer = SelfModifyingMemory(recipe)
    rate = mixer.memory.options.gate("lr")
    assert (rate.activation, rate.high, rate.init) == ("sigmoid", high, pytest.approx(high / 5))
    assert read_mixer(mixer.to_dict()) == mixer
    # A rate of the user is not replaced.
    chosen = (recipe, rc.LayerOptions(gate_options={"lr": rc.GateOptions(init=0.3)}))
    assert SelfModifyingMemory(chosen).memory.options.gate("lr") == rc.GateOptions(init=0.3)


def test_outputs_are_finite_at_the_default_rate() -> None:
    torch.manual_seed(0)
    algorithm = rc.algorithm.GradientDescent(batch_size=16, update_every="batch", erasure=1.0)
    recipe = rc.Recipe(memory=rc.memory.MLP(), retention=rc.retention.Decay(), algorithm=algorithm)
    layer: Any = build(SelfModifyingMemory(recipe), 64, 4)
    with torch.no_grad():
        y, state = layer(torch.cat([torch.randn(1, 256, 64), torch.randn(64).expand(1, 256, 64)]))
    assert y.abs().max() < 10
    weights = [w for part in state.parts.values() for w in part.memory.weights]
    assert max(float(w.abs().max()) for w in weights) < 2


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_inner_batches_share_the_graphs_of_a_compiled_layer() -> None:
    layer = build(SelfModifyingMemory(loops.self_modifying(4)), 8, 2)
    x = torch.randn(1, 11, 8)
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True),
        torch.no_grad(),
    ):
        y = torch.compile(layer, backend="eager")(x)[0]
    torch.testing.assert_close(y, layer(x)[0])


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_constant_tokens_are_stable_at_the_largest_default_rate(norm: str) -> None:
    torch.manual_seed(0)
    algorithm = rc.algorithm.GradientDescent(batch_size=16, update_every="batch", erasure=1.0)
    recipe = rc.Recipe(memory=rc.memory.MLP(norm=norm), algorithm=algorithm)
    layer: Any = build(SelfModifyingMemory(recipe), 16, 1)
    with torch.no_grad():
        layer.gate_map.weight.zero_()
        layer.parts["memory"].gates["lr"].bias.fill_(20.0)
        _, state = layer(torch.randn(16).expand(1, 512, 16))
    weights = [w for part in state.parts.values() for w in part.memory.weights]
    assert max(float(w.abs().max()) for w in weights) < 2


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (lambda: SelfModifyingMemory("titans"), "use update_every='batch'"),
        (lambda: SelfModifyingMemory("comba"), "leave ties and complex_decay out"),
        (
            lambda: SelfModifyingMemory(rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe()))),
            "at='key'",
        ),
        (
            lambda: SelfModifyingMemory(rc.Recipe(features=rc.features.Polynomial())),
            "use features.Identity",
        ),
        (
            lambda: SelfModifyingMemory((rc.Recipe(), rc.LayerOptions(qk_norm="none"))),
            "use 'l2'",
        ),
        (lambda: SelfModifyingMemory("softmax_attention"), "is not a plain read of linear maps"),
        (
            lambda: SelfModifyingMemory(rc.Recipe(retention=rc.retention.Lq(q=4.0))),
            "use retention.Keep",
        ),
        (
            lambda: build(
                with_options(rc.memory.MLP(residual=False)), 8, 2, head_dim=4, value_dim=2
            ),
            "must be equal",
        ),
        (lambda: SelfModifyingMemory(rc.Recipe()), r"its keys stay 0: use memory.MLP\(\)"),
        (
            lambda: with_options(qk_norm="rms"),
            "longer than 1, for which its rates diverge: use 'l2'",
        ),
        (lambda: with_options(rope_theta=1e4), "leave rope_theta out"),
        (lambda: with_options(qk_scale="learned"), "leave qk_scale out"),
        (lambda: with_options(qk_affine=True), "leave qk_affine out"),
        (
            lambda: with_options(rc.memory.MLP(residual=False), last_map_init_scale=0.0),
            "its keys stay 0: leave last_map_init_scale out",
        ),
    ],
)
def test_refusals(mixer: Any, message: str) -> None:
    with pytest.raises(rc.RecipeError, match=message):
        mixer()
