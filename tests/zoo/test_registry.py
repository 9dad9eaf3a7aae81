"""The zoo as a catalogue: description, source and fidelity of every entry."""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.contracts import generate

import recollect as rc
from recollect.recipe.recipe import CHOICES

TWINS = {
    "retnet_xpos": "retnet",
    "rg_lru": "lru",
    "longhorn_diagonal": "longhorn",
    "ffn_swiglu": "ffn_relu",
    "ffn_moe": "ffn_relu",
    "ffn_multi_head": "ffn_relu",
    "ffn_normalized": "ffn_relu",
    "gated_delta_product": "delta_product",
    "mamba3_mimo": "mamba3",
    "moneta_exact": "moneta",
    "titans_with_base": "titans",
    "omega_net_with_base": "omega_net",
    "memora_per_token": "memora",
    "elastic_net_proximal": "elastic_net",
    "atlas_per_token": "atlas",
}
"""Variants of presets: the exact rule, another form of the paper, or another layer."""


KINDS = {
    "softmax_attention": "attention",
    "local_linear_attention": "attention",
    "delta_former": "kernel",
    "gla": "matrix",
    "rls": "matrix",
    "lru": "vector",
    "titans": "deep",
    "dot": "deep",
    "ffn_moe": "feed_forward",
    "samba": "hybrid",
    "titans_mag": "hybrid",
}


def test_names_are_in_the_order_of_registration() -> None:
    names = rc.zoo.names()
    families = [
        family for family, _ in itertools.groupby(map(rc.zoo.get, names), lambda p: p.family)
    ]
    assert len(families) == len(set(families))  # each family is contiguous
    assert families[0] == "attention" and families[-1] == "feed_forward"
    for twin, name in TWINS.items():
        assert rc.zoo.get(twin).twin_of == name
        assert names.index(twin) > names.index(name)
    assert {name for name in names if rc.zoo.get(name).twin_of} == set(TWINS)


def test_kinds_follow_from_the_recipe() -> None:
    assert {name: rc.zoo.get(name).kind for name in KINDS} == KINDS
    by_kind = {kind: rc.zoo.names(kind=kind) for kind in set(KINDS.values())}
    assert sorted(itertools.chain(*by_kind.values())) == sorted(
        [*rc.zoo.names(), *by_kind["hybrid"]]
    )
    assert rc.zoo.names("hybrid_systems") == by_kind["hybrid"]
    assert rc.zoo.names("rwkv", kind="deep") == []


@pytest.mark.parametrize("name", rc.zoo.names())
def test_every_preset_states_its_source(name: str) -> None:
    preset = rc.zoo.get(name)
    assert preset.references
    assert preset.fidelity.kind in ("exact", "approximation", "reconstruction")
    assert str(preset.fidelity).startswith(preset.fidelity.kind)
    assert "(" in str(preset.references[0])
    assert preset.summary
    assert preset.rule
    assert name in rc.zoo.names(preset.family)
    assert rc.Recipe.from_json(preset.recipe.to_json()) == preset.recipe


NORMALIZED = [
    n for n in rc.zoo.names() if getattr(rc.zoo.get(n).recipe.algorithm, "normalized_steps", 0)
]


def test_the_source_of_normalised_steps_has_other_equations() -> None:
    """The papers print neither ρ, nor r, nor the length λ of an orthogonalised step."""
    assert len(NORMALIZED) == 13
    for name in NORMALIZED:
        preset = rc.zoo.get(name)
        assert re.search("[ρλ]", preset.rule)
        assert preset.fidelity.source_equation
        assert not re.search(r"[ρλ]|r_t", preset.fidelity.source_equation)


@pytest.mark.parametrize("name", [*rc.zoo.names(), *rc.zoo.names(kind="hybrid")])
def test_deviations_are_short_sentences(name: str) -> None:
    for item in map(str, rc.zoo.get(name).fidelity.deviations):
        assert item.endswith(".") and not re.match("[a-z]{3}", item), item
        assert len(item.split()) <= 25, item
        assert not re.search(r"\. [A-Z]", item.replace("et al. ", "")), item


@pytest.mark.parametrize("name", [n for n in NORMALIZED if "atlas" not in n])
def test_deviations_state_the_rate_that_a_layer_starts_with(name: str) -> None:
    """The rate is a multiple of the stability limit, as diagnosed at tokens of zeros."""
    torch.manual_seed(0)
    stated = [x for x in rc.zoo.get(name).fidelity.deviations if "the stability limit" in x.text]
    assert [x.key for x in stated] == ["rate"]
    (start,) = re.findall(r"starts at ([\d.]+)\.$", stated[0].text)
    layer = rc.zoo.get(name).build(16, 2)
    assert isinstance(layer, rc.MemoryLayer)
    share = rc.diagnose(layer, torch.zeros(1, 4, 16)).limit_multiple
    assert share is not None
    assert torch.allclose(share, torch.tensor(float(start)), atol=1e-4)


