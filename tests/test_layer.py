"""The memory layer gives equal outputs for a sequence in pieces, padded, packed or decoded.

In float64 unless stated; 1e-10 is far above a few hundred rounding errors and far below the effect
of a token.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.contracts.generate import presets
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect import GateOptions, LayerOptions, LayerState, MemoryLayer
from recollect.fields import Gate, Param
from recollect.layer.options import Tie
from recollect.layer.short_conv import ShortConvolution

D, HEADS, T = 16, 2, 13
DECAY = rc.Recipe(retention=rc.retention.Decay())
TOL = {"atol": 1e-10, "rtol": 1e-10}

CUSTOM = {
    "deep": rc.Recipe(
        memory=rc.memory.MLP(expansion=2),
        retention=rc.retention.Decay(per="value"),
        algorithm=rc.algorithm.Momentum(batch_size=4),
    ),
    # The coordinate form: the threshold has a jump at δ, and rounding can decide the side.
    "window": rc.Recipe(bias=rc.bias.Huber(form="coordinate"), context=rc.context.Window(size=3)),
    "several": rc.Recipe(
        retention=rc.retention.Decay(), algorithm=rc.algorithm.GradientDescent(updates_per_token=2)
    ),
    "params": rc.Recipe(
        features=rc.features.Polynomial(degree=2),
        retention=rc.retention.Decay(per="key_value", alpha="learned"),
    ),
    "probe": rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe(per="key"))),
    "floor": rc.Recipe(
        memory=rc.memory.Matrix(read=rc.memory.Read(normalize="floor")),
        bias=rc.bias.DotProduct(),
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.GradientDescent(lr="log_input"),
    ),
}
ALL = [*presets(), *CUSTOM]


def build(name: str, **overrides: object) -> MemoryLayer:
    torch.manual_seed(0)
    if name in CUSTOM:
        # RoPE is on, so that splits test its phase.
        options = LayerOptions(rope_theta=100.0)
        return MemoryLayer(D, HEADS, CUSTOM[name], options, **overrides).double()  # type: ignore[arg-type]
    return rc.zoo.get(name).build(D, HEADS, **overrides).double()


def tokens(B: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randn(
        B, length, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def check_splits(layer: rc.MemoryLayer, x: Tensor) -> None:
    """Compare the outputs and the last state of one call with those of split calls."""
    T = x.shape[1]
    full, end = layer(x)
    for cuts in ((0, 1, 2, 7, T), tuple(range(T + 1))):
        state, outputs = None, []
        for a, b in pairwise(cuts):
            y, state = layer(x[:, a:b], state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), full, **TOL)
        for ours, theirs in zip(state.memory.tensors(), end.memory.tensors(), strict=True):
            torch.testing.assert_close(ours, theirs, **TOL)


@pytest.mark.parametrize("name", ALL)
def test_splits_and_decoding_equal_one_call(name: str) -> None:
    check_splits(build(name), tokens())


@pytest.mark.parametrize("name", ALL)
def test_padded_rows_equal_single_rows(name: str) -> None:
    layer, x = build(name), tokens()
    x = torch.cat([x, x[:1]])
    mask = torch.ones(3, T)
    mask[0, :5], mask[1, 9:], mask[2, [0, 3, 4, 8]] = 0, 0, 0
    poisoned = x.masked_fill(mask[..., None] == 0, torch.nan)
    y, state = layer(poisoned, attention_mask=mask)
    more, _ = layer(x[:, :3], state)
    for row in range(3):
        real = mask[row].bool()
        single, end = layer(x[row : row + 1, real])
        torch.testing.assert_close(y[row : row + 1, real], single, **TOL)
        torch.testing.assert_close(more[row : row + 1], layer(x[row : row + 1, :3], end)[0], **TOL)
        assert not y[row, ~real].any()


@pytest.mark.parametrize("name", ALL)
def test_packed_documents_equal_single_documents(name: str) -> None:
    layer, x = build(name), tokens(B=1)
    cuts = (0, 5, 5, 12, T)  # one is empty, and one has a single token
    packed, state = layer(x, cu_seqlens=torch.tensor(cuts))
    repeated, _ = layer(x, state, cu_seqlens=torch.tensor(cuts))
    for a, b in pairwise(cuts):
        if a == b:
            continue
        single, end = layer(x[:, a:b])
        torch.testing.assert_close(packed[:, a:b], single, **TOL)
        torch.testing.assert_close(repeated[:, a:b], layer(x[:, a:b], end)[0], **TOL)


# With 8 channels no error reaches the threshold, whose initial value is for 64.
UNTOUCHED = {"yaad": "gates.threshold."}


@pytest.mark.parametrize("name", ALL)
def test_forward_backward_and_bf16_autocast(name: str) -> None:
    layer = build(name).float()
    # Momentum between batches changes outputs of the third inner batch.
    x = tokens(length=max(T, 2 * layer.recipe.algorithm.batch_size + 3)).float()
    exact, _ = layer(x)
    exact.square().mean().backward()
    for what, weight in layer.named_parameters():
        if not weight.requires_grad:
            continue  # random and fixed
        assert weight.grad is not None, what
        assert weight.grad.isfinite().all(), what
        if not what.startswith(UNTOUCHED.get(name, "-")):
            assert weight.grad.any(), f"{what} never learns"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, _ = layer(x)
    half.float().square().mean().backward()
    # bf16 has 8 bits; the layer rounds projections and outputs, and not its sums.
    assert (half.float() - exact).norm() < 0.05 * exact.norm()
    whole_half, _ = layer.bfloat16()(x.bfloat16())
    assert whole_half.dtype == torch.bfloat16
    assert (whole_half.float() - exact).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize(
    "name", [*(one for one in presets() if not one.values[0].startswith("ffn")), *CUSTOM]
)
def test_layer_learns_with_default_options(name: str) -> None:
    """Predict the token before the last one, which any layer can learn from the past."""
    layer = build(name).float()
    x = tokens(B=8, length=12).float()
    target = functional.pad(x, (0, 0, 2, 0))[:, :-2]
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(25):
        loss = (layer(x, output_final_state=False)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if losses[-1] < 0.75 * losses[0]:
            break  # the loss is below the bound after all steps
    assert losses[-1] < 0.85 * losses[0]


def test_convolution_is_conv1d_with_true_gradients() -> None:
    conv, u = ShortConvolution(3, 4).double(), tokens(length=5)[..., :3].requires_grad_()
    padded = functional.pad(u, (0, 0, 3, 0)).transpose(1, 2)
    want = functional.conv1d(padded, conv.weight.t().unsqueeze(1), groups=3).transpose(1, 2)
    torch.testing.assert_close(conv(u)[0], want, **TOL)

    def convolve(u: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(conv, {"weight": weight}, (u,))[0]

    assert torch.autograd.gradcheck(convolve, (u, conv.weight))
    assert torch.autograd.gradgradcheck(convolve, (u, conv.weight))


@pytest.mark.parametrize("name", ["softmax_attention", "gated_delta_net", "deep"])
def test_grouped_heads_share_memories(name: str) -> None:
    layer, x = build(name, num_kv_heads=1), tokens()
    full = build(name)
    assert layer(x)[0].shape == x.shape
    # Two memories with equal weights are one memory.
    K, n = layer.head_dim, layer.num_heads * layer.head_dim
    weights = layer.state_dict()

    def twice(weight: Tensor, axis: int) -> Tensor:
        q, k, v = weight.split([n, K, K], dim=axis)
        return torch.cat([q, k, k, v, v], dim=axis)

    for key, value in weights.items():
        if key == "qkv.weight":
            weights[key] = twice(value, 0)
        elif key == "conv.weight":
            weights[key] = twice(value, 1)
        elif key.startswith(("gates.", "params.", "memory.")) and not key.endswith("down"):
            weights[key] = (
                value.repeat_interleave(2, dim=0)
                if value.shape[0] == 1
                else value.repeat(2, *(1,) * (value.dim() - 1))
            )
    full.load_state_dict(weights)
    torch.testing.assert_close(full(x)[0], layer(x)[0], **TOL)


def test_head_and_value_sizes_may_differ() -> None:
    layer = MemoryLayer(D, 3, rc.Recipe(), head_dim=4, value_dim=6)
    y, state = layer(torch.randn(2, 5, D))
    assert y.shape == (2, 5, D)
    assert state is not None
    assert state.memory.sizes == (3, 4, 6)


def test_method_may_be_set_later() -> None:
    layer, x = build("gated_delta_net"), tokens()
    fast, _ = layer(x)
    layer.engine = "reference"
    torch.testing.assert_close(layer(x)[0], fast, **TOL)
    assert "reference" in repr(layer)
    with pytest.raises(rc.RecipeError, match="cannot run"):
        layer.engine = "kernel"
    with pytest.raises(ValueError, match="unknown"):
        layer.engine = "warp"


def test_state_moves_to_a_device() -> None:
    layer, x = build("softmax_attention", options=LayerOptions(rope_theta=100.0)), tokens()
    _, state = layer(x[:, :7])
    assert state.nbytes > state.memory.nbytes
    back = LayerState.from_dict(state.to_dict())
    torch.testing.assert_close(layer(x[:, 7:], back)[0], layer(x[:, 7:], state)[0])
    swapped = layer(x[:, 7:].flip(0), state.select(torch.tensor([1, 0])))[0].flip(0)
    torch.testing.assert_close(swapped, layer(x[:, 7:], state)[0], **TOL)
    twice = layer(x[:1, 7:].expand(2, -1, -1), state.select(torch.tensor([0])).repeat(2))[0]
    torch.testing.assert_close(twice[0], twice[1])
    assert all(not t.requires_grad for t in state.detach().memory.tensors())
    assert state.to(dtype=torch.float32).conv.dtype == torch.float32
    with pytest.raises(ValueError, match="not part of a"):
        LayerState.from_dict({"tail": x})


def test_reset_restarts_a_row() -> None:
    for name in ("deep", "gated_delta_net", "softmax_attention"):
        layer, x = build(name), tokens()
        _, state = layer(x[:, :6])
        fresh = state.reset(torch.tensor([True, False]), layer.initial_memory)
        y, _ = layer(x[:, 6:], fresh)
        torch.testing.assert_close(y[:1], layer(x[:1, 6:])[0], **TOL)
        torch.testing.assert_close(y[1:], layer(x[:, 6:], state)[0][1:], **TOL)


def test_empty_calls() -> None:
    for name in ("deep", "gated_delta_net", "softmax_attention"):
        layer, x = build(name), tokens()
        y, _ = layer(x[:, :0])
        assert y.shape == (2, 0, D)
        assert layer(x[:0])[0].shape == (0, T, D)
        _, state = layer(x[:, :4])
        y, later = layer(x[:, 4:6], state, attention_mask=torch.zeros(2, 2))
        assert not y.any()
        torch.testing.assert_close(layer(x[:, 6:], later)[0], layer(x[:, 6:], state)[0], **TOL)


def test_gates_start_at_declared_values() -> None:
    zero = torch.zeros(1, 1, D)
    layer = MemoryLayer(D, 4, rc.Recipe(retention=rc.retention.Decay()))
    assert layer.gates["lr"](zero).flatten().tolist() == pytest.approx([0.5] * 4)
    alpha = layer.gates["log_decay"](zero).exp().flatten()
    assert (alpha.diff() > 0).all()  # from weak to strong memory
    assert alpha.log().abs().log().mean().exp().item() == pytest.approx(0.0202, rel=0.01)
    options = LayerOptions(gate_options={"lr": GateOptions(low=0, high=2, init=1.5)})
    layer = MemoryLayer(D, 4, rc.Recipe(), options)
    torch.testing.assert_close(layer.gates["lr"](zero), torch.full((1, 1, 4), 1.5))
    assert layer.gates["lr"](1000 * torch.randn(5, 1, D)).max() <= 2


def _declared_numbers() -> dict[str, tuple[rc.zoo.Preset, Gate | Param]]:
    """Return every gate and trained param of the zoo, once for each declaration."""
    numbers: dict[str, tuple[rc.zoo.Preset, Gate | Param]] = {}
    for preset in map(rc.zoo.get, rc.zoo.names()):
        for declared in (*preset.recipe.gates(), *preset.recipe.params()):
            single = isinstance(declared.init, int | float)
            if single and (isinstance(declared, Gate) or (declared.learned and not declared.draw)):
                key = f"{declared.name} {declared.range} {declared.init:.4g} {declared.axes}"
                numbers.setdefault(key, (preset, declared))
    return numbers


DECLARED = _declared_numbers()


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("key", DECLARED)
def test_a_narrowed_gate_starts_inside_its_range(key: str, side: str) -> None:
    """The range excludes the declared initial value, so the gate starts inside it and learns."""
    preset, declared = DECLARED[key]
    begin, end = float(declared.init), getattr(declared.range, "high" if side == "low" else "low")
    if end is None:
        end = begin + 3 * abs(begin) + 1 if side == "low" else begin - 3 * abs(begin) - 1
    narrowed = GateOptions(**{side: begin + 0.9 * (end - begin)})
    torch.manual_seed(0)
    slopes = {}
    for name, options in (("default", GateOptions()), ("narrowed", narrowed)):
        layer = MemoryLayer(
            D, 2, preset.recipe, LayerOptions(gate_options={declared.name: options})
        )
        projection = {**dict(layer.gates.items()), **dict(layer.params.items())}[declared.name]
        value, bias = projection(torch.randn(2, 8, D)), projection.bias
        if bias is None:  # a gate that is a key by default
            continue
        value.sum().backward()
        low, high = projection.activation.ends
        width = 1.0 if low is None or high is None else high - low
        tokens = value.numel() / bias.numel()
        slopes[name] = float(bias.grad.abs().min()) / width / tokens
    assert low is None or (value > low).all()
    assert high is None or (value < high).all()
    assert slopes["narrowed"] > min(0.02, 0.5 * slopes.get("default", 1.0))


def test_a_narrowed_range_moves_only_the_values_that_it_excludes() -> None:
    zero = torch.zeros(1, 1, D)

    def initial(name: str, options: GateOptions, recipe: rc.Recipe = DECAY) -> list[float]:
        layer = MemoryLayer(D, 4, recipe, LayerOptions(gate_options={name: options}))
        return layer.gates[name](zero).flatten().tolist()

    first, *others = initial("log_decay", GateOptions())
    assert first < -0.05 < min(others)
    wide = initial("log_decay", GateOptions(low=-1.0))
    assert wide == pytest.approx([first, *others], rel=1e-4)
    slow = initial("log_decay", GateOptions(low=-0.05))
    assert slow == pytest.approx([-0.0475, *others], rel=1e-4)
    # Options are in units of a value's norm, √4 here.
    huber = rc.Recipe(bias=rc.bias.Huber())
    threshold = initial("threshold", GateOptions(unit="value_rms", high=0.5), huber)
    assert threshold == pytest.approx([0.475 * 4**0.5] * 4, rel=1e-4)
    fixed = initial("lr", GateOptions(source="constant", high=0.05))
    assert fixed == pytest.approx([0.0475] * 4)
    # An explicit initial value is exact.
    assert initial("lr", GateOptions(high=0.05, init=0.0499)) == pytest.approx([0.0499] * 4)


def test_advice_against_overshooting_steps_saturates_no_gate() -> None:
    """Follow the advice of docs/diagnose.md: a lower `high` of the gate `lr`."""
    options = LayerOptions(gate_options={"lr": GateOptions(low=0, high=0.05)})
    report = rc.diagnose(MemoryLayer(64, 4, rc.Recipe(), options), torch.randn(1, 32, 64))
    assert not report.saturated["lr"].any()


TIED = {
    "complement": (
        rc.Recipe(
            bias=rc.bias.DotProduct(),
            retention=rc.retention.Decay(per="key"),
            algorithm=rc.algorithm.GradientDescent(lr=1.0),
        ),
        LayerOptions(
            qk_norm="none", ties=(Tie(target="k", source="log_decay", rule="complement"),)
        ),
    ),
    "rate": (
        rc.Recipe(bias=rc.bias.DotProduct(), retention=rc.retention.Decay()),
        LayerOptions(
            gate_options={"lr": GateOptions(activation="softplus", init=0.05)},
            ties=(Tie(target="log_decay", source="lr", rule="rate"),),
        ),
    ),
}


@pytest.mark.parametrize("rule", TIED)
def test_tied_numbers_follow(rule: str) -> None:
    torch.manual_seed(0)
    layer = MemoryLayer(D, HEADS, *TIED[rule]).double()
    x = tokens()
    y, _ = layer(x)
    inputs = layer.memory_inputs(x)
    gate_means = {**inputs.gates, "k": inputs.k}
    if rule == "complement":
        torch.testing.assert_close(gate_means["k"], 1 - gate_means["log_decay"].exp())
        assert layer.qkv.out_features == 2 * D
    else:
        ratio = gate_means["log_decay"] / gate_means["lr"]  # −a, one per head
        torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
        assert (ratio < 0).all()
        assert ratio[0, 0, 0] != ratio[0, 0, 1]
    y.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())
    first, state = layer(x[:, :5])
    torch.testing.assert_close(torch.cat([first, layer(x[:, 5:], state)[0]], 1), y, **TOL)


def test_squashing_stays_in_the_declared_range() -> None:
    x = 1e3 * torch.randn(4, 5, D)
    for recipe in (*CUSTOM.values(), rc.Recipe(retention=rc.retention.Ball(radius="input"))):
        layer = MemoryLayer(D, HEADS, recipe)
        for gate in recipe.gates():
            low, high = layer.gates[gate.name](x).detach().aminmax()
            assert gate.range.contains(float(low)), gate.name
            assert gate.range.contains(float(high)), gate.name


def test_low_rank_and_fixed_numbers() -> None:
    recipe = rc.Recipe(retention=rc.retention.Decay(per="key"))
    number = MemoryLayer(256, 4, recipe).gates["log_decay"]
    assert sum(p.numel() for p in number.parameters()) == 32 * 256 + 256 * 32 + 256
    fixed = LayerOptions(gate_options={"lr": GateOptions(source="constant", init=0.25)})
    layer = MemoryLayer(D, HEADS, rc.Recipe(), fixed)
    assert not list(layer.gates["lr"].parameters())
    assert (layer.gates["lr"](torch.randn(2, 3, D)) == 0.25).all()
    learned = LayerOptions(gate_options={"lr": GateOptions(source="learned")})
    layer = MemoryLayer(D, HEADS, rc.Recipe(), learned)
    assert [p.shape for p in layer.gates["lr"].parameters()] == [(HEADS,)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MemoryLayer(D, 3, rc.Recipe()), "multiple of num_heads = 3"),
        (lambda: MemoryLayer(D, 4, rc.Recipe(), num_kv_heads=3), "num_kv_heads = 3"),
        (lambda: MemoryLayer(D, 0, rc.Recipe()), "from 1 to"),
        (lambda: MemoryLayer(D, 2, 3), "rc.Recipe"),  # type: ignore[arg-type]
        (lambda: MemoryLayer(D, 2, rc.Recipe(), {"conv_size": 4}), "LayerOptions"),  # type: ignore[arg-type]
        (lambda: MemoryLayer(D, 2, rc.Recipe(memory=rc.memory.MLP()), value_dim=4), "K = V"),
        (
            lambda: MemoryLayer(
                D, 2, rc.Recipe(), LayerOptions(gate_options={"rate": GateOptions()})
            ),
            "'rate', which this recipe does not declare; it declares: lr",
        ),
        (
            lambda: MemoryLayer(
                D,
                2,
                rc.Recipe(),
                LayerOptions(gate_options={"lr": GateOptions(init=(0.1, 0.2, 0.3))}),
            ),
            "3 values and there are 2 heads",
        ),
        (
            lambda: MemoryLayer(
                D, 2, rc.Recipe(), LayerOptions(gate_options={"lr": GateOptions(low=-1)})
            ),
            "has values",
        ),
        (
            lambda: MemoryLayer(
                D, 2, rc.Recipe(), LayerOptions(gate_options={"lr": GateOptions(init=3)})
            ),
            "init must be in",
        ),
        (
            lambda: MemoryLayer(
                D, 2, DECAY, LayerOptions(gate_options={"log_decay": GateOptions(low=0.5)})
            ),
            "options of 'log_decay': low must be below high, and they are 0.5 and 0",
        ),
        (
            lambda: MemoryLayer(
                D,
                2,
                DECAY,
                LayerOptions(gate_options={"log_decay": GateOptions(activation="sigmoid")}),
            ),
            "choose another low, high or activation",
        ),
        (
            lambda: MemoryLayer(
                D,
                2,
                rc.Recipe(),
                LayerOptions(gate_options={"lr": GateOptions(init_schedule="dyadic")}),
            ),
            "schedules are for decays",
        ),
        (
            lambda: MemoryLayer(D, 2, rc.Recipe(), LayerOptions(rope_theta=1e4), head_dim=3),
            "even head_dim",
        ),
        (
            lambda: MemoryLayer(
                D,
                2,
                rc.Recipe(),
                LayerOptions(ties=(Tie(target="log_decay", source="lr", rule="rate"),)),
            ),
            "does not have; it has: lr",
        ),
        (
            lambda: MemoryLayer(
                D, 2, TIED["rate"][0], replace(TIED["complement"][1], gate_options={})
            ),
            "needs a decay per key channel",
        ),
        (lambda: rc.zoo.get("delta_net").build(D, 2, widht=3), "no override 'widht'"),
    ],
)
def test_invalid_options_are_refused_at_construction(make: object, says: str) -> None:
    with pytest.raises(rc.RecipeError, match=says):
        make()  # type: ignore[operator]


def test_bad_calls_are_one_sentence() -> None:
    layer, x = build("delta_net"), tokens()
    with pytest.raises(ValueError, match=r"shape \[B, T, 16\], not \[2, 13, 8\]"):
        layer(x[..., :8])
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        layer(x, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="B must be 1"):
        layer(x, cu_seqlens=torch.tensor([0, T]))
    with pytest.raises(ValueError, match="exclude each other"):
        layer(x[:1], attention_mask=torch.ones(1, T), cu_seqlens=torch.tensor([0, T]))


def test_reset_parameters_equals_construction() -> None:
    layer = build("gla")
    torch.manual_seed(3)
    layer.reset_parameters()
    first = {name: weight.clone() for name, weight in layer.state_dict().items()}
    torch.manual_seed(3)
    layer.reset_parameters()
    for name, weight in layer.state_dict().items():
        assert torch.equal(weight, first[name])


@pytest.mark.parametrize("name", ["titans", "gla", "delta_product", "longhorn"])
def test_layer_by_name_has_the_options_of_the_system(name: str) -> None:
    """With the system's options, as in `Preset.build`: a recipe alone is not the system."""
    preset = rc.zoo.get(name)
    built = preset.build(16, 2)
    for stated in (name, preset, built):
        layer = rc.MemoryLayer(16, 2, stated)
        assert (layer.recipe, layer.options) == (preset.recipe, preset.options)
        layer.load_state_dict(built.state_dict())
        x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(0))
        assert torch.equal(layer(x)[0], built(x)[0])
    options = rc.LayerOptions(conv_size=2)
    assert rc.MemoryLayer(16, 2, name, options).options == options
    assert rc.MemoryLayer(16, 2, preset.recipe).options == rc.LayerOptions()


@pytest.mark.filterwarnings("ignore")  # of torch.ao
@pytest.mark.parametrize("name", ["gated_delta_net", "titans", "rwkv7"])
def test_quantized_linear_maps(name: str) -> None:
    """Dynamic quantisation of torch makes ``weight`` a method."""
    torch.manual_seed(0)
    layer, x = rc.zoo.get(name).build(D, HEADS), torch.randn(2, T, D)
    y, _ = layer(x)
    quantized = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear})
    if name == "rwkv7":
        with pytest.raises(ValueError, match="leave qkv as it is"):
            quantized(x)
        return
    y8, state = quantized(x)
    assert (y8 - y).norm() < 0.1 * y.norm()
    assert quantized(x[:, :1], state)[0].shape == (2, 1, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert (quantized(x)[0] - y).norm() < 0.1 * y.norm()
        with pytest.raises(ValueError, match=r"x is torch\.float64 and the layer torch\.float32"):
            layer(x.double())
    with pytest.raises(ValueError, match="must have shape"):
        quantized(x[0])
