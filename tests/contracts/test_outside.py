"""Members of a user's package run by what they declare.

`tests.contracts.outside` defines the members. Suites that draw from the registry compare them with
the reference in every combination. This module holds single faults.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.contracts import generate
from tests.contracts.outside import (
    ChannelRates,
    Damped,
    Emphasis,
    Everything,
    Fading,
    Folded,
    FullPass,
    Latest,
    LookAhead,
    Plane,
    Skipping,
    Spread,
    Tempered,
    Values,
)
from torch import Tensor

import recollect as rc
from recollect.engines.deep.structure import chain_of
from recollect.engines.select import select_engine

EXACT = 1e-10  # float64, another grouping of the same sums
Solver = rc.algorithm.LeastSquares


def check(recipe: rc.Recipe, engine: str, *, T: int = 9) -> None:
    """Compare outputs, state and gradients of the engine that runs a recipe with the reference."""
    assert select_engine(recipe).engine.name == engine
    x = generate.inputs(recipe, T=T)
    y, state, slopes = generate.gradients(recipe, x, engine=engine)
    expected, expected_state, twins = generate.gradients(recipe, x, engine="reference")
    assert generate.relative_error(y, expected) < EXACT
    assert (
        generate.largest_error(
            generate.flatten_state(state), generate.flatten_state(expected_state)
        )[0]
        < EXACT
    )
    assert generate.largest_error(slopes, twins)[0] < 1e-9


# -- declared structure ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["input", "learned", 0.3])
def test_rate_per_value_channel_under_any_field_name(
    kind: float | str,
) -> None:
    """The linear engine reads the axes of the rate, and needs no field ``per``."""
    recipe = rc.Recipe(algorithm=ChannelRates(speeds=kind))
    check(recipe, "linear")
    x = generate.inputs(recipe, B=1, T=6, H=1)
    y, _ = generate.run_recall(recipe, x)
    assert x.init is not None
    W, outputs = x.init[0][0], []
    for t in range(6):  # the update by hand
        k, v = x.k[0, t, 0], x.v[0, t, 0]
        eta = kind if isinstance(kind, float) else x.params["lr"][0] if kind == "learned" else None
        eta = x.gates["lr"][0, t, 0] if eta is None else eta
        W = W - torch.outer(eta * (W @ k - v), k)
        outputs.append(W @ x.q[0, t, 0])
    torch.testing.assert_close(y[0, :, 0], torch.stack(outputs), atol=1e-11, rtol=1e-11)


def test_rate_per_value_channel_in_every_engine() -> None:
    check(rc.Recipe(memory=rc.memory.MLP(), algorithm=ChannelRates(batch_size=3)), "deep")
    check(rc.Recipe(bias=rc.bias.Huber(), algorithm=ChannelRates()), "deep")
    with pytest.raises(rc.RecipeError, match="a step must be a multiple of the gradient"):
        rc.Recipe(features=rc.features.Exponential(), algorithm=ChannelRates())


@pytest.mark.parametrize("form", ["refreshed", "decaying", "constant"])
@pytest.mark.parametrize("algorithm", ["exact", "diagonal", "spectral", "conjugate_gradient"])
def test_decay_under_any_field_name(form: str, algorithm: str) -> None:
    """The least-squares engine finds the decay by its role, and not by a field ``decay``."""
    if algorithm == "exact":
        solver: rc.algorithm.Algorithm = Solver(ridge_schedule=form, refresh_every=4)
    else:
        solver = rc.algorithm.Preconditioned(kind=algorithm)
    for context, twin in (
        (Fading(), rc.context.Prefix(decay=0.9)),
        (Fading(forgetting="input"), rc.context.Prefix(decay="input")),
        (Fading(forgetting=1.0, trust="input"), rc.context.Prefix(weight="input")),
    ):
        recipe = rc.Recipe(context=context, algorithm=solver)
        check(recipe, "least_squares")
        x = generate.inputs(recipe, T=9)
        y, expected = (generate.run_recall(r, x)[0] for r in (recipe, recipe.replace(context=twin)))
        assert torch.equal(y, expected)
        assert rc.cost(recipe).forward_flops == rc.cost(recipe.replace(context=twin)).forward_flops


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": Solver()},
        {"algorithm": rc.algorithm.Preconditioned(kind="diagonal")},
        {"algorithm": rc.algorithm.GradientDescent(updates_per_token=2)},
        {"algorithm": FullPass()},
        {"algorithm": rc.algorithm.Analytic(ridge=1.0), "features": rc.features.Exponential()},
    ],
)
def test_context_without_numbers_weighs_all_associations_equally(
    changes: dict[str, rc.choices.member.Member],
) -> None:
    recipe = rc.Recipe(context=Everything(), **changes)  # type: ignore[arg-type]
    x = generate.inputs(recipe, T=7)
    y, _ = generate.run_recall(recipe, x)
    expected, _ = generate.run_recall(recipe.replace(context=rc.context.Prefix()), x)
    assert torch.equal(y, expected)
    assert "Σ_(i≤t)" in str(rc.explain(recipe))


def test_horizon_under_any_field_name() -> None:
    recipe = rc.Recipe(context=Latest(reach=3))
    check(recipe, "linear")
    x = generate.inputs(recipe, T=7)
    window = recipe.replace(context=rc.context.Window(size=3, gated=False))
    assert torch.equal(generate.run_recall(recipe, x)[0], generate.run_recall(window, x)[0])
    assert str(rc.explain(recipe)).splitlines()[1:3] == str(rc.explain(window)).splitlines()[1:3]


def test_residual_under_any_field_name() -> None:
    """A chain adds the raw key when the memory's `residual` is true, under any field name."""
    recipe = rc.Recipe(memory=Skipping(skip=True), algorithm=rc.algorithm.Momentum(batch_size=3))
    check(recipe, "deep")
    with pytest.raises(rc.RecipeError, match="needs K = V"):
        recipe.axes(4, 3)