@pytest.mark.parametrize("page", ["README.md", "docs/zoo.md"])
def test_a_page_counts_kinds_of_fidelity(page: str) -> None:
    text = " ".join((Path(__file__).parents[2] / page).read_text("utf-8").split())
    counts = Counter(rc.zoo.get(name).fidelity.kind for name in rc.zoo.names())
    assert f"{counts['exact']} are exact" in text
    assert f"{counts['reconstruction']} are reconstructions" in text
    assert f"{counts['approximation']} are approximations" in text


def test_impossible_fidelity_is_refused() -> None:
    with pytest.raises(rc.RecipeError, match="must be one of exact, approximation"):
        rc.zoo.Fidelity(kind="close", source="eq. 1")
    for deviations in ("The rate is 1.", ("The rate is 1.",)):
        with pytest.raises(rc.RecipeError, match=r"must be a tuple of rc\.zoo\.Deviation, not "):
            rc.zoo.Fidelity(kind="exact", source="eq. 1", deviations=deviations)  # type: ignore[arg-type]
    with pytest.raises(rc.RecipeError, match=r"takes a key of recollect\.zoo\.fidelity"):
        rc.zoo.Deviation(key="rates", text="The rate is 1.")


@pytest.mark.parametrize("name", rc.zoo.names())
def test_deviations_follow_from_the_recipe(name: str) -> None:
    """Keys of shared deviations and the choices that they describe."""
    preset = rc.zoo.get(name)
    algorithm = preset.recipe.algorithm
    keys = {item.key for item in preset.fidelity.deviations}
    descent = isinstance(algorithm, rc.algorithm.GradientDescent | rc.algorithm.Momentum)
    assert ("normalized_step" in keys) == (descent and algorithm.normalized_steps)
    assert ("key_overlap" in keys) == (descent and algorithm.batch_overlap == "measured")
    assert ("inner_batches" in keys) == (getattr(algorithm, "batch_size", 1) > 1)
    assert not {"common_layer", "no_qk_norm"} <= keys


def replaced(name: str, count: int) -> list[tuple[rc.zoo.Preset, set[str]]]:
    """Return a preset with one choice replaced, and the options that a warning names."""
    rng, changed = random.Random(name), []
    for _ in range(count):
        choice = rng.choice(CHOICES)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                member = generate.draw_member(rng, rng.choice(generate.members(choice)))
                preset = rc.zoo.get(name).replace(**{choice: member})
            except rc.RecipeError:
                continue
        assert len(caught) <= 1
        changed.append((preset, {x for one in caught for x in reset_by(one)}))
    return changed


def reset_by(warning: warnings.WarningMessage) -> list[str]:
    """Return the options that a warning names."""
    assert issubclass(warning.category, UserWarning)
    return str(warning.message).partition("do not fit: ")[2].partition(";")[0].split(", ")


def options_of(preset: rc.zoo.Preset) -> dict[str, object]:
    """Return its options by name, without gates."""
    fields = vars(preset.options)
    gates = {f"gates[{name!r}]": gate for name, gate in dict(preset.options.gate_options).items()}
    return {**{name: x for name, x in fields.items() if name != "gate_options"}, **gates}


def size_of(recipe: rc.Recipe) -> tuple[int, int]:
    """Return K and V that fit a recipe: pairs of channels, or as many as its features need."""
    K = next((K for K in (14, 16) if recipe.axes(K, K).get("F", 2) % 2 == 0), 14)
    return K, recipe.axes(K, K)["F"] if recipe.memory.is_elementwise else K


@pytest.mark.parametrize("name", rc.zoo.names())
def test_the_memory_of_an_untrained_layer_does_not_diverge(name: str) -> None:
    """Weights after 288 random tokens are at most 30 times those after 32 tokens."""
    torch.manual_seed(0)
    module = rc.zoo.get(name).build(d_model=16, num_heads=1).double()
    x = torch.randn(1, 288, 16, dtype=torch.float64)
    state, sizes = None, list[float]()
    for part in x.split([32, 256], dim=1):
        with torch.no_grad():
            _, state = module(part, state)
        sizes.append(max((w.abs().max().item() for w in state.memory.weights), default=0.0))
    assert sizes[1] <= 30 * sizes[0]


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_preset_with_another_choice_has_a_layer(count: int) -> None:
    """`build` and `explain` accept every recipe that `replace` accepts."""
    for name in rc.zoo.names():
        for preset, reset in replaced(name, count):
            K, V = size_of(preset.recipe)
            preset.build(2 * K, 2, head_dim=K, value_dim=V)
            text = str(rc.explain(preset))
            assert " None" not in text, text
            options, changed = options_of(rc.zoo.get(name)), options_of(preset)
            differ = {key for key in options if options[key] != changed.get(key)}
            assert {key.partition(" ")[0] for key in differ} <= {x.partition(" ")[0] for x in reset}
            assert all(option in preset.fidelity.deviations[-1].text for option in reset)


