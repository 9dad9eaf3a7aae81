"""Single tokens of `linear.decode` and `kernel.softmax` against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import recollect as rc
from recollect.choices.algorithm.descent import GradientDescent, Implicit
from recollect.choices.bias.losses import L2, DotProduct
from recollect.choices.features.finite import EluPlusOne, Identity
from recollect.choices.retention.base import Decay, Keep, Retention
from recollect.engines.common.problem import Problem
from recollect.engines.kernel import softmax
from recollect.functional.binding import bind
from recollect.functional.recall import memorise
from recollect.testing.compare import assert_states_equal, gradients, largest_error
from recollect.testing.engines import inputs_for

RETENTIONS = (
    Keep(),
    Decay(),
    Decay(when="before"),
    Decay(per="key"),
    Decay(per="key", when="before"),
)


def decodes_in_one_step(recipe: rc.Recipe) -> bool:
    return bind(recipe, H=2, K=4, V=3).plan.plain


@pytest.mark.parametrize("retention", RETENTIONS, ids=str)
@pytest.mark.parametrize("bias", [L2(), DotProduct()], ids=str)
@pytest.mark.parametrize("features", [Identity(), EluPlusOne()], ids=str)
def test_one_token_and_all_its_gradients(
    retention: Retention, bias: L2 | DotProduct, features: Identity | EluPlusOne
) -> None:
    for algorithm in (GradientDescent(), Implicit()):
        if isinstance(algorithm, Implicit) and isinstance(bias, DotProduct):
            continue
        check_one_token(
            rc.Recipe(features=features, bias=bias, retention=retention, algorithm=algorithm)
        )


def check_one_token(recipe: rc.Recipe) -> None:
    assert decodes_in_one_step(recipe)
    x = inputs_for(recipe, B=2, T=1, H=2, G=3)
    y, state, slopes = gradients(recipe, x, engine="linear")
    expected, expected_state, expected_grads = gradients(recipe, x, engine="reference")
    assert_states_equal((y, state), (expected, expected_state), 1e-12, "of one token")
    assert largest_error(slopes, expected_grads)[0] < 1e-12


@pytest.mark.parametrize("alpha", ["input", "input_scaled", "learned"])
@pytest.mark.parametrize("per", ["head", "key", "entry"])
@pytest.mark.parametrize("rate", ["head", "value"])
def test_one_token_of_a_decay_in_two_factors_or_a_rate_per_value(
    alpha: str, per: str, rate: str
) -> None:
    retention = Decay(per=per, alpha=alpha)
    algorithm = GradientDescent(per=rate)
    check_one_token(rc.Recipe(bias=DotProduct(), retention=retention, algorithm=algorithm))


def test_presets_that_decode_in_one_step() -> None:
    """Windows, momentum, probes and decays over values take the general path."""
    modes = {
        name: decodes_in_one_step(preset.recipe)
        for name in (
            "linear_attention",
            "delta_net",
            "gated_delta_net",
            "mamba2",
            "gla",
            "longhorn",
            "mamba",
            "longhorn_diagonal",
        )
        for preset in [rc.zoo.get(name)]
    }
    assert all(modes.values()), modes
    for recipe in (
        rc.Recipe(context=rc.context.Window(size=3)),
        rc.Recipe(algorithm=rc.algorithm.Momentum()),
        rc.Recipe(bias=DotProduct(), retention=Decay(per="value")),
        rc.Recipe(retention=Decay(per="entry")),
        rc.Recipe(algorithm=GradientDescent(per="value")),
        rc.Recipe(memory=rc.memory.Matrix(read=rc.memory.Read(when="before"))),
    ):
        assert not decodes_in_one_step(recipe)


@torch.no_grad()
def test_padded_rows_are_unchanged() -> None:
    recipe = rc.Recipe(retention=Decay())
    x = inputs_for(recipe, B=2, T=1, H=2)
    mask = torch.tensor([[1], [0]])
    y, state = rc.recall(recipe, x.q, x.k, x.v, x.gates, initial_memory=x.init, attention_mask=mask)
    assert state is not None and x.init is not None
    assert state.position.tolist() == [1, 0]
    assert y[1].eq(0).all()
    torch.testing.assert_close(state.weights[0][1], x.init[0].to(state.weights[0].dtype))


BARE = [
    rc.Recipe(bias=bias, retention=retention, algorithm=GradientDescent())
    for bias in (L2(), DotProduct())
    for retention in RETENTIONS
] + [
    rc.Recipe(bias=bias, retention=retention, algorithm=GradientDescent(per=rate))
    for bias, retention, rate in (
        (L2(), Decay(alpha="input_scaled", when="before"), "head"),
        (L2(), Decay(per="key", alpha="input_scaled", when="before"), "head"),
        (DotProduct(), Decay(per="key", alpha="input_scaled"), "value"),
        (DotProduct(), Decay(per="entry"), "head"),
        (DotProduct(), Decay(per="entry", alpha="input_scaled"), "value"),
    )
]
SOFTMAX = rc.zoo.get("softmax_attention").recipe


def _decoded(recipe: rc.Recipe, *, G: int) -> None:
    """Return a layer's token after a prompt, computed by the reference."""
    x = inputs_for(recipe, B=2, T=5, H=2, G=G, V=4 if recipe.nonparametric else 3)
    q, k, v = (one.detach() for one in (x.q, x.k, x.v))
    gates = {name: one.detach() for name, one in x.gates.items()}
    params = {name: one.detach() for name, one in x.params.items()}
    prompt = {name: one[:, :4] for name, one in gates.items()}
    token = {name: one[:, 4:] for name, one in gates.items()}
    options: dict[str, Any] = {"params": params, "engine": "reference"}
    _, state = rc.recall(recipe, q[:, :4], k[:, :4], v[:, :4], prompt, **options)
    last = (q[:, 4:], k[:, 4:], v[:, 4:])
    expected, final_state = rc.recall(recipe, *last, token, state=state, **options)
    bound = bind(recipe, H=2, K=k.shape[-1], V=v.shape[-1])
    call = Problem(
        bound=bound,
        q=last[0],
        k=last[1],
        v=last[2],
        gates=token,
        params=params,
        state=state,
        trusted=True,
    )
    y, later = memorise(call)
    assert_states_equal((y, later), (expected, final_state), 1e-12, "of a layer's token")


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("recipe", [*BARE, SOFTMAX], ids=str)
def test_layer_calls_the_engine_directly_for_a_token(
    recipe: rc.Recipe, G: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bool] = []
    bound = bind(recipe, H=2, K=4, V=4 if recipe.nonparametric else 3)
    assert bound.decode_token is not None

    def watched(*args: object) -> object:
        result = token(*args)
        recorded.append(result is not None)
        return result

    token = bound.decode_token
    monkeypatch.setitem(bound.__dict__, "decode_token", watched)
    with torch.no_grad():
        _decoded(recipe, G=G)
    assert recorded == [True]
    _decoded(recipe, G=G)  # the general path if a gradient may be needed
    assert recorded == [True]