@pytest.mark.parametrize(
    ("loss", "normalize"),
    [
        (rc.bias.L2(), False),
        (rc.bias.L2(), True),
        (rc.bias.DotProduct(), False),
        (rc.bias.Huber(), True),
        (Emphasis(), True),
    ],
)
def test_custom_output_map(loss: rc.bias.Bias, normalize: bool) -> None:
    """The map after the last linear map of a chain may be any function, also a bounded one."""
    rule = rc.algorithm.Momentum(batch_size=3, normalized_steps=normalize)
    plain = rc.Recipe(bias=loss, retention=rc.retention.Decay(), algorithm=rule)
    for memory in (Folded(), Spread(), Spread(mixes=False)):
        recipe = plain.replace(memory=memory)
        assert chain_of(recipe) is not None
        check(recipe, "deep")


def test_logarithmic_param_of_a_bias() -> None:
    """A param of a bias that is declared with log=True reaches the loss as a logarithm."""
    for scale in ("learned", "input", 0.7):
        for memory in (rc.memory.Matrix(), rc.memory.MLP(residual=False)):
            check(rc.Recipe(bias=Tempered(scale=scale), memory=memory), "deep")
        full = rc.Recipe(
            bias=Tempered(scale=scale),
            context=rc.context.Prefix(),
            algorithm=rc.algorithm.GradientDescent(updates_per_token=2),
        )
        assert torch.isfinite(generate.run_recall(full, generate.inputs(full))[0]).all()


def test_algorithm_without_a_rate_steps_at_rate_one_with_a_probe() -> None:
    recipe = rc.Recipe(bias=rc.bias.L2(probe=rc.bias.Probe()), algorithm=FullPass())
    check(recipe, "linear")
    one = recipe.replace(algorithm=rc.algorithm.GradientDescent(lr=1.0))
    x = generate.inputs(recipe)
    assert torch.equal(generate.run_recall(recipe, x)[0], generate.run_recall(one, x)[0])
    check(recipe.replace(features=rc.features.Exponential()), "kernel")


