"""Exact feature maps against formulas, and the error of random maps against their kernel.

Exact maps are compared with the paper's formula, written out here. Random maps estimate a kernel:
their error over seeds must fall as one over the square root of their number.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.contracts import generate
from torch import Tensor
from torch.nn import functional

import recollect as rc
from recollect.fields import Param
from recollect.lm import RecollectConfig, RecollectForCausalLM
from recollect.recipe import initial_params as draws

features = rc.features
EXACT = {"atol": 1e-12, "rtol": 1e-12}
K = 8
SEEDS = 64


def normal(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def unit(*shape: int, seed: int) -> Tensor:
    return functional.normalize(normal(*shape, seed=seed), dim=-1)


def params_of(
    features: rc.features.Features, H: int = 1, K: int = K, seed: int = 0
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    recipe = rc.Recipe(features=features)
    return rc.initial_params(recipe, H=H, K=K, V=K, generator=g, dtype=torch.float64)


def lift(
    features: rc.features.Features,
    x: Tensor,
    params: dict[str, Tensor],
    side: str = "key",
    position: Tensor | None = None,
) -> Tensor:
    """Return features ``[T, F]`` of tokens ``[T, K]`` of the single head."""
    steps = torch.arange(x.shape[0]) if position is None else position
    return features.phi(x[None, :, None, None], params, side, steps[None])[0, :, 0, 0]


def kernel(
    features: rc.features.Features, q: Tensor, k: Tensor, params: dict[str, Tensor] | None = None
) -> Tensor:
    params = params_of(features, K=q.shape[-1]) if params is None else params
    return lift(features, q, params, "query") @ lift(features, k, params, "key").T


# -- estimates of a kernel ---------------------------------------------------------------------


def error(features: rc.features.Features, q: Tensor, k: Tensor, target: Tensor) -> float:
    """Return the root mean square over pairs and seeds, relative to the target."""
    total = 0.0
    for seed in range(SEEDS):
        result = kernel(features, q, k, params_of(features, K=q.shape[-1], seed=seed))
        total += float((result - target).square().mean() / target.square().mean())
    return math.sqrt(total / SEEDS)


def slope(sizes: list[int], errors: list[float]) -> float:
    """Return the least squares slope of log error on log size."""
    x, y = (torch.tensor(z, dtype=torch.float64).log() for z in (sizes, errors))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


SIZES = [16, 32, 64, 128, 256, 512, 1024]
Q, KEYS = unit(20, K, seed=1), unit(20, K, seed=2)
SOFTMAX = (Q @ KEYS.T / math.sqrt(K)).exp()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("performer", lambda m: features.PositiveRandom(features=m)),
        pytest.param(
            "independent",
            lambda m: features.PositiveRandom(features=m, orthogonal=False),
            marks=pytest.mark.slow,
        ),
        ("rfa", lambda m: features.RandomFourier(frequencies=m)),
    ],
)
def test_error_to_softmax_falls_as_one_over_the_root(name: str, make) -> None:
    """Slope −1/2 ± 0.04: 64 seeds determine each error to about 10%, over log 1024/16 = 4.2.

    Measured: −0.503 (orthogonal), −0.516 (independent), −0.500 (Fourier).
    """
    errors = [error(make(m), Q, KEYS, SOFTMAX) for m in SIZES]
    assert slope(SIZES, errors) == pytest.approx(-0.5, abs=0.04), errors
    assert errors[-1] < 0.04 < errors[0]


def test_orthogonal_directions_spread_less() -> None:
    """Performer, theorem 2: an equal mean and a smaller mean squared error at m ≤ K."""
    one, other = (
        error(features.PositiveRandom(features=K, orthogonal=flag), Q, KEYS, SOFTMAX)
        for flag in (True, False)
    )
    assert one < 0.95 * other


def test_gaussian_features_estimate_the_gaussian() -> None:
    """At σ ≠ 1, and in the limit softmax's kernel up to factors of the norms."""
    result = features.RandomFourier(frequencies=20_000, kernel="gaussian", temperature=2.0)
    params = params_of(result)
    sigma = 0.5 + torch.rand(1, K, generator=torch.Generator().manual_seed(3)).double()
    params["bandwidth"] = sigma
    distance = ((Q[:, None] - KEYS[None]) * sigma).square().sum(-1)
    # 20,000 cosines: standard error 1/√(2 · 20000) = 0.005 each, 400 pairs.
    torch.testing.assert_close(
        kernel(result, Q, KEYS, params), (-distance / 4).exp(), atol=0.025, rtol=0
    )
    soft = features.RandomFourier(frequencies=20_000, temperature=2.0)
    want = (Q * sigma**2 @ KEYS.T / 2).exp()
    torch.testing.assert_close(kernel(soft, Q, KEYS, params), want, atol=0.0, rtol=0.2)