DESCENT = rc.algorithm.GradientDescent(normalized_steps=True)


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("titans", {"algorithm": rc.algorithm.Adam()}, ["gates['momentum']", "gates['lr']"]),
        ("titans", {"algorithm": rc.algorithm.Momentum()}, ["gates['lr']"]),
        ("gla", {"retention": rc.retention.Keep()}, ["gates['log_decay']"]),
        ("hgrn2", {"retention": rc.retention.Decay()}, ["ties (k by complement)"]),
        ("lru", {"bias": rc.bias.Huber()}, ["complex_decay"]),
        (
            "omega_net",
            {"memory": rc.memory.Matrix()},
            ["gates['norm_weight']", "last_map_init_scale"],
        ),
        ("delta_product", {"algorithm": DESCENT}, ["gates['lr']"]),  # 0 to 2 in another unit
        ("retnet_xpos", {"retention": rc.retention.Decay(alpha="learned")}, ["gates['decay']"]),
    ],
)  # fmt: skip
def test_a_warning_names_the_options_that_are_reset(
    name: str, changes: dict[str, rc.Member], options: list[str]
) -> None:
    with pytest.warns(UserWarning, match="layer options") as caught:
        preset = rc.zoo.get(name).replace(**changes)
    assert reset_by(caught[0]) == options
    assert caught[0].filename == __file__
    y, _ = preset.build(16, 2)(torch.randn(1, 5, 16))
    assert y.isfinite().all()


def test_a_system_without_a_layer_for_a_choice_is_refused() -> None:
    with pytest.raises(rc.RecipeError, match="reads learned pairs"):
        rc.zoo.get("ffn_normalized").replace(memory=rc.memory.LocalPolynomial())


def test_explain_refuses_options_that_do_not_fit() -> None:
    titans = rc.zoo.get("titans")
    leaf = rc.blocks.RecipeMixer(
        recipe=titans.recipe.replace(algorithm=rc.algorithm.Momentum()), options=titans.options
    )
    with pytest.raises(rc.RecipeError, match="unit='stability_limit' needs normalised steps"):
        rc.explain(leaf)


FAMILIES = ("ttt", "ttt_2025", "titans", "miras", "miras_variants", "atlas")
DEEP = [name for family in FAMILIES for name in rc.zoo.names(family)]
OVER_KERNELS = [
    n for f in ("deep_transformer", "delta_former", "feed_forward") for n in rc.zoo.names(f)
]


@pytest.mark.parametrize("name", [*DEEP, *OVER_KERNELS])
def test_a_repeated_token_does_not_make_a_deep_memory_diverge(name: str) -> None:
    """All keys of an inner batch are equal, and their steps add up."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(32, 2)
    x = torch.randn(1, 1, 32).expand(1, 82, 32)
    with torch.no_grad():
        y, state = layer(x)
    assert state is not None
    assert y.isfinite().all()
    for weight in state.memory.weights:
        assert weight.isfinite().all()
        assert weight.abs().max() < 1e5


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", DEEP)
def test_a_long_run_of_one_token_and_long_values_stay_finite(name: str, trained: bool) -> None:
    """Values of a layer, and values 10 and 100 times as long."""
    torch.manual_seed(0)
    layer = rc.zoo.get(name).build(32, 2)
    if trained:
        _learn(layer, steps=40)
    x = torch.randn(1, 1, 32).expand(1, 4096, 32)
    with torch.no_grad():
        for times in (1.0, 10.0, 10.0):
            layer.qkv.weight[-layer.qkv_sizes[2] :] *= times
            y, state = layer(x)
            assert state is not None
            assert y.isfinite().all()
            for weight in state.memory.weights:
                assert weight.isfinite().all()


def _learn(layer: rc.MemoryLayer, steps: int) -> None:
    """Recall four pairs, between embeddings and a reading head of the layer's width."""
    config = rc.tasks.MqarConfig(vocab=32, pairs=4, length=24)
    embedding, head = torch.nn.Embedding(32, 32), torch.nn.Linear(32, 32)
    parts = torch.nn.ModuleList([embedding, layer, head])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        inputs, labels = rc.tasks.mqar(config, 8, generator)
        y, _ = layer(embedding(inputs))
        loss = torch.nn.functional.cross_entropy(head(y).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]  # it has learned


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(rc.RecipeError, match="gated_delta_net"):
        rc.zoo.get("gated_deltanet")
    with pytest.raises(rc.RecipeError, match="such as softmax_attention"):
        rc.zoo.get("zzz")
    with pytest.raises(rc.RecipeError, match="no family"):
        rc.zoo.names("birds")
    with pytest.raises(rc.RecipeError, match="no kind 'shallow'; it has attention, matrix"):
        rc.zoo.names(kind="shallow")


def test_a_system_changed_by_one_choice_keeps_the_options_of_its_layer() -> None:
    """The recipe alone has none, and its layer takes steps of another size."""
    titans = rc.zoo.get("titans")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = titans.replace(bias=rc.bias.Huber())
    assert mine.recipe == titans.recipe.replace(bias=rc.bias.Huber())
    assert titans.replace() is titans
    layer = mine.build(d_model=16, num_heads=2)
    assert layer.options == titans.options != rc.MemoryLayer(16, 2, mine.recipe).options
    assert mine.name not in rc.zoo.names() and mine.fidelity.source == "titans"
    with pytest.raises(rc.RecipeError, match="no choice 'loss'"):
        titans.replace(loss=rc.bias.Huber())
