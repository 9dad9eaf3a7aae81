"""`recollect.testing` accepts valid members and names each false declaration."""

from __future__ import annotations

import dataclasses
import doctest
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tests.contracts import outside
from torch import Tensor

import recollect as rc
from recollect.choices.member import Member
from recollect.choices.memory import LinearMap
from recollect.choices.memory.base import Apply
from recollect.engines import select
from recollect.engines.common.problem import Problem
from recollect.engines.linear.engine import LinearEngine
from recollect.fields import Param
from recollect.recipe.recipe import CHOICES

Values = Mapping[str, Tensor]
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unregister members that these tests define."""
    monkeypatch.setattr(rc.choices.member, "_REGISTRY", dict(rc.choices.member._REGISTRY))


# -- valid members -----------------------------------------------------------------------------

OUTSIDE = [
    value
    for value in vars(outside).values()
    if isinstance(value, type) and value.__module__ == outside.__name__
]


def test_every_choice_has_a_member_outside_of_the_package() -> None:
    assert {cls.choice for cls in OUTSIDE} == set(CHOICES)


# One member of each choice is fast; `tests/contracts/test_outside.py` runs all of them.
FIRST = {cls.choice: cls for cls in reversed(OUTSIDE)}.values()


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(cls, id=cls.__name__, marks=[pytest.mark.slow] * (cls not in FIRST))
        for cls in OUTSIDE
    ],
)
def test_a_member_written_outside_of_the_package_passes(cls: type[Member]) -> None:
    report = rc.testing.check_member(cls, count=3)
    assert report.member == f"{cls.choice}.{cls.__name__}"
    assert {*report.passed, *report.skipped} == {*report.checks}
    recipes = {check.subject for check in report.passed if " in Recipe(" in check.subject}
    assert len(recipes) in (2, 3)  # two draws can be one recipe


def test_report_lists_passed_and_skipped_checks() -> None:
    report = rc.testing.check_member(rc.bias.L2, count=3)
    names = {check.name for check in report.passed}
    assert "affine is true of error" in names
    assert any(name.startswith("error is autograd's gradient of loss") for name in names)
    assert "the engine that recall chooses agrees with the reference" in names
    skipped = {check.skipped for check in report.skipped}
    assert "algorithm.GradientDescent does not solve for all of the past" in skipped
    lines = str(report).splitlines()
    assert lines[0] == f"bias.L2: passed {len(report.passed)} checks"
    assert f"skipped {len(report.skipped)} checks" in lines
    # A bias without an affine error skips a check that L2 passes.
    huber = rc.testing.check_member(rc.bias.Huber, count=1)
    reasons = {check.name: check.skipped for check in huber.checks}
    assert reasons["affine is true of error"] == "it declares affine=None"


@pytest.mark.parametrize("name", ["delta_net", "softmax_attention", "titans"])
def test_a_preset_passes(name: str) -> None:
    rc.testing.check_preset(rc.zoo.get(name))


@pytest.mark.parametrize("engine", select.ENGINES[:-1], ids=lambda engine: engine.name)
def test_an_engine_passes(engine: select.Engine) -> None:
    recipes = {
        "linear": [rc.Recipe(), rc.Recipe(retention=rc.retention.Decay(per="value"))],
        "least_squares": [rc.zoo.get("rls").recipe],
        "kernel": [rc.zoo.get("softmax_attention").recipe],
        "deep": [
            rc.zoo.get("titans").recipe.replace(algorithm=rc.algorithm.Momentum(batch_size=3))
        ],
    }
    others = [recipe for name in recipes for recipe in recipes[name] if name != engine.name]
    rc.testing.check_engine(engine, recipes=[*recipes[engine.name], *others], min_recipes=1)


def test_loaded_on_first_use_with_torch_alone() -> None:
    code = (
        "import sys, recollect as rc\n"
        "assert 'recollect.testing' not in sys.modules\n"
        "rc.testing.check_member\n"
        "assert not {'pytest', 'hypothesis', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_examples_run() -> None:
    from recollect.testing import engines, members, presets

    for module in (engines, members, presets):
        outcome = doctest.testmod(module)
        assert outcome.attempted > 0
        assert outcome.failed == 0


def test_sentence_on_the_page_is_printed() -> None:
    @rc.member
    class Smooth(rc.bias.Bias):
        """The bias of the page, with its declaration."""

        affine = (1.0, 1.0)
        corner: float | str = rc.quantity("input", above=0, init=0.5)

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return ((prediction - value).square() + gates["corner"].square()).sqrt().sum(-1)

    with pytest.raises(AssertionError) as result:
        rc.testing.check_member(Smooth)
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    claim, _, amount = str(result.value).rpartition(", but ")
    assert re.fullmatch(r"\S+ off", amount)
    assert f"AssertionError: {claim}, but " in page


# -- false declarations ------------------------------------------------------------------------


def caught(cls: type[Member], sentence: str) -> None:
    """Check for one sentence that names the member and the false declaration."""
    with pytest.raises(AssertionError) as result:
        rc.testing.check_member(cls, count=3)
    message = str(result.value)
    assert f"{cls.choice}.{cls.__name__}" in message
    assert re.search(sentence, message), message
    assert "\n" not in message


def test_bias_falsely_declared_affine() -> None:
    @rc.member
    class Bent(rc.bias.Bias):
        """A saturating loss with a declared affine error."""

        affine = (1.0, 1.0)

        def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return torch.tanh(prediction - value)

    caught(Bent, r"declares affine=\(1, 1\), and its error is not 1·prediction − 1·value")


def test_a_bias_whose_error_is_not_the_gradient_of_its_loss() -> None:
    @rc.member
    class Overstated(rc.bias.Bias):
        """½‖e‖² with the error of ‖e‖²."""

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return 0.5 * (prediction - value).square().sum(-1)

        def error(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return 2 * (prediction - value)

    caught(Overstated, "error is not the gradient of loss")


def test_a_rate_per_value_channel_that_acts_per_head() -> None:
    @rc.member
    class Averaged(rc.algorithm.Algorithm):
        """Descent that averages rates per value channel."""

        lr: float | str = rc.quantity("input", at_least=0, init=0.5, axes=("V",), role="rate")

        def update(
            self, slots: Values, step: rc.algorithm.Step
        ) -> tuple[dict[str, Tensor], Tensor]:
            return {}, -step.lr.mean(-2, keepdim=True) * step.gradient

    caught(Averaged, r"the quantity 'lr' with axes \('V',\), and ignores them")


def test_a_number_per_value_channel_of_which_one_is_read() -> None:
    @rc.member
    class Narrow(rc.bias.Bias):
        """½ s_1 ‖e‖²."""

        strength: float | str = rc.quantity("input", at_least=0, init=1.0, axes=("V",))

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            strength = gates["strength"][..., :1]
            return 0.5 * (strength * (prediction - value).square()).sum(-1)

    caught(Narrow, r"the quantity 'strength' with axes \('V',\), and ignores them")


def test_memory_falsely_declared_linear() -> None:
    @rc.member
    class Curved(rc.memory.Memory):
        """M(x) = W tanh(x), declared linear."""

        linear = True

        def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
            return ((V, F),)

        def forward(
            self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Values
        ) -> Tensor:
            return torch.tanh(x) @ weights[0].mT

    caught(Curved, r"declares linear, which is M\(W; x\) = W x, and its forward is")


def test_memory_falsely_declared_a_chain() -> None:
    @rc.member
    class NoChainAtAll(rc.memory.Stack):
        """W1 relu(W2 x), declared with tanh."""

        @property
        def chain_activation(self) -> str:
            return "tanh"

        def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
            return (
                LinearMap(
                    name="W2", out_features=3, in_features=F, reads_features=True, is_output=False
                ),
                LinearMap(
                    name="W1", out_features=V, in_features=3, reads_features=False, is_output=True
                ),
            )

        def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
            return apply(1, torch.relu(apply(0, x)))

    caught(NoChainAtAll, "declares chain_activation='tanh'")


def one_map(self: rc.memory.Stack, F: int, V: int) -> tuple[LinearMap, ...]:
    """Return the single map W of a memory."""
    W = LinearMap(name="W", out_features=V, in_features=F, reads_features=True, is_output=True)
    return (W,)


def test_memory_with_another_norm_than_declared() -> None:
    @rc.member
    class Centred(rc.memory.Stack):
        """w ⊙ (W x − its mean) + b, declared as divided by its deviation."""

        @property
        def chain_activation(self) -> str:
            return "identity"

        @property
        def output_norm(self) -> str:
            return "layer"

        def params(self) -> tuple[Param, ...]:
            return tuple(
                Param(name=name, owner=self.title, axes=("V",), init=1.0)
                for name in ("norm_weight", "norm_bias")
            )

        maps = one_map

        def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
            return self.output_map(apply(0, x), raw, params)

        def output_map(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
            weight, shift = (params[f"norm_{name}"].unsqueeze(1) for name in ("weight", "bias"))
            return weight * (z - z.mean(-1, keepdim=True)) + shift

    caught(Centred, "declares output_norm='layer', and compute is")


def test_a_memory_whose_layer_norm_has_no_weights() -> None:
    @rc.member
    class Weightless(rc.memory.Stack):
        """LN(W x), declared with a weight and a bias."""

        @property
        def chain_activation(self) -> str:
            return "identity"

        @property
        def output_norm(self) -> str:
            return "layer"

        maps = one_map

        def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
            return self.output_map(apply(0, x), raw, params)

        def output_map(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
            return torch.nn.functional.layer_norm(z, z.shape[-1:], eps=1e-6)

    caught(Weightless, "declares output_norm='layer', and has no params norm_weight and norm_bias")


def test_memory_with_an_undeclared_output_map() -> None:
    @rc.member
    class Hidden(rc.memory.Stack):
        """tanh(W x), declared without an output map."""

        has_output_map = False

        @property
        def chain_activation(self) -> str:
            return "identity"

        maps = one_map

        def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
            return torch.tanh(apply(0, x))

        def output_map(self, z: Tensor, raw: Tensor, params: Values) -> Tensor:
            return torch.tanh(z)

    caught(Hidden, "declares has_output_map=False")


@pytest.mark.parametrize("named", [("fixed", "fixed"), ("fxed",), ("turned",)])
def test_memory_with_a_false_base(named: tuple[str, ...]) -> None:
    @rc.member
    class Based(rc.memory.Stack):
        """(W + U) x with a declared base of another name."""

        base_params = named

        def params(self) -> tuple[rc.Param, ...]:
            axes = {"fixed": ("V", "F"), "turned": ("heads",)}
            return tuple(
                rc.Param(name=name, owner=self.title, axes=axes[name], draw="fan_in", fan="F")
                for name in axes
            )

        def axes(self, K: int, F: int, V: int) -> dict[str, int]:
            return {"heads": V * F}

        maps = one_map

        def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Values) -> Tensor:
            return apply(0, x) + x @ params["fixed"][:, None].mT + 0 * params["turned"].sum()

    caught(Based, "there has to be a param of its shape for every map")


def test_memory_whose_zeros_do_not_learn() -> None:
    @rc.member
    class Silent(rc.memory.Memory):
        """W x, squared entry by entry."""

        needs_init = False

        def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
            return ((V, F),)

        def forward(
            self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Values
        ) -> Tensor:
            return (x @ weights[0].mT).square()

    caught(Silent, "declares needs_init=False, and a memory of zeros has no gradient")


@pytest.mark.parametrize("kind", ["gate", "param"])
def test_declared_number_that_is_never_read(kind: str) -> None:
    source = "input" if kind == "gate" else "learned"

    @rc.member
    class Deaf(rc.bias.Bias):
        """½‖e‖² with an unread scale."""

        scale: float | str = rc.quantity(source, sources=(source,), above=0, init=1.0)

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return 0.5 * (prediction - value).square().sum(-1)

    caught(Deaf, "declares the quantity 'scale', and nothing reads it")


def test_retention_falsely_declared_without_a_link() -> None:
    @rc.member
    class Squashing(rc.retention.Retention):
        """W = tanh(A), declared as W = A."""

        @property
        def has_link(self) -> bool:
            return False

        def link(self, A: Tensor, gates: Values) -> Tensor:
            return torch.tanh(A)

    caught(Squashing, "declares has_link=False, which is W = A, and its link is not the identity")


def test_loss_with_another_minimum_than_declared() -> None:
    @rc.member
    class AtTwice(rc.bias.Bias):
        """The minimum is at twice the value."""

        target = 1.0

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return 0.5 * (prediction - 2 * value).square().sum(-1)

    caught(AtTwice, "declares target=1, and an error points away from 1·value")


def test_link_steeper_than_declared() -> None:
    @rc.member
    class Steep(rc.retention.Retention):
        """W = 3 A."""

        link_lipschitz = 1.0

        def link(self, A: Tensor, gates: Values) -> Tensor:
            return 3 * A

    caught(Steep, "declares link_lipschitz=1, and its link moves W 3 times as far as A")


def test_a_gain_that_differs_from_its_factors() -> None:
    @rc.member
    class Hasty(rc.retention.Retention):
        """The short form ignores the inputs of the map."""

        def rank_one_step_gain(self, A: Tensor, h: Tensor, delta: Tensor, gates: Values) -> Tensor:
            return delta.square().sum(-1)

    caught(Hasty, "rank_one_step_gain of δ and h is not the step_gain of δhᵀ")


def test_retention_falsely_declared_additive() -> None:
    @rc.member
    class Rebuilt(rc.retention.Retention):
        """A_t = A/2 + step, declared as A + step."""

        @property
        def is_additive(self) -> bool:
            return True

        def advance(
            self, A: Tensor, step: Tensor, log_decay: Tensor | None, gates: Values
        ) -> Tensor:
            return 0.5 * A + step

    caught(Rebuilt, "declares is_additive")


def test_algorithm_falsely_declared_as_momentum() -> None:
    @rc.member
    class Eased(rc.algorithm.Algorithm):
        """Nesterov's step, declared as plain momentum."""

        lr: float | str = rc.quantity("input", at_least=0, init=0.3, role="rate")
        momentum: float | str = rc.quantity(0.5, at_least=0, below=1, init=0.5, role="momentum")

        slots = ("momentum",)
        recursion = "gradient"

        def update(
            self, slots: Values, step: rc.algorithm.Step
        ) -> tuple[dict[str, Tensor], Tensor]:
            push = -step.lr * step.gradient
            S = step.momentum * slots["momentum"] + push
            return {"momentum": S}, step.momentum * S + push

    caught(Eased, "declares recursion='gradient'")