def test_frequency_domain_error_falls_to_its_kernel() -> None:
    """mean_i exp((c_i·(q + k))²/2) over the rows c_i of the DCT, written out here.

    Short keys, because the estimate has a variance only if |c·(q + k)| is moderate.
    """
    q, k = 0.6 * unit(12, K, seed=1), 0.6 * unit(12, K, seed=2)
    rows = torch.stack(
        [
            torch.tensor([math.cos(math.pi * (2 * i + 1) * j / (2 * K)) for i in range(K)])
            * math.sqrt((1 if j == 0 else 2) / K)
            for j in range(K)
        ]
    ).double()
    torch.testing.assert_close(rows @ rows.T, torch.eye(K).double(), atol=1e-6, rtol=0)
    want = (0.5 * ((q[:, None] + k[None]) @ rows.T).square()).exp().mean(-1)
    sizes = [1, 4, 16, 64, 256]
    errors = [error(features.FrequencyDomain(copies=n), q, k, want) for n in sizes]
    assert slope(sizes, errors) == pytest.approx(-0.5, abs=0.06), errors
    assert errors[-1] < 0.02


@pytest.mark.parametrize("degree", [4, 8])
def test_sketched_polynomials(degree: int) -> None:
    """Nonnegative, and within theorem 1.1: error ε ≤ 2 √(p/r) ‖q‖^p ‖k‖^p.

    For small r, fourth moments of Gaussian products make the error fall faster.
    """
    q, k = unit(20, K, seed=1), unit(20, K, seed=2)
    k[:10] = q[:10]  # some pairs that match
    want = (q @ k.T) ** degree
    sizes = [64, 128, 256]
    errors = []
    for r in sizes:
        built = features.PolynomialSketch(degree=degree, size=r)
        total = 0.0
        for seed in range(24):
            result = kernel(built, q, k, params_of(built, seed=seed))
            assert (result >= -1e-12).all()  # (M(q)·M(k))² up to rounding
            # The measure of theorem 1.1: Σ (result − want)² against Σ ‖q‖^2p ‖k‖^2p, one per pair.
            total += float((result - want).square().mean())
        errors.append(math.sqrt(total / 24))
    assert all(e < 2 * math.sqrt(degree / r) for e, r in zip(errors, sizes, strict=True)), errors
    assert slope(sizes, errors) < -0.4, errors


def test_sketch_of_degree_four_is_its_algorithm() -> None:
    """M = (G_1 x) ⊙ (G_2 x)/√r, φ(q)·φ(k) = (M(q)·M(k))²."""
    result = features.PolynomialSketch(degree=4, size=5)
    params = params_of(result)
    one, two = params["sketch"][0]
    q, k = normal(6, K, seed=1), normal(7, K, seed=2)
    mq, mk = ((x @ one.T) * (x @ two.T) / math.sqrt(5) for x in (q, k))
    torch.testing.assert_close(kernel(result, q, k, params), (mq @ mk.T) ** 2, **EXACT)


def test_sketch_of_degree_eight_is_a_tree() -> None:
    result = features.PolynomialSketch(degree=8, size=3)
    params = params_of(result)
    leaf, node = params["sketch"][0], params["resketch"][0]
    q, k = normal(6, K, seed=1), normal(7, K, seed=2)

    def sketch(x: Tensor) -> Tensor:
        first, second = (
            (x @ leaf[2 * j].T) * (x @ leaf[2 * j + 1].T) / math.sqrt(3) for j in range(2)
        )
        return (first @ node[0].T) * (second @ node[1].T) / math.sqrt(3)

    want = (sketch(q) @ sketch(k).T) ** 2
    torch.testing.assert_close(kernel(result, q, k, params), want, **EXACT)


