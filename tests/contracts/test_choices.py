"""Every registered member: data, declared structure, and gradients.

Members come from the registry and are built from their declared fields, so registration adds a
member to these tests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.choices.member import Member
from recollect.recipe.canonical import REWRITES
from recollect.testing import declared, structure
from recollect.testing.declared import MEMBER_KINDS, ROUNDING, normal
from recollect.testing.draws import variants
from recollect.testing.structure import apply_features

MEMBERS = [cls for kind in MEMBER_KINDS for cls in generate.members(kind)]


def variants_of(kind: str, count: int = 6) -> list[pytest.param]:
    return [
        pytest.param(result, id=f"{type(result).__name__}-{i}")
        for cls in generate.members(kind)
        for i, result in enumerate(variants(cls, count, generate.POOL))
    ]


# -- members are data --------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MEMBERS, ids=lambda cls: cls.__name__)
def test_members_are_frozen_hashable_data(cls: type[Member]) -> None:
    declared.check_data(cls, generate.POOL)


@pytest.mark.parametrize("cls", MEMBERS, ids=lambda cls: cls.__name__)
def test_members_take_keywords_and_refuse_unknown_ones(cls: type[Member]) -> None:
    declared.check_keywords(cls, generate.POOL)


@pytest.mark.parametrize("cls", MEMBERS, ids=lambda cls: cls.__name__)
def test_bad_fields_are_refused_in_one_sentence(cls: type[Member]) -> None:
    declared.check_fields(cls, generate.POOL)


@pytest.mark.parametrize("cls", MEMBERS, ids=lambda cls: cls.__name__)
def test_declared_numbers_are_requested_once(cls: type[Member]) -> None:
    """Each quantity is a constant, a gate, or a param, and its initial value lies in its range."""
    for result in variants(cls, 12, generate.POOL):
        declared.check_numbers(result)


# -- bias --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", variants_of("bias", 10))
def test_bias_gradients(bias: rc.bias.Bias) -> None:
    """`error` is autograd's gradient of `loss`, and both equal the central finite difference."""
    structure.check_bias_gradients(bias)


@pytest.mark.parametrize("bias", variants_of("bias", 10))
def test_declared_affinity_is_true(bias: rc.bias.Bias) -> None:
    structure.check_affinity(bias)


@pytest.mark.parametrize("bias", variants_of("bias", 10))
def test_declared_targets_minimise_losses(bias: rc.bias.Bias) -> None:
    structure.check_target(bias)


@pytest.mark.parametrize("bias", variants_of("bias", 10))
def test_bias_is_finite_at_a_perfect_prediction(bias: rc.bias.Bias) -> None:
    """At e = 0 the error and its outer gradient are finite."""
    structure.check_perfect_prediction(bias)


def test_error_defaults_to_the_gradient_of_the_loss() -> None:
    class Quartic(rc.bias.Bias):
        def loss(self, prediction: Tensor, value: Tensor, gates: dict[str, Tensor]) -> Tensor:
            return 0.25 * (prediction - value).pow(4).sum(-1)

        def validate(self) -> None: ...

        def __init__(self) -> None: ...

    p, v = normal(5, 3, seed=1), normal(5, 3, seed=2)
    with torch.no_grad():
        result = Quartic().error(p, v, {})
    torch.testing.assert_close(result, (p - v).pow(3), atol=ROUNDING, rtol=ROUNDING)


# -- retention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("retention", variants_of("retention", 8))
@pytest.mark.parametrize("size", structure.LINK_SIZES)
def test_links_are_finite_and_differentiable(
    retention: rc.retention.Retention, size: float
) -> None:
    structure.check_link(retention, size)


@pytest.mark.parametrize("retention", variants_of("retention", 8))
def test_link_gradients_are_those_of_finite_differences(
    retention: rc.retention.Retention,
) -> None:
    structure.check_link_gradients(retention)


@pytest.mark.parametrize("retention", variants_of("retention", 8))
def test_declared_gains_of_links(retention: rc.retention.Retention) -> None:
    """`link_lipschitz` bounds the link; `step_gain` of a matrix and of its factors agree."""
    structure.check_link_gain(retention)


@pytest.mark.parametrize("retention", variants_of("retention", 8))
def test_declared_sums_of_decay_and_step_are_true(retention: rc.retention.Retention) -> None:
    structure.check_advance(retention)


