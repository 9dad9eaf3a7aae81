"""Explanations: golden texts, every preset and every valid recipe, members of a user."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contracts import generate
from torch import Tensor

import recollect as rc
from recollect.choices.equation_terms import Term, format_number, parenthesise, power, render_sum
from recollect.engines.base import Engine
from recollect.engines.select import ENGINES
from recollect.explanation.naming import properties, structure_key
from recollect.recipe.recipe import CHOICES

explain = rc.explain

R, algorithm, bias, context = rc.Recipe, rc.algorithm, rc.bias, rc.context
features, memory, retention = rc.features, rc.memory, rc.retention

MONETA = R(
    memory=memory.MLP(norm="layer"),
    bias=bias.Lp(p=3),
    retention=retention.Lq(
        q=4, form="as_published", link_every="batch", decay=retention.Decay(per="value")
    ),
    algorithm=algorithm.GradientDescent(batch_size=16),
)
ROBUST = R(bias=bias.Huber(), retention=retention.Lq(q=4), algorithm=algorithm.Muon(batch_size=32))


@rc.member
class LogCosine(bias.Bias):
    """A bias with a loss and no description of its equation."""

    scale: float | str = rc.quantity("input", above=0, init=1.0)

    def loss(self, prediction: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return (gates["scale"] * torch.cosh(prediction - value).log()).sum(-1)


@rc.member
class Overreach(bias.Bias):
    """An affine error with b ≠ 1."""

    affine = (1.0, 1.5)

    def error(self, prediction: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return prediction - 1.5 * value


@rc.member
class Squash(retention.Retention):
    """A user's link."""

    def link(self, A: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return torch.tanh(A)


@rc.member
class Shrink(retention.Retention):
    """A link with a gate."""

    shrinkage: float | str = rc.quantity("input", at_least=0, init=0.1, letter="c")

    def link(self, A: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return A / (1 + gates["shrinkage"])


@rc.member
class Doubled(algorithm.Algorithm):
    """A user's update."""

    def update(
        self, slots: Mapping[str, Tensor], step: algorithm.Step
    ) -> tuple[dict[str, Tensor], Tensor]:
        return {}, -2 * step.gradient


def lines(explanation: rc.Explanation, *labels: str) -> list[str]:
    """Return the lines of some blocks."""
    chosen, block = [], ""
    for line in str(explanation).split("\n")[1:]:
        block = line[:9].strip() or block
        if block in labels:
            chosen.append(line)
    return chosen


def without_numbers(text: str) -> list[str]:
    """Return lines without the number of architectures, which grows, and FLOPs, which are tuned."""
    tuned = re.compile(r"cost |\s+(\d+ sequential step|about \S+ × the time|\d+ steps and about)")
    lines = (line for line in text.split("\n") if not tuned.match(line))
    return [re.sub(r"none of the \d+", "none", line) for line in lines]


# -- golden texts --------------------------------------------------------------------------------


def test_gated_delta_net() -> None:
    result = str(explain("gated_delta_net"))
    assert re.search(
        r"\ncost     \S+ kFLOP per token and head, 24.6 kFLOP to decode one, at", result
    )
    assert without_numbers(result) == [
        "gated_delta_net",
        "problem  min  ½‖W k_t − v_t‖²",
        "write    W_t = α_t W_(t−1) − η_t (α_t W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ",
        "read     y_t = W_t q_t",
        "engine   linear (triangular solve)",
        "         on CUDA with recollect-layers[gpu]: chunk_gated_delta_rule of flash-linear-"
        "attention, if products may be bf16, fp16 or TF32",
        "         training on a Hopper GPU with Triton 3.4 to 3.7.0: chunk_kda in place of "
        "chunk_gated_delta_rule, whose backward pass raises there",
        "fidelity exact: TTR eq. 41; 2 deviations, listed by "
        "rc.zoo.get('gated_delta_net').fidelity",
        "needs    gate log_decay [B, T, H] ≤ 0",
        "         gate lr [B, T, H] ≥ 0",
        "state    W [64×64]: 16 KiB per row and head at K = V = 64",
        "ranks    affine, all at once: each row of the weights moves alike",
        "theory   can hold 64 pairs exactly: 64 features (ATLAS 3.1)",
        "has      dynamic decay",
        "lacks    deep memory, nonlinear capacity, locally optimal, flexible context",
    ]


def test_moneta() -> None:
    result = explain(MONETA)
    assert lines(result, "problem", "write", "read") == [
        "problem  min  ‖k_t + LN(W1 gelu(W2 k_t)) − v_t‖_3^3",
        "write    A_t = Diag(α_t) A_(t−1) − η_t ∇ℓ(W°; k_t, v_t)",
        "         W° = A° / ‖A°‖_4^2: A at the start of the inner batch of 16",
        "read     y_t = q_t + LN(W1 gelu(W2 q_t))",
        "         W_t: W° before the first token of the inner batch, then moved as A_t is, without "
        "the link",
    ]
    reasons = {name: why[0] for name, why in result.engine_refusals.items()}
    assert reasons["linear"] == "memory.MLP is not linear in its parameters"
    assert f"         not linear: {reasons['linear']}" in str(result)


def test_huber_lq_muon() -> None:
    result = explain(ROBUST)
    assert result.title == "Recipe(bias=Huber(), retention=Lq(q=4), algorithm=Muon(batch_size=32))"
    assert lines(result, "problem", "write") == [
        "problem  min  huber_δ(W k_t − v_t)",
        "write    S_t = θ_t S_(t−1) − huber′(W° k_t, v_t) k_tᵀ;   "
        "A_t = A_(t−1) + η_t NS5(S_t),   W_t = sign(A_t)|A_t|³ / ‖A_t‖_4²",
        "         W° = W at the start of the inner batch of 32",
    ]
    assert re.fullmatch(r"named    none of the \d+", lines(result, "named")[0])
    # Newton–Schulz at every token: hundreds of times the gradient.
    price = next(line for line in result.cost.notes if "orthogonalising" in line)
    times = int(re.search(r"(\d+) times", price)[1])
    assert 100 < times < 1000


@pytest.mark.parametrize("name", ["titans", "titans_mac"])
def test_blocks_are_the_printed_lines(name: str) -> None:
    explanation = explain(name)
    lines = [explanation.title]
    for label, block in explanation.blocks:
        first, *rest = block
        lines += [f"{label:<9}{first}".rstrip(), *(f"{'':<9}{line}" for line in rest)]
    assert str(explanation).splitlines() == lines
    assert {label for label, _ in explanation.equations} <= {
        "composes", "problem", "write", "read", "where",
    }  # fmt: skip


# -- one line each -------------------------------------------------------------------------------

L2_STEP = "− η_t (W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ"
LINEAR = {"bias": bias.DotProduct(), "algorithm": algorithm.GradientDescent(lr=1.0)}

GOLDEN: dict[str, tuple[rc.Recipe, tuple[str, ...]]] = {
    "linear attention": (R(**LINEAR), ("W_t = W_(t−1) + v_t k_tᵀ",)),
    "constants are numbers": (
        R(bias=bias.DotProduct(), retention=retention.Decay(alpha=0.9),
          algorithm=algorithm.GradientDescent(lr=2)),
        ("W_t = 0.9 W_(t−1) + 2 v_t k_tᵀ",),
    ),
    "static numbers have no index": (
        R(bias=bias.DotProduct(), retention=retention.Decay(alpha="learned")),
        ("W_t = α W_(t−1) + η_t v_t k_tᵀ",),
    ),
    "delta rule": (R(), (f"W_t = W_(t−1) {L2_STEP}",)),
    "leaky": (R(retention=retention.Decay()), (f"W_t = α_t W_(t−1) {L2_STEP}",)),
    "over keys": (
        R(retention=retention.Decay(per="key")), (f"W_t = W_(t−1) Diag(α_t) {L2_STEP}",),
    ),
    "over values": (
        R(retention=retention.Decay(per="value")), (f"W_t = Diag(α_t) W_(t−1) {L2_STEP}",),
    ),
    "over both": (
        R(retention=retention.Decay(per="key_value"), **LINEAR),
        ("W_t = Diag(β_t) W_(t−1) Diag(α_t) + v_t k_tᵀ",),
    ),
    "per entry": (
        R(retention=retention.Decay(per="entry", when="before")),
        ("W_t = α_t ⊙ W_(t−1) − η_t ((α_t ⊙ W_(t−1)) k_t) k_tᵀ + η_t v_t k_tᵀ",),
    ),
    "features": (
        R(features=features.EluPlusOne()),
        ("W_t = W_(t−1) − η_t (W_(t−1) φ(k_t)) φ(k_t)ᵀ + η_t v_t φ(k_t)ᵀ",),
    ),
    "vector": (
        R(memory=memory.Vector(), retention=retention.Decay(per="key")),
        ("w_t = α_t ⊙ w_(t−1) − η_t (w_(t−1) ⊙ k_t) ⊙ k_t + η_t v_t ⊙ k_t",),
    ),
    "momentum": (
        R(algorithm=algorithm.Momentum()),
        ("S_t = θ_t S_(t−1) − η_t (W_(t−1) k_t − v_t) k_tᵀ;   W_t = W_(t−1) + S_t",),
    ),
    "momentum of the write": (
        R(algorithm=algorithm.Momentum(momentum_on="value")),
        ("S_t = θ_t S_(t−1) + η_t v_t k_tᵀ;   W_t = W_(t−1) − η_t (W_(t−1) k_t) k_tᵀ + S_t",),
    ),
    "window": (
        R(context=context.Window(size=4)),
        ("W_t = W_(t−1) − η_t Σ_(i>t−4) γ_i^(t) (W_(t−1) k_i − v_i) k_iᵀ",),
    ),
    "window of a dot product": (
        R(bias=bias.DotProduct(), context=context.Window(size=4, gated=False)),
        ("W_t = W_(t−1) + η_t Σ_(i>t−4) v_i k_iᵀ",),
    ),
    "implicit": (
        R(algorithm=algorithm.Implicit()),
        (f"W_t = W_(t−1) {L2_STEP}", "η_t = δ_t/(1 + δ_t ‖k_t‖²)"),
    ),
    "flow": (
        R(algorithm=algorithm.Flow()),
        (f"W_t = W_(t−1) {L2_STEP}", "η_t = (1 − exp(−δ_t ‖k_t‖²))/‖k_t‖²"),
    ),
    "projection": (
        R(algorithm=algorithm.NLMS()),
        (f"W_t = W_(t−1) {L2_STEP}", "η_t = 1/‖k_t‖²"),
    ),
    "probe": (
        R(bias=bias.L2(probe=bias.Probe(write="probe", per="key"))),
        ("W_t = W_(t−1) − (W_(t−1) w_t) (a_t ⊙ w_t)ᵀ + η_t v_t k_tᵀ",),
    ),
    "sub-steps": (
        R(algorithm=algorithm.GradientDescent(updates_per_token=2)),
        (
            "W_(t,j) = W_(t,j−1) − η_tj (W_(t,j−1) k_tj) k_tjᵀ + η_tj v_tj k_tjᵀ",
            "j = 1..2;   W_(t,0) = W_(t−1),   W_t = W_(t,2)",
        ),
    ),
    "inner batch": (
        R(algorithm=algorithm.GradientDescent(batch_size=8)),
        (
            "W_t = W_(t−1) − η_t (W° k_t) k_tᵀ + η_t v_t k_tᵀ",
            "W° = W at the start of the inner batch of 8",
        ),
    ),
    "the mean of a batch": (
        R(memory=memory.MLP(depth=1, norm="layer"),
          algorithm=algorithm.GradientDescent(batch_size=16, reduction="mean")),
        (
            "W_t = W° − τ_t Σ_(s≤t) η_s ∇ℓ(W°; k_s, v_s)",
            "τ_t = 1/(place in the batch); W° and s begin with the inner batch of 16",
        ),
    ),
    "at the border": (
        R(
            algorithm=algorithm.Muon(batch_size=16, update_every="batch"),
            retention=retention.Decay(),
        ),
        (
            "S_t = θ_t S_(t−1) − (W° k_t − v_t) k_tᵀ",
            "W_t = α_b W° + η̄ NS5(S_t) at the last token of the inner batch",
            "α_b = Π α_t, η̄ = mean η_t over the inner batch; tokens in it read W°",
            "W° = W at the start of the inner batch of 16",
        ),
    ),
    "a proximal step": (
        R(retention=retention.ElasticNet(form="proximal", tau=0.5)),
        (f"Z_t = W_(t−1) {L2_STEP}", "W_t = soft(Z_t, 0.5)"),
    ),
    "a divergence": (
        R(retention=retention.FDivergence(), **LINEAR),
        ("W_t = W_(t−1) ⊙ g(v_t k_tᵀ − ζ_t)",),
    ),
    "all of the past": (
        R(context=context.Prefix(decay=0.9), algorithm=algorithm.GradientDescent(lr=1.0)),
        ("W_t = W_0 − Σ_(i≤t) 0.9^(t−i) (W_0 k_i − v_i) k_iᵀ",),
    ),
    "adam": (
        R(algorithm=algorithm.Adam(lr=1.0)),
        (
            "g_t = (W_(t−1) k_t − v_t) k_tᵀ",
            "m_t = 0.9 m_(t−1) + 0.1 g_t",
            "u_t = 0.999 u_(t−1) + 0.001 g_t²",
            "W_t = W_(t−1) − m̂_t/(√û_t + 1e−08)",
        ),
    ),
    "a loss of one's own": (
        R(bias=LogCosine()), ("W_t = W_(t−1) − η_t logcosine′(W_(t−1) k_t, v_t) k_tᵀ",),
    ),
    "an affine error of one's own": (
        R(bias=Overreach(), retention=retention.Decay(when="before")),
        ("W_t = α_t W_(t−1) − η_t (α_t W_(t−1) k_t) k_tᵀ + 1.5 η_t v_t k_tᵀ",),
    ),
    "a link of one's own": (
        R(retention=Squash(), **LINEAR), ("A_t = A_(t−1) + v_t k_tᵀ,   W_t = squash(A_t)",),
    ),
    "a link of one's own with a gate": (
        R(retention=Shrink()),
        (
            "A_t = A_(t−1) − η_t (W° k_t) k_tᵀ + η_t v_t k_tᵀ,   W_t = shrink(A_t, c_t)",
            "W° = shrink(A_(t−1), c_t)",
        ),
    ),
    "an update of one's own": (
        R(algorithm=Doubled()),
        ("g_t = (W_(t−1) k_t − v_t) k_tᵀ;   W_t = W_(t−1) + doubled(g_t)",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_write(case: str) -> None:
    recipe, expected = GOLDEN[case]
    assert explain(recipe).write_equations == expected


PROBLEMS: dict[str, tuple[rc.Recipe, str]] = {
    "dot product": (R(**LINEAR), "−⟨W k_t, v_t⟩"),
    "a sum keeps its sign in front": (
        R(bias=bias.DotProduct(), context=context.Window(size=3, gated=False)),
        "−Σ_(i>t−3) ⟨W k_i, v_i⟩",
    ),
    "two terms under one sum": (
        R(bias=bias.ValueRobust(radius=0.1), context=context.Window(size=3, gated=False)),
        "Σ_(i>t−3) (½‖W k_i − v_i‖² + 0.1 ‖W k_i − v_i‖)",
    ),
    "an affine error": (R(bias=Overreach()), "½‖W k_t − 1.5 v_t‖²"),
    "a loss alone": (R(bias=LogCosine()), "logcosine(W k_t, v_t)"),
    "the residual adds the key before features": (
        R(memory=memory.MLP(), features=features.Polynomial()),
        "½‖k_t + W1 gelu(W2 φ(k_t)) − v_t‖²",
    ),
    "softmax attention": (
        R(
            memory=memory.LocalConstant(),
            context=context.KernelWeighted(),
            algorithm=algorithm.Analytic(),
        ),
        "Σ_(i≤t) s(k_i, q_t) ½‖w − v_i‖²",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problem(case: str) -> None:
    recipe, expected = PROBLEMS[case]
    assert explain(recipe).problem == expected


def test_read() -> None:
    def read(**options: object) -> str:
        return explain(
            R(memory=memory.Matrix(read=memory.Read(**options)), **LINEAR)
        ).read_equations[0]

    assert read() == "y_t = W_t q_t"
    assert read(normalize="sum") == "y_t = W_t q_t / (n_t·q_t)"
    assert read(normalize="floor") == "y_t = W_t q_t / max(|n_t·q_t|, 1)"
    assert read(when="before", bonus="learned") == "y_t = W_(t−1) q_t + ⟨q_t, u ⊙ k_t⟩ v_t"
    assert read(bonus=-0.5) == "y_t = W_t q_t − 0.5 ⟨q_t, k_t⟩ v_t"
    softmax = explain("softmax_attention")
    assert softmax.read_equations == ("y_t = Σ_(i≤t) s(k_i, q_t) v_i / Σ_(i≤t) s(k_i, q_t)",)
    assert softmax.symbols == ("s(k, q) = exp(k·q/√K)",)


def test_a_system_of_the_zoo_states_its_fidelity() -> None:
    listed = "deviations, listed by rc.zoo.get"
    expected = {
        "softmax_attention": "exact: TTR eq. 50",
        "dpfp": r"exact: Schlag et al\. .*\. The layer is the common one, without unit .*",
        "titans": rf"reconstruction: ATLAS eqs\. 12–13; 7 {listed}\('titans'\)\.fidelity; "
        r"the printed equation is 'titans:published'",
        "titans:published": r"variant 'published', exact: ATLAS eqs\. 12–13, with the memory of "
        rf"eq\. 42; 3 {listed}\('titans:published'\)\.fidelity",
        "atlas": rf"approximation: ATLAS eqs\. 32–33; \d+ {listed}\('atlas'\)\.fidelity; "
        r"the printed equation is 'atlas:published'",
        "titans_mac": rf"reconstruction: Titans eqs\. 21–25; 5 {listed}\('titans_mac'\)\.fidelity",
    }
    for name, pattern in expected.items():
        explanation = explain(name)
        assert re.fullmatch(pattern, explanation.fidelity), explanation.fidelity
        assert explanation.to_dict()["fidelity"] == explanation.fidelity
        assert f"\nfidelity {explanation.fidelity}\n" in str(explanation)
    assert explain(rc.zoo.get("titans_mac")).fidelity == explain("titans_mac").fidelity


def test_a_changed_preset_states_the_change_and_a_recipe_no_fidelity() -> None:
    titans = rc.zoo.get("titans")
    changed = explain(titans.replace(bias=bias.Huber()))
    assert changed.fidelity == "reconstruction: titans. The recipe has bias = Huber()."
    for plain in (explain(titans.recipe), explain(rc.blocks.Sequential("gla", "titans"))):
        assert plain.fidelity == ""
        assert "\nfidelity" not in str(plain)


# -- everything that is valid --------------------------------------------------------------------


def test_valid_recipes_explain() -> None:
    for _, recipe in generate.valid(150):
        result = explain(recipe)
        equations = "\n".join((result.problem, *result.write_equations, *result.read_equations))
        # Signs do not repeat, and equations have no factor of 1, no empty factor and no Python.
        assert not re.search(r"[−+] [−+]|\(\)|None|nan|inf\b|  [−+]|(?<![\w.])1 \w", equations), (
            result
        )
        assert result.engine == "reference" or result.engine not in result.engine_refusals
        json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize("name", rc.zoo.names())
def test_presets_explain(name: str) -> None:
    result = explain(name)
    assert str(result).startswith(f"{name}\nproblem  min  ")
    assert name in [match.name for match in result.same_recipe_systems]
    assert result == explain(rc.zoo.get(name))
    blocks = [line[:9].strip() for line in str(result).split("\n")[1:]]
    order = [
        "problem",
        "write",
        "read",
        "where",
        "engine",
        "named",
        "needs",
        "state",
        "cost",
        "has",
    ]
    recorded = [block for block in blocks if block in order]
    assert recorded == [label for label in order if label in blocks]


# -- names ---------------------------------------------------------------------------------------


def names(recipe: rc.Recipe | str) -> set[str]:
    return {match.name for match in explain(recipe).same_recipe_systems}


def test_recipe_names_the_options_of_its_system() -> None:
    bare = str(explain(rc.zoo.get("titans").recipe))
    assert "the layer of titans has options beside the recipe: rc.zoo.get('titans').options" in bare
    assert "options beside the recipe" not in str(explain("titans"))
    assert "options beside the recipe" not in str(explain(rc.zoo.get("delta_net").recipe))


def test_systems_with_one_recipe_are_named_together() -> None:
    assert names("retnet") == {"retnet", "lightning_attention"}
    options_by_name = {
        match.name: dict(match.differing_options) for match in explain("retnet").same_recipe_systems
    }
    schedules = {
        name: options["gate_options.decay.init_schedule"]
        for name, options in options_by_name.items()
    }
    assert schedules == {"retnet": "dyadic", "lightning_attention": "alibi"}
    assert options_by_name["retnet"]["rope_theta"] == 10000.0
    assert "rope_theta" not in options_by_name["lightning_attention"]
    assert explain("lightning_attention").same_recipe_systems[0].name == "lightning_attention"
    # A normalised feed-forward network is attention over learned pairs.
    same = {"softmax_attention", "qk_norm_attention", "ffn_normalized"}
    assert names("softmax_attention") == same
    options_by_name = {
        match.name: dict(match.differing_options)
        for match in explain("ffn_normalized").same_recipe_systems
    }
    assert options_by_name["ffn_normalized"] == {
        "qk_norm": "none",
        "persistent": 4.0,
        "joined": True,
    }
    gla = R(bias=bias.DotProduct(), retention=retention.Decay(per="key"),
            algorithm=algorithm.GradientDescent(lr=1.0))  # fmt: skip
    assert "gla" in names(gla)


def test_systems_that_differ_in_one_choice() -> None:
    assert names("kimi_delta_attention") == {"kimi_delta_attention"}
    assert "kimi_delta_attention" not in names("gla")
    assert names("gated_delta_net") == {"gated_delta_net"}
    assert names("comba") == {"comba"}
    # The predictions of preconditioned_gated_delta_net are at a separate key, too; ties differ.
    assert names("q_delta") == {"q_delta", "preconditioned_gated_delta_net"}
    first = explain("q_delta").same_recipe_systems[0]
    assert first.name == "q_delta" and first.differing_options["ties"][0]["rule"] == "sum"


def test_names_follow_canonical_forms() -> None:
    assert names(R(algorithm=algorithm.Momentum(momentum=0.0))) == {"delta_net"}
    assert names(R(memory=memory.MLP(depth=1, residual=False))) == {"delta_net"}
    assert names(R(context=context.Window(size=1, gated=False))) == {"delta_net"}


def test_names_ignore_sizes() -> None:
    def window(size: int) -> rc.Recipe:
        within = (context.Window(size=size, gated=False),)
        return rc.zoo.get("softmax_attention").recipe.replace(
            context=context.KernelWeighted(restrictions=within)
        )

    assert names(window(7)) == names(window(512)) == {"sliding_window_attention"}
    small, large = memory.MLP(expansion=2), memory.MLP(expansion=8)
    assert structure_key(R(memory=small)) == structure_key(R(memory=large))
    assert structure_key(MONETA) == structure_key(
        MONETA.replace(algorithm=algorithm.GradientDescent(batch_size=64))
    )
    # Several sub-steps or maps make another system; their number does not matter.
    one, two, four = (
        R(algorithm=algorithm.GradientDescent(updates_per_token=n)) for n in (1, 2, 4)
    )
    assert structure_key(one) != structure_key(two) == structure_key(four)
    # Numbers other than sizes count.
    assert structure_key(R(bias=bias.Lp(p=3))) != structure_key(R(bias=bias.Lp(p=4)))


# -- properties ----------------------------------------------------------------------------------


def test_properties() -> None:
    def having(recipe: rc.Recipe) -> set[str]:
        return {name for name, value in properties(recipe).items() if value}

    assert having(R()) == set()
    assert having(R(retention=retention.Decay(alpha=0.9))) == set()  # decays, for any token
    assert having(R(retention=retention.Decay())) == {"dynamic decay"}
    assert having(MONETA) == {"dynamic decay", "deep memory"}
    assert having(R(features=features.Relu())) == set()
    assert having(R(features=features.Polynomial(degree=1))) == set()
    assert having(R(features=features.Polynomial(degree=2))) == {"nonlinear capacity"}
    assert having(R(algorithm=algorithm.Muon())) == {"locally optimal"}
    assert having(R(algorithm=algorithm.Muon(ns_steps=0))) == set()
    assert having(R(context=context.Window(size=2))) == {"flexible context"}
    assert having(R(context=context.Window(size=1))) == set()


# -- the rest ------------------------------------------------------------------------------------


def test_requirements_of_a_recipe() -> None:
    result = explain(MONETA)
    assert "gate log_decay [B, T, H, V] ≤ 0" in str(result)
    assert "param norm_weight [H, V]" in str(result)
    assert result.init == ("W2 [256×64]", "W1 [64×256]")
    assert explain(R()).init == ()


def test_units_of_layer_options() -> None:
    """A multiple of the limit, 1/place and √V, if the layer's options state a number in them."""
    rate = "in a layer η_t = s_t · {}, s_t times the stability limit"
    units = {
        "titans": {"lr": rate.format("2 (1 − θ_t) / 8")},
        "ttt_linear": {
            "lr": rate.format("2"),
            "offset": "in a layer in multiples of 1/place in the inner batch, at least -0.8",
        },
        "yaad": {
            "lr": rate.format("2 / 8"),
            "threshold": "in a layer in multiples of √V, the length of a value",
        },
        "gla": {},
    }
    for name, expected in units.items():
        result = rc.explain(name)
        assert result.units == expected
        assert all(f"; {unit}" in str(result) for unit in expected.values())


NORMALISED = [
    name for name in rc.zoo.names() if rc.zoo.get(name).recipe.algorithm.uses_normalized_steps
]


@pytest.mark.parametrize("name", [*NORMALISED, "atlas", "titans_mac"])
def test_normalised_steps_are_described_and_unfolded(name: str) -> None:
    """With a link, the scales of a step are words by default, and equations in full."""
    short, full = (
        explain(name, full=full)
        if name in rc.zoo.names()
        else explain(name, full=full).parts["memory"]
        for full in (False, True)
    )
    letters = set(re.findall(r"r_t|ρ_\w+|λ_t", " ".join(short.write_equations)))
    assert letters
    described = {line.partition(":")[0] for line in short.symbols}
    assert letters <= described
    defined = {line.partition(" = ")[0] for line in full.write_equations}
    assert letters <= defined and not letters & {
        x.partition(" = ")[0] for x in short.write_equations
    }
    assert ("v̂" in str(short)) == ("v̂" in "".join(full.write_equations))
    assert (
        max(map(len, (*short.problem.split("\n"), *short.write_equations, *short.read_equations)))
        <= 91
    )  # and a label
    link = next(line for line in short.symbols if "docs/" in line).rpartition("docs/")[2]
    page, _, anchor = link.partition("#")
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in [heading.lower().replace(" ", "-") for heading in headings]
    assert set(short.symbols) - {line for line in short.symbols if "full=True" in line} <= set(
        full.symbols
    )


def test_requested_engine_is_explained() -> None:
    explanation = explain(R(), engine="reference")
    assert (explanation.engine, explanation.cost.engine) == ("reference", "reference")
    with pytest.raises(rc.RecipeError, match="cannot run"):
        explain(MONETA, engine="linear")


def one_graph(name: str, *, grad: bool = False, state: bool = False) -> bool:
    """Whether the compiler runs a call of a preset as one graph, and equal to the eager call."""
    recipe = rc.zoo.get(name).recipe
    K, V = generate.sizes(recipe, random.Random(0))
    x = generate.inputs(recipe, T=5, K=K, V=V, dtype=torch.float32)
    x = x.with_grad() if grad else x
    arguments = {"params": x.params, "initial_memory": x.init}
    initial_state = rc.recall(recipe, x.q, x.k, x.v, x.gates, **arguments)[1] if state else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rc.recall(recipe, q, k, v, x.gates, state=initial_state, **arguments)[0]

    torch._dynamo.reset()
    try:
        y = torch.compile(call, fullgraph=True, backend="eager")(x.q, x.k, x.v)
    except torch._dynamo.exc.TorchDynamoException:
        return False
    torch.testing.assert_close(y, call(x.q, x.k, x.v))
    if grad:
        y.sum().backward()
    return True


def on_page() -> list[set[str]]:
    """Return presets that the page names, by the rows of its table."""
    page = (Path(__file__).parents[1] / "docs" / "explain.md").read_text(encoding="utf-8")
    table = page.split("### One graph")[1].split("## Two more")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| a forward")]
    return [set(re.findall(r"`(\w+)`", cell)) for cell in cells]


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("lru", "titans") else pytest.param(name, marks=pytest.mark.slow)
        for name in rc.zoo.names()
    ],
)
def test_page_lists_presets_that_are_one_graph(name: str) -> None:
    both_modes, forward = on_page()
    assert one_graph(name) == (name in both_modes | forward)
    both = one_graph(name, grad=True) and one_graph(name, state=True)
    assert both == (name in both_modes)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_no_engine_excludes_graph_breaks(engine: Engine) -> None:
    """Each engine has a recipe that breaks the graph of rc.recall."""
    breaking = {"linear": "based", "kernel": "deep_transformer", "reference": "titans"}
    names = [breaking[engine.name]] if engine.name in breaking else rc.zoo.names()
    able = (rc.zoo.get(name).recipe for name in names)
    recipe = next(recipe for recipe in able if not engine.unsupported_reasons(recipe))
    explanation = explain(recipe, engine=engine.name)
    assert "torch.compile" not in str(explanation)
    x = generate.inputs(recipe, T=5, dtype=torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        args = {"params": x.params, "initial_memory": x.init, "engine": engine.name}
        return rc.recall(recipe, q, k, v, x.gates, **args)[0]

    assert call(x.q, x.k, x.v).isfinite().all()
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        compiled(x.q, x.k, x.v)


def test_invalid_recipes_are_refused() -> None:
    with pytest.raises(rc.RecipeError, match="no architecture named"):
        explain("gated_delta_nt")
    with pytest.raises(rc.RecipeError, match="not int"):
        explain(3)


def test_terms() -> None:
    a, b = Term(("a",)), Term(("b",), -2.0)
    assert render_sum((a, b)) == "a − 2 b"
    assert render_sum((-a, -b)) == "−a + 2 b"
    assert render_sum((b.times("η", -0.5), a.times(0.0))) == "η b"
    assert render_sum(()) == "0"
    assert [parenthesise(x) for x in ("a b", "(a b)", "f(a b)", "−a")] == [
        "(a b)", "(a b)", "f(a b)", "(−a)",
    ]  # fmt: skip
    assert (power(2), power(-1), power(0.5), power(1)) == ("²", "⁻¹", "^0.5", "")
    assert (format_number(-0.25), format_number("η")) == ("−0.25", "η")


def test_members_are_printed_as_code() -> None:
    recipe = R(
        memory=memory.LocalConstant(),
        context=context.KernelWeighted(restrictions=(context.Window(size=4, gated=False),)),
        algorithm=algorithm.Analytic(),
    )
    assert explain(recipe).title == (
        "Recipe(memory=LocalConstant(), context=KernelWeighted(restrictions=(Window(size=4, "
        "gated=False),)), algorithm=Analytic())"
    )
    assert explain(R()).title == "Recipe()"


# -- the documentation ---------------------------------------------------------------------------

DOCS = Path(__file__).parents[1] / "docs"


def test_every_member_is_documented() -> None:
    text = (DOCS / "members.md").read_text(encoding="utf-8")
    for choice in (*CHOICES, "read", "probe"):
        for member in generate.members(choice):
            if not member.__module__.startswith("recollect."):
                continue  # a user's member
            assert f"`{member.__name__}" in text, (
                f"docs/members.md does not mention {member.__name__}"
            )


def test_documented_explanations_are_printed() -> None:
    text = (DOCS / "explain.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n(.*?)\n```", text, re.DOTALL)
    recipes = {str(explain(recipe)) for recipe in ("gated_delta_net", MONETA, ROBUST)}
    # The first line is the recipe as it was typed.
    result = {tuple(without_numbers(text)[1:]) for text in blocks}
    assert result == {tuple(without_numbers(text)[1:]) for text in recipes}


def test_pages_count_the_presets() -> None:
    root, count = Path(__file__).parents[1], len(rc.zoo.names())
    page = (root / "docs" / "explain.md").read_text(encoding="utf-8")
    counts = re.findall(r"named +none of the (\d+)", page)
    assert counts and set(counts) == {str(count)}
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"in (\d+) presets", readme) == [str(count)]


def test_the_tutorial_names_the_layers_of_its_table() -> None:
    """`explain` names the README's recipe with the choices of each row."""
    root = Path(__file__).parents[1]
    readme = (root / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^gated_delta_net = .*?^\)$", readme, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"rc": rc}
    exec(code, names)
    base = names["gated_delta_net"]
    _, _, below = readme.partition(code)
    first = re.search(r"```text\n(.*?)\n```", below, re.DOTALL)
    assert first is not None
    assert str(explain(base)).startswith(first[1] + "\n")
    assert [x.name for x in explain(base).same_recipe_systems] == ["gated_delta_net"]

    tutorial = root / "docs" / "tutorials" / "state-a-layer.md"
    page = tutorial.read_text(encoding="utf-8")
    _, _, below = page.partition("| layer | choices |\n|---|---|\n")
    table, _, _ = below.partition("\n\n")
    rows = re.findall(
        r"^\| (?:`(\w+)`|no published name) \| (the same with )?`(.*?)` \|$", table, re.MULTILINE
    )
    assert len(rows) == len(table.splitlines()) >= 6
    recipe, named = base, []
    for name, same, changes in rows:
        choices = eval(f"dict({changes})", {"rc": rc})
        recipe = (recipe if same else base).replace(**choices)
        named.append(
            [x.name for x in explain(recipe).same_recipe_systems if not x.differing_options]
            == [name] * bool(name)
        )
        rc.MemoryLayer(16, 2, recipe)
    assert all(named), list(zip(rows, named, strict=True))