def test_tokens_that_take_the_general_path() -> None:
    """Features, keyed rates, a cache with empty slots, and numbers that are not per token."""
    for recipe in (
        rc.Recipe(features=EluPlusOne()),
        rc.Recipe(algorithm=Implicit()),
        rc.Recipe(algorithm=GradientDescent(lr=0.5)),
        rc.zoo.get("retnet").recipe,
        rc.Recipe(memory=rc.memory.Matrix(read=rc.memory.Read(normalize="sum")), bias=DotProduct()),
    ):
        assert bind(recipe, H=2, K=4, V=4).decode_token is None, recipe
    x = inputs_for(SOFTMAX, B=2, T=4, H=2, V=4)
    q, k, v = x.q.detach(), x.k.detach(), x.v.detach()
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    _, state = rc.recall(SOFTMAX, q[:, :3], k[:, :3], v[:, :3], attention_mask=mask)
    assert state is not None
    with torch.no_grad():
        assert softmax.token(q[:, 3:], k[:, 3:], v[:, 3:], state, scale=1.0, recipe_id="") is None
        half = (one[:, 3:].bfloat16() for one in (q, k, v))
        assert softmax.token(*half, state, scale=1.0, recipe_id="") is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_delta_net", "delta_net", "titans", "softmax_attention"])