def test_canonical_form_keeps_a_decay_under_any_field_name() -> None:
    """`canonical` needs no field ``decay``."""
    decay = rc.retention.Decay(alpha=0.8, per="key")
    recipe = rc.Recipe(retention=Damped(forget=decay))
    simple = recipe.canonical()
    x = generate.inputs(recipe)
    torch.testing.assert_close(generate.run_recall(simple, x)[0], generate.run_recall(recipe, x)[0])
    check(recipe, "deep")


def test_custom_link_refuses_a_read_before_the_write() -> None:
    """A read before the write is refused for every retention with a link."""
    early = rc.memory.Matrix(read=rc.memory.Read(when="before"))
    for retention in (Damped(), rc.retention.Ball()):
        with pytest.raises(rc.RecipeError, match=f"{retention.title} puts a link between them"):
            rc.Recipe(memory=early, retention=retention)


def test_custom_matrix_runs_on_the_linear_engine() -> None:
    recipe = rc.Recipe(memory=Plane(), retention=rc.retention.Decay())
    check(recipe, "linear")
    x = generate.inputs(recipe)
    twin = recipe.replace(memory=rc.memory.Matrix())
    assert torch.equal(generate.run_recall(recipe, x)[0], generate.run_recall(twin, x)[0])


def test_block_length_is_not_a_window_size() -> None:
    """Only blocks round up the number of keys of a feed-forward network, not any field ``size``."""
    assert rc.context.TopBlocks(size=4, top_k=1).block == 4
    assert rc.context.Window(size=4, gated=False).block == 1
    assert Latest(reach=4).block == 1


# -- declarations that no engine reads are refused ---------------------------------------------


def _algorithm(**body: object) -> rc.algorithm.Algorithm:
    return rc.member(type("Undeclared", (rc.algorithm.Algorithm,), {"__doc__": "x", **body}))()


def _context(**body: object) -> rc.context.Context:
    return rc.member(type("Undeclared", (rc.context.Context,), {"__doc__": "x", **body}))()


def _retention(**body: object) -> rc.retention.Retention:
    return rc.member(type("Undeclared", (rc.retention.Retention,), {"__doc__": "x", **body}))()