def test_feature_map_of_another_width_than_declared() -> None:
    @rc.member
    class Wider(rc.features.Features):
        """[x, x²], declared with K features."""

        def phi(self, x: Tensor, params: Values, side: str, position: Tensor) -> Tensor:
            return torch.cat([x, x.square()], dim=-1)

    caught(Wider, r"declares dim\(4\) = 4, and phi gives 8 features")


def test_kernel_falsely_declared_positive_definite() -> None:
    @rc.member
    class Indefinite(rc.features.Kernel):
        """κ = −‖q − k‖²."""

        is_positive_definite = True

        def kappa(self, q: Tensor, k: Tensor) -> Tensor:
            lengths = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
            return 2 * q @ k.transpose(-1, -2) - lengths

    caught(Indefinite, "declares is_positive_definite, and κ has the eigenvalue")


def test_context_falsely_declared_binary() -> None:
    from recollect.choices.context.weights import ContextWeights, VisibleAssociations

    @rc.member
    class Soft(rc.context.Context):
        """Weights by age, declared as 0 or 1."""

        is_restriction = True

        @property
        def horizon(self) -> None:
            return None

        def over(self, visible: VisibleAssociations) -> ContextWeights:
            def log(queries: slice, keys: slice) -> Tensor:
                age = visible.query_position[:, queries, None] - visible.position[:, None, keys]
                return -age.clamp_min(0).to(visible.q.dtype)[:, None, None]

            return ContextWeights(log=log, is_binary=True)

    caught(Soft, "declares binary weights")