@pytest.mark.parametrize("axis", ["in", "out"])
def test_simplex_sums_to_its_scale(axis: str) -> None:
    W = rc.retention.Simplex(scale=2.5, axis=axis).link(normal(2, 3, 4), {})
    torch.testing.assert_close(W.sum(-1 if axis == "in" else -2) - 2.5, torch.zeros(()).expand(
        2, 3 if axis == "in" else 4
    ).double(), atol=ROUNDING, rtol=0)  # fmt: skip
    assert (W >= 0).all()


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "hellinger", "chi_square"])
@pytest.mark.parametrize("axis", ["in", "out"])
def test_f_divergence_keeps_its_mass(kind: str, axis: str) -> None:
    gate = rc.retention.FDivergence(kind=kind, scale=1.7, axis=axis)
    A = normal(2, 3, 4, seed=1)
    for step in (normal(2, 3, 4, seed=2), 20 * normal(2, 3, 4, seed=3), torch.zeros(2, 3, 4)):
        for decay in (None, torch.tensor(-0.4).double().view(1, 1, 1)):
            W = gate.advance(A, step.double(), decay, {})
            assert (W >= 0).all()
            total = W.sum(-1 if axis == "in" else -2)
            # ζ is exact to the last bit of its bracket, and the slope amplifies that bit.
            torch.testing.assert_close(total, torch.full_like(total, 1.7), atol=1e-9, rtol=0)


def test_f_divergence_starts_uniform_from_nothing() -> None:
    W = rc.retention.FDivergence(scale=2.0).link(torch.zeros(3, 4).double(), {})
    torch.testing.assert_close(W, torch.full((3, 4), 0.5).double(), atol=ROUNDING, rtol=0)


def test_chi_square_reaches_exact_zeros() -> None:
    gate = rc.retention.FDivergence(kind="chi_square")
    W = gate.advance(
        torch.ones(1, 4).double(), 9 * torch.tensor([[1.0, 0, 0, -1]]).double(), None, {}
    )
    assert (W == 0).any()


def test_f_divergence_gradients_are_those_of_finite_differences() -> None:
    for kind in ("kl", "reverse_kl", "hellinger", "chi_square"):
        gate = rc.retention.FDivergence(kind=kind)
        A, step = normal(1, 3, 4, seed=1).abs(), normal(1, 3, 4, seed=2).requires_grad_()
        decay = torch.full((1, 1, 1), -0.2).double().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda a, s, d, gate=gate: gate.advance(a, s, d, {}), (A.requires_grad_(), step, decay)
        )


def test_kl_divergence_is_the_simplex_recurrence() -> None:
    """W^α e^{−ηg} of W = softmax(A), normalised: log W and A differ by a constant along an axis."""
    for decay in (None, rc.retention.Decay()):
        kl = rc.Recipe(retention=rc.retention.FDivergence(kind="kl", scale=1.5, decay=decay))
        dual = rc.Recipe(retention=rc.retention.Simplex(scale=1.5, decay=decay))
        x = generate.inputs(dual, T=9)
        assert x.init is not None
        start = dataclasses.replace(x, init=(x.init[0].softmax(-1),))
        y, y2 = (
            generate.run_recall(r, a, engine="reference")[0] for r, a in ((dual, x), (kl, start))
        )
        torch.testing.assert_close(y2, y, atol=1e-10, rtol=0)  # root finding to rounding, 9 times


def test_bregman_ranges() -> None:
    A = 3 * normal(3, 4)
    W = rc.retention.Bregman().link(A, {})
    assert ((W > 0) & (W < 1)).all()
    assert (rc.retention.Bregman(link_function="exp").link(A, {}) > 0).all()
    assert (rc.retention.Bregman(link_function="softplus").link(A, {}) > 0).all()
    assert (rc.retention.Bregman(link_function="tanh").link(A, {}).abs() < 1).all()


def test_ball_projects() -> None:
    gates = {"radius": torch.full((1, 1), 0.7).double()}
    for size in (0.01, 5.0):
        A = size * normal(2, 3, 4)
        W = rc.retention.Ball().link(A, gates)
        norms = W.flatten(1).norm(dim=1)
        assert (norms <= 0.7 + ROUNDING).all()
        assert torch.equal(W, A) == (size < 0.1)
    zero = torch.zeros(3, 4).double().requires_grad_()
    (slope,) = torch.autograd.grad(rc.retention.Ball().link(zero, gates).sum(), zero)
    assert torch.equal(slope, torch.ones(3, 4).double())  # the identity inside the ball