def _bias(**body: object) -> rc.bias.Bias:
    def loss(self: object, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
        return (prediction - value).square().sum(-1)

    result = type("Undeclared", (rc.bias.Bias,), {"__doc__": "x", "loss": loss, **body})
    return rc.member(result)()


def _memory(**body: object) -> rc.memory.Memory:
    return rc.member(type("Undeclared", (rc.memory.Memory,), {"__doc__": "x", **body}))()


def _features(**body: object) -> rc.features.Features:
    return rc.member(type("Undeclared", (rc.features.Features,), {"__doc__": "x", **body}))()


def _update(self: object, slots: Values, step: rc.algorithm.Step) -> tuple[Values, Tensor]:
    return {name: x + step.gradient for name, x in slots.items()}, -step.lr * step.gradient


_ALL_PAST = property(lambda self: None)
_THREE = property(lambda self: 3)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a rate per key channel": (
        lambda: rc.Recipe(algorithm=_algorithm(lr=rc.quantity("input", axes=("F",)))),
        "use one rate per head",
    ),
    "a rate per value channel of a memory that has none": (
        lambda: rc.Recipe(
            memory=rc.memory.Module(factory=generate.FACTORY), algorithm=ChannelRates()
        ),
        "has a rate per value channel",
    ),
    "a number that no step is handed": (
        lambda: rc.Recipe(algorithm=_algorithm(beta=rc.quantity("input"))),
        "the quantity 'beta', which steps do not use",
    ),
    "a momentum that a plain step does not take": (
        lambda: rc.Recipe(algorithm=_algorithm(momentum=rc.quantity("input"))),
        "the quantity 'momentum', which steps do not use",
    ),
    "a momentum per value channel": (
        lambda: rc.Recipe(
            algorithm=_algorithm(momentum=rc.quantity("input", axes=("V",)), update=_update)
        ),
        "a momentum with axes",
    ),
    "a linear recursion without its state": (
        lambda: rc.Recipe(algorithm=_algorithm(recursion="gradient", update=_update)),
        "declares recursion='gradient'",
    ),
    "slots that nobody moves": (
        lambda: rc.Recipe(algorithm=_algorithm(slots=("mean",))),
        "never updates them",
    ),
    "a solver without statistics": (
        lambda: rc.Recipe(algorithm=_algorithm(solves=True)),
        "declare its inverse",
    ),
    "an inverse without its slots": (
        lambda: rc.Recipe(
            context=Everything(),
            algorithm=_algorithm(inverse=rc.algorithm.Inverse(), full_batch=True),
        ),
        "which needs slots=",
    ),
    "a full pass by an update of its own": (
        lambda: rc.Recipe(
            context=Everything(), algorithm=_algorithm(full_batch=True, update=_update)
        ),
        "a full pass takes plain steps",
    ),
    "a mean over an update of its own": (
        lambda: rc.Recipe(algorithm=_algorithm(reduction="mean", update=_update)),
        "averages plain steps",
    ),
    "one step a batch of what is not said to accumulate": (
        lambda: rc.Recipe(algorithm=_algorithm(update_every="batch", batch_size=2)),
        "declares no accumulator",
    ),
    "several associations of a token in an inner batch": (
        lambda: rc.Recipe(algorithm=_algorithm(updates_per_token=2, batch_size=2)),
        "they need batch_size=1",
    ),
    "a rate by the key where no error sees the prediction": (
        lambda: rc.Recipe(
            bias=rc.bias.DotProduct(), algorithm=_algorithm(rate=lambda self, lr, kappa, a: lr)
        ),
        "has no such slope",
    ),
    "a decay that is no logarithm": (
        lambda: rc.Recipe(
            context=_context(horizon=_ALL_PAST, decay=rc.quantity(0.9, role="decay")),
            algorithm=Solver(),
        ),
        "the quantity 'decay' with axes",
    ),
    "a decay inside a horizon": (
        lambda: rc.Recipe(
            context=_context(horizon=_THREE, decay=rc.quantity(0.9, log=True, role="decay"))
        ),
        "the quantity 'log_decay' with axes",
    ),
    "weights in over() that no solver of statistics asks for": (
        lambda: rc.Recipe(
            context=_context(horizon=_ALL_PAST, over=lambda self, visible: None), algorithm=Solver()
        ),
        r"defines weights in over\(\)",
    ),
    "a decay that a retention declares itself": (
        lambda: rc.Recipe(
            retention=_retention(decay_=rc.quantity("input", name="decay", log=True))
        ),
        r"use a field decay with a retention\.Decay\(\)",
    ),
    "a link's number per channel": (
        lambda: rc.Recipe(
            retention=_retention(
                c=rc.quantity("input", axes=("V",)), link=lambda self, A, gates: A * gates["c"]
            )
        ),
        "receive one value per head",
    ),
    "a retention's number that neither link nor advance is there to read": (
        lambda: rc.Recipe(retention=_retention(c=rc.quantity("input"))),
        "the quantity 'c'",
    ),
    "a decay that is no decay": (
        lambda: _retention(decay=rc.retention.Ball()),
        r"must be retention\.Decay",
    ),
    "a loss's number per key channel": (
        lambda: rc.Recipe(bias=_bias(s=rc.quantity("input", axes=("F",)))),
        "per value channel with axes",
    ),
    "a loss's number under a name that engines read elsewhere": (
        lambda: rc.Recipe(bias=_bias(s=rc.quantity("input", name="lr")), algorithm=FullPass()),
        "the quantity 'lr' is read from the algorithm",
    ),
    "a loss's weight where the context's would be read": (
        lambda: rc.Recipe(
            bias=_bias(weight=rc.quantity("input")), context=Everything(), algorithm=FullPass()
        ),
        "the quantity 'weight' is read from the context",
    ),
    "a memory's gate": (
        lambda: _memory(tau=rc.quantity("input")),
        "forward receives params only",
    ),
    "features' constant": (
        lambda: _features(tau=rc.quantity(1.0)),
        "phi receives params only",
    ),
    "a linear memory of other weights than a matrix": (
        lambda: rc.Recipe(memory=_memory(linear=True, shapes=lambda self, F, V: ((V, 2), (2, F)))),
        "leave linear out",
    ),
    "a member that extends another": (
        lambda: rc.member(type("Undeclared", (rc.memory.Matrix,), {"__doc__": "x"})),
        "extends the member Matrix",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unread_declarations_are_refused_at_construction(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sentence = REFUSED[name]
    registry = dict(rc.choices.member._REGISTRY)
    monkeypatch.setattr(rc.choices.member, "_REGISTRY", registry)  # without these classes later
    with pytest.raises(rc.RecipeError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_loss_may_name_a_quantity_weight() -> None:
    """A name is reserved only if an engine reads it."""

    @rc.member
    class Weighed(rc.bias.Bias):
        """½ s ‖e‖²."""

        weight: float | str = rc.quantity("input", at_least=0)

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return 0.5 * (gates["weight"] * (prediction - value).square()).sum(-1)

    recipe = rc.Recipe(bias=Weighed(), algorithm=LookAhead())
    check(recipe, "deep")


# -- a probe's numbers travel ------------------------------------------------------------------


@pytest.mark.parametrize("write", ["key", "probe"])
@pytest.mark.parametrize("per", ["head", "key"])
def test_probe_per_association_equals_a_loop(write: str, per: str) -> None:
    """Sub-steps of a token have separate ``probe`` and ``erase`` gates."""
    probe = rc.bias.Probe(write=write, per=per)
    recipe = rc.Recipe(
        bias=rc.bias.L2(probe=probe),
        retention=rc.retention.Decay(),
        algorithm=rc.algorithm.GradientDescent(updates_per_token=3),
    )
    assert all(gate.per_association for gate in probe.gates())
    check(recipe, "linear")
    x = generate.inputs(recipe, B=1, T=5, H=1)
    assert x.gates["probe"].shape == (1, 5, 1, 3, 4)
    assert x.gates["erase"].shape == ((1, 5, 1, 3, 4) if per == "key" else (1, 5, 1, 3))
    leaves = x.with_grad()
    y, _ = generate.run_recall(recipe, leaves)
    assert leaves.init is not None
    W, outputs = leaves.init[0][0], []
    for t in range(5):  # the update by hand
        alpha = leaves.gates["log_decay"][0, t, 0].exp()
        for j in range(3):
            k, v = leaves.k[0, t, 0, j], leaves.v[0, t, 0, j]
            w, a = leaves.gates["probe"][0, t, 0, j], leaves.gates["erase"][0, t, 0, j]
            into = a * (w if write == "probe" else k)
            decayed = alpha * W if j == 0 else W  # the erasure is measured before the decay
            new = leaves.gates["lr"][0, t, 0, j] * torch.outer(v, k)
            W = decayed - torch.outer(W @ w, into) + new
        outputs.append(W @ leaves.q[0, t, 0])
    expected = torch.stack(outputs)
    torch.testing.assert_close(y[0, :, 0], expected, atol=1e-11, rtol=1e-11)
    named = [leaves.gates["probe"], leaves.gates["erase"], leaves.k]
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), named, retain_graph=True),
        torch.autograd.grad(expected.square().sum(), named),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_probe_per_association_of_a_kernel_memory_and_a_layer() -> None:
    recipe = rc.Recipe(
        features=rc.features.Exponential(),
        bias=rc.bias.L2(probe=rc.bias.Probe(heads=2)),
        algorithm=rc.algorithm.GradientDescent(updates_per_token=2),
    )
    check(recipe, "kernel")
    layer = rc.MemoryLayer(16, 2, recipe)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    y, _ = layer(x)
    first, state = layer(x[:, :4])
    rest, _ = layer(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), y, atol=1e-5, rtol=1e-4)  # float32