def test_a_sketch_of_degree_two_is_exact() -> None:
    q, k = normal(6, K, seed=1), normal(7, K, seed=2)
    result = features.PolynomialSketch(degree=2)
    assert result.params() == ()
    torch.testing.assert_close(kernel(result, q, k), (q @ k.T) ** 2, **EXACT)
    with pytest.raises(rc.RecipeError, match="power of two"):
        features.PolynomialSketch(degree=6)


# -- exact maps --------------------------------------------------------------------------------


def test_cosine_decays_with_distance() -> None:
    M = 10
    q, k = normal(M + 1, K, seed=1), normal(M + 1, K, seed=2)
    t = torch.arange(M + 1).double()
    want = (q.relu() @ k.relu().T) * (math.pi * (t[:, None] - t[None]) / (2 * M)).cos()
    result = kernel(features.Cosine(length=M), q, k)
    torch.testing.assert_close(result, want, atol=1e-12, rtol=1e-9)
    assert (result > -1e-12).all()


def test_cosine_is_nonnegative() -> None:
    """Positions beyond M are clamped, so weights stay nonnegative."""
    q, k = normal(60, K, seed=1), normal(60, K, seed=2)
    assert (kernel(features.Cosine(length=10), q, k) > -1e-12).all()


def test_cosine_counts_tokens_not_associations() -> None:
    """Two associations of a token have the position of the token."""
    result = rc.Recipe(
        features=features.Cosine(length=20),
        bias=rc.bias.DotProduct(),
        algorithm=rc.algorithm.GradientDescent(updates_per_token=2, lr=1.0),
    )
    x = generate.inputs(result, B=1, T=7, H=1, K=4, V=3, zero=True)
    q, k, v = x.q[0, :, 0], x.k[0, :, 0], x.v[0, :, 0]  # [T, K], [T, 2, K], [T, 2, V]
    t = torch.arange(7).double()
    fade = (math.pi * (t[:, None] - t[None]) / 40).cos().tril()
    want = torch.einsum("tk,snk,ts,snv->tv", q.relu(), k.relu(), fade, v)
    for method in ("reference", "linear"):
        y, _ = generate.run_recall(result, x, engine=method)
        torch.testing.assert_close(y[0, :, 0], want, **EXACT)
        first, first_state = generate.run_recall(result, x.slice_tokens(0, 4), engine=method)
        rest, _ = generate.run_recall(
            result, x.slice_tokens(4, 7), engine=method, state=first_state
        )
        torch.testing.assert_close(torch.cat([first, rest], 1), y, **EXACT)


def test_hedgehog_has_a_map_for_each_side() -> None:
    x = normal(6, K, seed=1)
    params = params_of(features.Hedgehog())
    assert torch.equal(params["feature_map"][0, 0], torch.eye(K).double())
    params = {name: p + 0.1 * normal(*p.shape, seed=4) for name, p in params.items()}
    for index, side in enumerate(("query", "key")):
        z = x @ params["feature_map"][0, index].T + params["feature_shift"][0, index]
        want = torch.cat([z.exp(), (-z).exp()], dim=-1)
        plain = lift(features.Hedgehog(normalize=False), x, params, side)
        torch.testing.assert_close(plain, want, **EXACT)
        result = lift(features.Hedgehog(), x, params, side)
        torch.testing.assert_close(result, want / want.sum(-1, keepdim=True), **EXACT)


def test_learned_relu() -> None:
    result, x = features.LearnedRelu(features=3), normal(6, K, seed=1)
    params = params_of(result)
    params["feature_shift"] = normal(1, 3, seed=2)
    want = (x @ params["feature_map"][0].T + params["feature_shift"][0]).relu()
    torch.testing.assert_close(lift(result, x, params), want, **EXACT)


