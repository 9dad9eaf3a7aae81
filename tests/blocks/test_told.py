"""What is told of compositions: explain, cost, the commands, run files, comparisons, diagnoses."""

from __future__ import annotations

import json

import pytest
import torch
from tests.blocks import loops
from typer.testing import CliRunner

import recollect as rc
from recollect.blocks import AsContext, Chain, Gated, build, received
from recollect.cli import app as cli

NAMES = {"samba", "gated_delta_net_h1", "gated_delta_net_h2", "moneta_h", "yaad_h", "memora_h"}
NAMES |= {f"{memory}_{how}" for memory in ("titans", "atlas") for how in ("mac", "mag", "mal")}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.build(), [*arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_every_hybrid_is_in_the_zoo_with_its_source() -> None:
    assert set(rc.zoo.hybrids()) == NAMES
    rows = [rc.zoo.find(name).row for name in rc.zoo.hybrids()]
    assert rows == [*range(66, 78)]
    for name in NAMES:
        found = rc.zoo.find(name)
        assert found.references and found.summary and found.rule
        assert str(found.fidelity).startswith("reconstruction, from ")
        with pytest.raises(rc.RecipeError, match=r"one recipe is asked for here"):
            rc.zoo.get(name)
    with pytest.raises(rc.RecipeError, match="did you mean titans_m"):
        rc.zoo.find("titans_mak")


def test_explain_tells_the_composition_its_problems_and_its_state() -> None:
    said = run("explain", "titans_mac")
    assert "composes AsContext(memory, attention, segment=128, persistent=8)" in said
    assert "h_j = M(q(x_j)), M as it was when the segment of 128 tokens began" in said
    alone = rc.explain(rc.zoo.get("titans"))
    assert f"min  {alone.problem}" in said
    assert "660 KiB per sequence and head after 4096 tokens at K = V = 64, constant" in said
    data = json.loads(run("explain", "titans_mac", "--json"))
    assert rc.blocks.read_mixer(data["layers"]["titans_mac"]) == rc.zoo.find("titans_mac").mixer
    assert "mamba, sliding_window_attention, in turns" in run("explain", "samba")
    chain = Chain("gla", Gated("gla", "softmax_attention"), persistent=2)
    assert "y = m_1(m_0([p, x]))" in str(rc.explain(chain))


def test_the_zoo_lists_the_hybrids() -> None:
    rows = {row["name"]: row for row in json.loads(run("zoo", "--json"))}
    assert set(rows) >= NAMES
    assert rows["titans_mac"]["state_grows_per_token"] == 0
    assert rows["samba"]["engine"] == "linear, kernel"
    only = json.loads(run("zoo", "--family", "hybrid_systems", "--json"))
    assert {row["name"] for row in only} == NAMES


def test_sizes_knows_the_papers_sizes_of_hybrids() -> None:
    data = json.loads(run("sizes", "--models", "titans_mac,samba", "--json"))
    assert [size["name"] for size in data] == ["170M", "340M", "760M", "1.3B"]
    config = rc.lm.paper_config("170M", "samba")
    assert config.pattern[:2] == ["mamba", "sliding_window_attention"]
    assert data[0]["parameters"]["samba"]["total"] == rc.lm.parameter_count(config)


def test_the_state_that_cost_states_is_the_one_that_is_kept() -> None:
    """Memories in bytes: the layer's state has nothing else, as nothing has a convolution here."""
    T, H, D = 11, 2, 16
    for mixer in (
        Chain(loops.memory(), loops.attention(3, 2), persistent=2),
        Gated(loops.memory(), loops.attention(4)),
        AsContext(loops.memory(), loops.attention(), segment=11, persistent=2),
    ):
        layer = build(mixer, D, H)
        _, state = layer(torch.randn(1, T, D))
        price = rc.cost(mixer, K=D // H, V=D // H, H=H, T=T)
        assert price.state_bytes == state.nbytes
        assert price.grows == 0
    grown = rc.cost(Gated("gla", "softmax_attention"), K=8, V=8, T=64)
    assert grown.grows == rc.cost("softmax_attention", K=8, V=8, T=64).grows > 0


def test_the_work_of_a_composition_is_that_of_its_streams() -> None:
    sizes = {"K": 8, "V": 8, "H": 2}
    memory, attention = rc.zoo.get("gated_delta_net"), rc.zoo.get("softmax_attention")
    mac = AsContext(memory, attention, segment=16, persistent=4)
    price = rc.cost(mac, T=64, **sizes)
    alone = rc.cost(memory.recipe, T=64, **sizes)
    segment = rc.cost(attention.recipe, T=4 + 2 * 16, **sizes)
    assert price.total == alone.total + alone.forward["read"] + 4 * segment.total
    chain = rc.cost(Chain(memory, attention, persistent=4), T=60, **sizes)
    assert chain.total == alone.total + rc.cost(attention.recipe, T=64, **sizes).total


def test_what_a_memory_receives_can_be_diagnosed() -> None:
    layer = build(AsContext(loops.memory(), loops.attention(), segment=4), 8, 2).double()
    x = torch.randn(1, 10, 8, dtype=torch.float64)
    seen = received(layer, x)
    learned = []
    hook = layer.parts["memory"].register_forward_hook(lambda m, i, out: learned.append(i[0]))
    layer(x)
    hook.remove()
    assert torch.equal(seen["memory"], torch.cat(learned, 1))
    found = rc.diagnose(layer.leaves["memory"], seen["memory"])
    assert found.surprise.shape == (10, 2)
    with pytest.raises(rc.RecipeError, match="this layer composes memory, attention"):
        rc.diagnose(layer, x)  # type: ignore[arg-type]


def test_models_of_hybrids_are_compared() -> None:
    size = rc.experiments.Sizes(
        width=16,
        depth=2,
        heads=2,
        length=48,
        schedule=rc.experiments.Schedule(steps=2, batch=2, lr=1e-3),
    )
    own = ("mine", Gated("gla", "sliding_window_attention"))
    found = rc.compare(["samba", "titans_mal", own, "gla"], ["mqar"], sizes={"mqar": size})
    runs = {run.model: run for run in found.of("mqar")}
    assert set(runs) == {"samba", "titans_mal", "mine", "gla"}
    assert all(run.finished for run in runs.values())


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        ('recipe = "samba"', ["mamba", "sliding_window_attention"]),
        (
            'layers = ["a", "b", "mlp"]\n[model.recipes]\nb = "gla"\n'
            '[model.recipes.a]\nmixer = "as_context"\nmemory = "titans"\n'
            'attention = "softmax_attention"\nsegment = 8\n',
            ["a", "b"],
        ),
    ],
)
def test_a_run_file_takes_compositions(model: str, pattern: list[str]) -> None:
    import tomllib

    from recollect.lm.data.tokenizers import byte_tokenizer
    from recollect.lm.training.plan import ModelPlan
    from recollect.lm.training.prepare import model_config

    sizes = "[model]\nwidth = 16\ndepth = 2\nheads = 2\n"
    table = tomllib.loads(sizes + model)["model"]
    config = model_config(ModelPlan(**table), byte_tokenizer())
    assert config.pattern == pattern
    if "a" in pattern:
        assert config.mixer("a") == AsContext("titans", "softmax_attention", segment=8)
        assert config.followed == [False, True]


def test_a_run_file_with_a_composition_that_cannot_be_says_so() -> None:
    from recollect.lm.data.tokenizers import byte_tokenizer
    from recollect.lm.training.plan import ModelPlan
    from recollect.lm.training.prepare import model_config

    wrong = {
        "mixer": "as_context",
        "memory": "titans",
        "attention": "softmax_attention",
        "segment": 0,
    }
    with pytest.raises(ValueError, match=r"must be a whole number >= 1, not 0"):
        model_config(ModelPlan(recipe=wrong), byte_tokenizer())
    plan = ModelPlan(recipe={**wrong, "segment": 4}, options={})
    with pytest.raises(ValueError, match="options are those of one recipe"):
        model_config(plan, byte_tokenizer())