def test_a_loss_that_fails_names_its_member() -> None:
    @rc.member
    class Failing(rc.bias.Bias):
        """Reads a number that it does not declare."""

        def loss(self, prediction: Tensor, value: Tensor, gates: Values) -> Tensor:
            return (gates["absent"] * (prediction - value)).sum(-1)

    caught(Failing, "reads the quantity 'absent', and it declares none")


def test_a_preset_whose_layer_is_not_causal() -> None:
    """Single tokens give other outputs."""

    class Backwards(torch.nn.Module):
        def forward(self, x: Tensor, state: object = None) -> tuple[Tensor, object]:
            return x.flip(1).cumsum(1).flip(1), state

    @dataclasses.dataclass(frozen=True)
    class Preset:
        name: str = "backwards"
        recipe: rc.Recipe = dataclasses.field(default_factory=rc.Recipe)

        def build(self, d_model: int, num_heads: int) -> torch.nn.Module:
            return Backwards()

    with pytest.raises(AssertionError, match="preset backwards: a layer's outputs in inference"):
        rc.testing.check_preset(Preset())


WRONG = {
    "outputs": lambda y, state: (1.01 * y, state),
    "state": lambda y, state: (y, dataclasses.replace(state, weights=(1.01 * state.weights[0],))),
    "gradient": lambda y, state: (y.detach() + 0.5 * (y - y.detach()), state),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_engine_that_is_not_the_reference(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(LinearEngine):
        def run(self, problem: Problem) -> tuple[torch.Tensor, rc.State]:
            return WRONG[what](*super().run(problem))

    wrong = Wrong()
    monkeypatch.setattr(select, "ENGINES", (wrong, *select.ENGINES[1:]))
    with pytest.raises(AssertionError, match=rf"engine linear on Recipe.*{what}") as result:
        rc.testing.check_engine(wrong, recipes=[rc.Recipe()], min_recipes=1)
    assert "\n" not in str(result.value)


def test_an_engine_that_refuses_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(LinearEngine):
        def unsupported_reasons(self, recipe: rc.Recipe) -> list[str]:
            return ["no"]

    mute = Mute()
    monkeypatch.setattr(select, "ENGINES", (mute, *select.ENGINES[1:]))
    with pytest.raises(AssertionError, match="refuses a recipe without a reason"):
        rc.testing.check_engine(mute, recipes=[rc.Recipe()])


def test_other_objects_are_refused() -> None:
    class Bare(rc.bias.Bias):
        """Without the decorator."""

    with pytest.raises(rc.RecipeError, match=r"decorated with @rc\.member"):
        rc.testing.check_member(Bare)
    with pytest.raises(rc.RecipeError, match="takes a preset with a recipe"):
        rc.testing.check_preset(rc.Recipe())  # type: ignore[arg-type]
    with pytest.raises(rc.RecipeError, match="is not among"):
        rc.testing.check_engine(LinearEngine())
    with pytest.raises(AssertionError, match=r"accepts 0 of the recipes .* hand recipes="):
        rc.testing.check_engine(select.ENGINES[0], recipes=[])