def test_quadratic() -> None:
    result, q, k = features.Quadratic(), normal(6, K, seed=1), normal(7, K, seed=2)
    params = params_of(result)
    params = {name: p + 0.3 * normal(*p.shape, seed=3) for name, p in params.items()}

    def moved(x: Tensor, side: int) -> Tensor:
        spread = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        normed = (x - x.mean(-1, keepdim=True)) / spread
        return params["feature_scale"][0, side] * normed + params["feature_shift"][0, side]

    want = (moved(q, 0) @ moved(k, 1).T) ** 2 / K
    torch.testing.assert_close(kernel(result, q, k, params), want, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp_kernel(nu: int) -> None:
    q, k = normal(6, K, seed=1), normal(7, K, seed=2)
    want = torch.zeros(6, 7, dtype=torch.float64)
    rq, rk = (torch.cat([x, -x], dim=-1).relu() for x in (q, k))
    for j in range(1, nu + 1):
        for i in range(2 * K):
            other = (i + j) % (2 * K)
            want += torch.outer(rq[:, i] * rq[:, other], rk[:, i] * rk[:, other])
    torch.testing.assert_close(kernel(features.Dpfp(nu=nu), q, k), want, **EXACT)


def test_normalised_dpfp_sums_to_one_or_zero() -> None:
    x = normal(9, K, seed=1)
    x[3] = 0
    total = lift(features.Dpfp(normalize=True), x, {}).sum(-1)
    torch.testing.assert_close(total, torch.tensor([1.0] * 3 + [0.0] + [1.0] * 5).double(), **EXACT)


@pytest.mark.parametrize(
    "feature_map",
    [features.Polynomial(degree=3), features.Taylor(), features.PolynomialSketch(degree=2)],
)
def test_monomials_have_gradients_of_gradients(feature_map: rc.features.Features) -> None:
    params = params_of(feature_map, K=3)
    x = normal(2, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: lift(feature_map, x, params), (x,))
    assert torch.autograd.gradgradcheck(lambda x: lift(feature_map, x, params), (x,))


# -- random params -----------------------------------------------------------------------------


def test_orthogonal_rows_are_orthogonal_and_gaussian() -> None:
    param = Param(name="w", owner="test", axes=("m", "K"), draw="orthogonal")
    g = torch.Generator().manual_seed(0)
    w = draws.initial_value(param, (400, 20, 8), generator=g)
    gram = w[:, :8] @ w[:, :8].mT
    torch.testing.assert_close(
        gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2)),
        torch.zeros_like(gram),
        atol=1e-12,
        rtol=0,
    )
    # Each row is N(0, I): 64,000 entries determine a second moment to 0.6% (one sigma).
    second = torch.einsum("hmk,hml->kl", w, w) / (400 * 20)
    torch.testing.assert_close(second, torch.eye(8).double(), atol=0.05, rtol=0)
    assert float(w.mean()) == pytest.approx(0.0, abs=0.02)


def test_unknown_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="draw must be one of"):
        Param(name="w", owner="test", draw="cauchy")


def test_params_start_as_declared() -> None:
    recipe = rc.Recipe(
        features=features.Polynomial(), retention=rc.retention.Decay(alpha="learned")
    )
    y = rc.initial_params(recipe, H=3, K=4, V=4)
    assert y["log_coefficients"].shape == (3, 3)
    torch.testing.assert_close(y["log_coefficients"][1].exp(), torch.tensor([1.0, 1.0, 0.5]))
    assert y["decay"].tolist() == pytest.approx([0.98] * 3)


RANDOM = ("performer", "rfa", "dijiang", "polysketchformer")
FROZEN = {"directions", "frequencies", "sketch"}


@pytest.mark.parametrize("name", RANDOM)
def test_layers_store_random_params_and_do_not_train_them(name: str) -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(16, 2)
    frozen = {n: p for n, p in layer.params.items() if n in FROZEN}
    assert frozen
    for number in frozen.values():
        assert number.bias is not None
        assert not number.bias.requires_grad
        assert float(number.bias.std()) > 0.5
        assert not torch.equal(number.bias[0], number.bias[1])  # heads differ
    copy = rc.zoo.get(name).build(16, 2)
    x = torch.randn(2, 9, 16)
    assert not torch.allclose(copy(x)[0], layer(x)[0])
    copy.load_state_dict(layer.state_dict())
    assert torch.equal(copy(x)[0], layer(x)[0])
    layer(x)[0].sum().backward()
    assert all(number.bias.grad is None for number in frozen.values())