def test_elastic_net_zeros_are_exact() -> None:
    gates = {"tau": torch.full((1, 1), 0.5).double()}
    A = normal(30, 30)
    W = rc.retention.ElasticNet().link(A, gates)
    assert torch.equal(W == 0, A.abs() <= 0.5)
    smooth = rc.retention.ElasticNet(smooth=True).link(A, gates)
    assert torch.equal(smooth.sign(), A.sign())


@pytest.mark.parametrize("q", [1.5, 2.0, 3.0, 4.0])
def test_lq_mirror_inverts_the_gradient_of_its_potential(q: float) -> None:
    """W = ∇ ½‖A‖_q², so A = ∇ ½‖W‖²_{q'} with q' = q/(q−1)."""
    A = normal(3, 4).requires_grad_()
    W = rc.retention.Lq(q=q).link(A, {})
    (slope,) = torch.autograd.grad(0.5 * (A.abs() ** q).sum() ** (2 / q), A)
    torch.testing.assert_close(W, slope, atol=ROUNDING, rtol=ROUNDING)
    dual, point = q / (q - 1), W.detach().requires_grad_()
    (back,) = torch.autograd.grad(0.5 * (point.abs() ** dual).sum() ** (2 / dual), point)
    torch.testing.assert_close(back, A, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_lq_survives_float32_powers(size: float) -> None:
    A = (size * normal(3, 4)).float()
    exact = rc.retention.Lq(q=4.0).link(A.double(), {})
    result = rc.retention.Lq(q=4.0).link(A, {})
    torch.testing.assert_close(result.double(), exact, atol=0, rtol=1e-5)  # float32 rounding
    ball = rc.retention.Ball().link(A, {"radius": torch.ones(1, 1)})
    assert float(ball.double().norm()) == pytest.approx(
        min(1.0, float(A.double().norm())), rel=1e-5
    )


# -- memories and algorithms: declared structure -------------------------------------------------


@pytest.mark.parametrize(
    "memory", [*variants_of("memory"), *(rc.memory.MLP(norm=norm) for norm in ("layer", "rms"))]
)
def test_declared_shapes_of_memories_are_true(memory: rc.memory.Memory) -> None:
    """``linear`` means W x alone; a chain is its maps, its activation and ``output_map``."""
    structure.check_memory(memory)


@pytest.mark.parametrize("algorithm", variants_of("algorithm"))
def test_declared_recursions_of_algorithms_are_true(
    algorithm: rc.algorithm.Algorithm,
) -> None:
    """`recursion` is the linear recursion of `update`."""
    structure.check_recursion(algorithm)


@pytest.mark.parametrize("context", variants_of("context"))
def test_declared_weights_of_contexts_are_true(context: rc.context.Context) -> None:
    structure.check_context(context)


# -- features ----------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_polynomial_features_are_their_kernel(degree: int) -> None:
    features, K = rc.features.Polynomial(degree=degree), 4
    raw = 0.3 * normal(1, degree + 1, seed=3)
    q, k = normal(5, K, seed=1), normal(6, K, seed=2)
    result = (
        apply_features(features, q, {"log_coefficients": raw})
        @ apply_features(features, k, {"log_coefficients": raw}).T
    )
    expected = sum(raw[0, i].exp() * (q @ k.T) ** i for i in range(degree + 1))
    torch.testing.assert_close(result, expected, atol=1e-11, rtol=1e-11)  # up to 35 terms
    (param,) = features.params()
    assert param.init == pytest.approx([-math.lgamma(i + 1) for i in range(degree + 1)])


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("temperature", [None, 1.5])
def test_taylor_features_are_the_exponentials_series(order: int, temperature: float | None) -> None:
    features = rc.features.Taylor(order=order, temperature=temperature)
    q, k = normal(5, 4, seed=1), normal(6, 4, seed=2)
    x = q @ k.T / (2.0 if temperature is None else temperature)
    expected = sum(x**i / math.factorial(i) for i in range(order + 1))
    result = apply_features(features, q, {}) @ apply_features(features, k, {}).T
    torch.testing.assert_close(result, expected, atol=1e-11, rtol=1e-11)


# -- rewrites ----------------------------------------------------------------------------------

Decay, Muon = rc.retention.Decay, rc.algorithm.Muon
EXAMPLES: dict[str, list[rc.Recipe]] = {
    "a window of one is online": [
        rc.Recipe(context=rc.context.Window(size=1, gated=False), algorithm=rc.algorithm.Momentum())
    ],
    "one linear map is a matrix": [
        rc.Recipe(
            memory=rc.memory.MLP(depth=1, residual=False, expansion=2),
            retention=Decay(per="key_value"),
            algorithm=rc.algorithm.Momentum(batch_size=3),
        )
    ],
    "a decay that does nothing more": [
        rc.Recipe(retention=Decay(alpha=1.0)),
        rc.Recipe(retention=Decay(alpha=0.8, per="key", when="before")),
        rc.Recipe(bias=rc.bias.DotProduct(), retention=Decay(when="before")),
        rc.Recipe(
            bias=rc.bias.DotProduct(),
            retention=rc.retention.Simplex(decay=Decay(when="before")),
            algorithm=rc.algorithm.Momentum(),
        ),
        rc.Recipe(retention=rc.retention.Bregman(decay=Decay(alpha=1.0))),
    ],
    "L_2 is the identity link": [
        rc.Recipe(retention=rc.retention.Lq(q=2.0)),
        rc.Recipe(retention=rc.retention.Lq(q=2.0, form="as_published", decay=Decay())),
    ],
    "a batch of one is a token": [rc.Recipe(retention=rc.retention.Bregman(link_every="batch"))],
    "zero momentum is descent": [
        rc.Recipe(algorithm=rc.algorithm.Momentum(momentum=0.0, batch_size=2, per="value")),
        rc.Recipe(algorithm=rc.algorithm.Momentum(momentum=0.0, momentum_on="value")),
    ],
    "no orthogonalisation is momentum": [
        rc.Recipe(algorithm=Muon(ns_steps=0, lr_position="inside", batch_size=2)),
        rc.Recipe(algorithm=Muon(ns_steps=0, lr="learned")),
        rc.Recipe(algorithm=Muon(ns_steps=0, lr=0.3), retention=Decay()),
    ],
    "the mean of one is the sum": [
        rc.Recipe(algorithm=rc.algorithm.GradientDescent(reduction="mean"))
    ],
    "a dot product that erases is L2": [
        rc.Recipe(
            bias=rc.bias.DotProduct(),
            retention=Decay(),
            algorithm=rc.algorithm.GradientDescent(erasure=1.0, batch_size=2),
        )
    ],
    "a robustness radius of zero is L2": [rc.Recipe(bias=rc.bias.ValueRobust(radius=0.0))],
}


def test_every_rewrite_has_an_example() -> None:
    assert EXAMPLES.keys() == REWRITES.keys()


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("rewrite", "recipe"),
    [
        pytest.param(REWRITES[name], recipe, id=f"{name}-{i}")
        for name, recipes in EXAMPLES.items()
        for i, recipe in enumerate(recipes)
    ],
)
def test_rewrites_are_identities(
    rewrite: Callable[[rc.Recipe], rc.Recipe], recipe: rc.Recipe, zero: bool
) -> None:
    """Outputs and their gradients are equal, also from a memory of zeros."""
    simple = rewrite(recipe)
    assert simple != recipe
    assert rewrite(simple) == simple
    # The example must show the full rewrite: K ≠ V, and several maps for a deep memory.
    x = generate.inputs(recipe, K=4, V=3, T=7, zero=zero and not recipe.needs_init())

    def outputs(which: rc.Recipe) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = x.with_grad()
        requested = {gate.name for gate in which.gates()}
        gates = {name: a for name, a in leaves.gates.items() if name in requested}
        expected = {param.name for param in which.params()}
        params = {name: a for name, a in leaves.params.items() if name in expected}
        part = dataclasses.replace(leaves, gates=gates, params=params)
        y, _ = generate.run_recall(which, part, engine="reference")
        named = leaves.tensors()
        slopes = torch.autograd.grad(
            (y * normal(*y.shape, seed=5)).sum(),
            list(named.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        return y, dict(zip(named, slopes, strict=True))

    (y, slopes), (twin, twins) = outputs(recipe), outputs(simple)
    assert generate.relative_error(twin, y) < ROUNDING
    wrong, name = generate.largest_error(twins, slopes)
    assert wrong < 1e-11, f"gradient of {name}"  # a longer sum than the outputs'


def test_rewrites_leave_other_recipes_unchanged() -> None:
    """The dot product of a deep memory depends on W, so the position of the decay matters."""
    deep = rc.Recipe(
        memory=rc.memory.MLP(), bias=rc.bias.DotProduct(), retention=Decay(when="before")
    )
    assert deep.canonical() == deep
    moving = rc.Recipe(algorithm=Muon(ns_steps=0))  # η per token, outside
    assert moving.canonical() == moving