# -- one measure over the whole matrix ---------------------------------------------------------


def check_against_loop(recipe: rc.Recipe, step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Compare outputs and gradients with a loop over tokens that updates log W, or W itself."""
    x = generate.inputs(recipe, B=1, T=6, H=1, K=4, V=3)
    for method in ("reference", "deep"):
        leaves = x.with_grad()
        y, _ = generate.run_recall(recipe, leaves, engine=method)
        assert leaves.init is not None
        W, outputs = leaves.init[0][0], []
        W = W.exp() if recipe.retention.is_additive else W.abs()  # A is log W, or W
        W = 1.5 * W / W.sum()
        for t in range(6):
            k, v = leaves.k[0, t, 0], leaves.v[0, t, 0]
            g = leaves.gates["lr"][0, t, 0] * torch.outer(W @ k - v, k)
            W = step(W, g, leaves.gates["log_decay"][0, t, 0].exp())
            torch.testing.assert_close(W.sum(), torch.tensor(1.5).double(), atol=1e-9, rtol=0)
            outputs.append(W @ leaves.q[0, t, 0])
        expected = torch.stack(outputs)
        torch.testing.assert_close(y[0, :, 0], expected, atol=1e-9, rtol=1e-9)
        named = [leaves.k, leaves.v, leaves.init[0], *leaves.gates.values()]
        for a, b in zip(
            torch.autograd.grad(y.square().sum(), named, retain_graph=True),
            torch.autograd.grad(expected.square().sum(), named),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-7)


def _multiplied(W: Tensor, g: Tensor, alpha: Tensor) -> Tensor:
    moved = W**alpha * (-g).exp()  # MIRAS 21, with one sum over all entries
    return 1.5 * moved / moved.sum()


def _reverse_kl(W: Tensor, g: Tensor, alpha: Tensor) -> Tensor:
    """MIRAS 18 with f = −ln τ: 1/W_t = (1/W̄) (ζ + g), ζ by Newton's method from above the pole."""
    W = W**alpha
    W = 1.5 * W / W.sum()
    zeta = (-g).max() + W.max().detach()
    for _ in range(60):
        rest = (W / (zeta + g)).sum() - 1.5
        slope = -(W / (zeta + g).square()).sum()
        zeta = torch.maximum(zeta - rest / slope, ((-g).max() + zeta) / 2)
    return W / (zeta + g)


def test_simplex_over_the_full_matrix() -> None:
    """MIRAS 19–20 sum over all entries."""
    retention = rc.retention.Simplex(scale=1.5, axis="all", decay=rc.retention.Decay())
    check_against_loop(rc.Recipe(retention=retention), _multiplied)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl"])
def test_f_divergence_over_the_full_matrix(kind: str) -> None:
    """MIRAS 18 has one multiplier for the matrix."""
    decay = rc.retention.Decay()
    retention = rc.retention.FDivergence(kind=kind, scale=1.5, axis="all", decay=decay)
    check_against_loop(rc.Recipe(retention=retention), _multiplied if kind == "kl" else _reverse_kl)


@pytest.mark.parametrize("cls", [rc.retention.Simplex, rc.retention.FDivergence])
def test_measure_over_the_full_matrix_serialises_and_explains(
    cls: type[rc.retention.Retention],
) -> None:
    full = cls(axis="all", scale=2.0)  # type: ignore[call-arg]
    recipe = rc.Recipe(retention=full)
    assert rc.Recipe.from_json(recipe.to_json()) == recipe
    assert "matri" in str(rc.explain(recipe))
    assert any("link" in reason for reason in select_engine(recipe).rejected["linear"])
    A = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    for B in (A, torch.zeros_like(A)):
        total = full.link(B, {}).sum((-2, -1))
        torch.testing.assert_close(total, torch.full_like(total, 2.0), atol=1e-12, rtol=0)
    for per in ("key", "value", "key_value", "entry"):
        with pytest.raises(rc.RecipeError, match="α must be constant along it"):
            rc.Recipe(retention=cls(axis="all", decay=rc.retention.Decay(per=per)))  # type: ignore[call-arg]
    check(rc.Recipe(memory=rc.memory.MLP(residual=False), retention=cls(axis="all")), "deep")