def test_padding_and_empty_documents_are_not_tokens(name: str) -> None:
    layer = rc.zoo.get(name).build(16, 2)
    _, state = layer(torch.randn(2, 5, 16))
    assert state is not None
    x, mask = torch.randn(2, 1, 16), torch.tensor([[1], [0]])
    _, later = layer(x, state, attention_mask=mask)
    with torch.enable_grad():
        _, expected = layer(x, state, attention_mask=mask)
    assert later is not None and expected is not None
    assert later.position.tolist() == [6, 5]
    states = (replace(x.memory, cache={}).tensors() for x in (later, expected))
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other)
    _, packed = layer(x[:1], state, cu_seqlens=torch.tensor([0, 1, 1]))
    assert packed is not None
    assert packed.position.tolist() == [6, 5]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2", "softmax_attention"])
def test_precision_of_gates_and_state_of_a_half_precision_token(name: str) -> None:
    """Gates stay in float32 under autocast, and a half-precision state continues in float32."""
    layer = rc.zoo.get(name).build(16, 2)
    x = torch.randn(2, 6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        gates = layer.memory_inputs(x).gates
        with torch.enable_grad():
            expected = layer.memory_inputs(x).gates
    for gate, result in gates.items():
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected[gate])
    half = layer.to(torch.bfloat16)
    _, state = half(x[:, :5].bfloat16())
    _, later = half(x[:, 5:].bfloat16(), state.to(dtype=torch.bfloat16))
    assert later.memory.dtype in (None, torch.float32)


@torch.no_grad()
def test_first_token_sets_the_recipe_id_of_a_state() -> None:
    for name in ("gated_delta_net", "titans", "softmax_attention"):
        layer = rc.zoo.get(name).build(16, 2)
        _, state = layer(torch.randn(1, 5, 16))
        bare = replace(state, memory=replace(state.memory, recipe_id=None))
        _, later = layer(torch.randn(1, 1, 16), bare)
        assert later.memory.recipe_id == layer.recipe.normal_form


@torch.no_grad()
def test_a_decoded_token_of_attention_is_one_graph() -> None:
    layer = rc.zoo.get("softmax_attention").build(16, 2)
    x = torch.randn(1, 6, 16)
    y, _ = layer(x)
    _, state = layer(x[:, :5])
    result, _ = torch.compile(layer, backend="eager", fullgraph=True)(x[:, 5:], state)
    torch.testing.assert_close(result, y[:, 5:], atol=1e-5, rtol=1e-5)


def test_one_query_on_a_gpu_leaves_out_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN plans attention for each number of keys, which takes 36 ms."""
    enabled: list[bool] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    with FakeTensorMode(), torch.no_grad():
        keys = torch.empty(1, 2, 5, 8, device="cuda")
        for queries in (1, 3):
            softmax.sdpa(torch.empty(1, 2, queries, 8, device="cuda"), keys, keys, scale=1.0)
    assert enabled == [False, True]


@pytest.mark.parametrize("chosen", [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION])
def test_one_query_on_a_gpu_keeps_the_kernels_of_the_caller(
    chosen: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[tuple[bool, bool]] = []

    def record(*args: Any, **kwargs: Any) -> Tensor:
        switches = torch.backends.cuda
        enabled.append((switches.math_sdp_enabled(), switches.cudnn_sdp_enabled()))
        assert not switches.flash_sdp_enabled() and not switches.mem_efficient_sdp_enabled()
        return torch.empty_like(args[0])

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    with FakeTensorMode(), torch.no_grad(), sdpa_kernel(chosen):
        x = torch.empty(1, 2, 1, 8, device="cuda")
        softmax.sdpa(x, x, x, scale=1.0)
    assert enabled == [(chosen == SDPBackend.MATH, chosen == SDPBackend.CUDNN_ATTENTION)]