def test_options_may_train_directions_or_fix_a_map() -> None:
    preset = rc.zoo.get("performer")
    gate = rc.GateOptions(source="learned")
    layer = preset.build(16, 2, options=rc.LayerOptions(gate_options={"directions": gate}))
    assert layer.params["directions"].bias.requires_grad
    fixed = rc.LayerOptions(gate_options={"feature_map": rc.GateOptions(source="constant")})
    param = rc.zoo.get("hedgehog").build(16, 2, options=fixed).params["feature_map"]
    assert not param.bias.requires_grad
    assert torch.equal(param.bias[0, 0], torch.eye(8))
    with pytest.raises(rc.RecipeError, match="samples its values"):
        preset.build(
            16, 2, options=rc.LayerOptions(gate_options={"directions": rc.GateOptions(init=1.0)})
        )


def test_checkpoints_contain_the_directions(tmp_path) -> None:
    """A saved language model loads the same directions, and trains none."""
    preset = rc.zoo.get("performer")
    config = RecollectConfig.from_recipes(
        {"performer": (preset.recipe, preset.options)},
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = RecollectForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    repeated = RecollectForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(12)[None] % 32
    with torch.no_grad():
        torch.testing.assert_close(repeated(tokens).logits, model(tokens).logits, atol=0, rtol=0)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 2
    assert all("directions" in name for name in frozen)
    assert rc.lm.parameter_count(config) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


# -- lengths that leave the range of the dtype -----------------------------------------------------


def long_tokens(length: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (unit(1, 24, 2, 64, seed=i) for i in range(3))
    return (q * length).to(dtype), (k * length).to(dtype), v.to(dtype)


def test_random_features_refuse_too_long_keys() -> None:
    """float64 is the oracle: below the limit no digit is lost, and a split gives equal outputs."""
    recipe = rc.zoo.get("performer").recipe
    result = recipe.features
    end = result.longest(64, torch.float32)
    assert end is not None and 20 < end < 30  # √(8 (87.3 − log 256)) = 25.6
    params = params_of(result, H=2, K=64)
    wide, _ = rc.recall(recipe, *long_tokens(0.999 * end, torch.float64), params=params)
    params = {name: x.float() for name, x in params.items()}
    tokens = long_tokens(0.999 * end, torch.float32)
    full, _ = rc.recall(recipe, *tokens, params=params)
    torch.testing.assert_close(full, wide.float(), atol=1e-4, rtol=1e-4)
    a, state = rc.recall(recipe, *(x[:, :9] for x in tokens), params=params)
    b, _ = rc.recall(recipe, *(x[:, 9:] for x in tokens), params=params, state=state)
    torch.testing.assert_close(torch.cat([a, b], 1), full, atol=1e-5, rtol=1e-5)
    for side in range(2):
        longer = list(tokens)
        longer[side] = longer[side] * 1.01
        with pytest.raises(ValueError, match=f"cannot lift a {('query', 'key')[side]} of length"):
            rc.recall(recipe, *longer, params=params)
    padded = [torch.cat([x, x * 100], 1) for x in tokens]
    mask = torch.arange(48)[None] < 24
    y, _ = rc.recall(recipe, *padded, params=params, attention_mask=mask)
    torch.testing.assert_close(y[:, :24], full, atol=1e-6, rtol=1e-6)


def test_layer_of_random_features_refuses_long_inputs() -> None:
    torch.manual_seed(0)
    layer = rc.zoo.get("performer").build(d_model=64, num_heads=1)
    x = torch.randn(2, 40, 64)
    y, _ = layer(3 * x)
    assert float((y == 0).double().mean()) == 0
    for scale in (10, 30):
        with pytest.raises(ValueError, match=r"cannot lift a .* higher temperature, or float64"):
            layer(scale * x)
    layer.double()(10 * x.double())  # float64 has this range
