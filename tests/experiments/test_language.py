"""Language models of the papers' experiments: measurements, and variants that differ once."""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from recollect.experiments import Results
from recollect.experiments.framework.records import NotMeasured
from recollect.experiments.framework.rules import below, less_than
from recollect.experiments.papers import language_models as language
from recollect.experiments.papers.am import heads
from recollect.experiments.papers.atlas import ablations as atlas
from recollect.experiments.papers.language_models import (
    BIGRAM,
    BITS,
    COMMON_SENSE,
    SMOKE,
    if_learned,
    language_model,
)
from recollect.experiments.papers.miras import ablations as miras
from recollect.lm.memory_estimate.flops import model_flops
from recollect.lm.model.counts import parameter_count
from recollect.lm.model.model import RecollectForCausalLM
from recollect.recipe.recipe import Recipe
from recollect.tasks.text import TextCorpus, load_text
from recollect.zoo.preset import get

CPU = torch.device("cpu")
TERMS: dict[str, Any] = {**SMOKE, "length": 16, "step_tokens": 32, "steps": 3, "measured": 64}


@pytest.fixture(scope="module")
def paragraphs() -> str:
    letters = "abcdefghijklmnop"
    lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
    return "\n\n".join(lines)


@pytest.fixture
def corpus(tmp_path: Path, paragraphs: str, monkeypatch: pytest.MonkeyPatch) -> TextCorpus:
    path = tmp_path / "text.txt"
    path.write_text(paragraphs, "utf-8")
    text = load_text(path)
    monkeypatch.setattr(language, "_text", lambda: text)
    return text


def test_bits_by_position_against_a_loop(corpus: TextCorpus) -> None:
    built = language.model_for_cell(TERMS, "delta_net")
    torch.manual_seed(0)
    net = RecollectForCausalLM(built).eval()
    size = language._sizes(TERMS)
    with torch.no_grad():
        result = language._bits_by_position(net, corpus, size, 10**9)
        data, T = corpus.heldout.long(), size.length
        sums, rows = torch.zeros(T, dtype=torch.float64), 0
        for start in range(0, len(data) - 1 - T + 1, T):
            logits = net(input_ids=data[None, start : start + T]).logits[0].double()
            for at in range(T):
                p = torch.softmax(logits[at], -1)[data[start + at + 1]]
                sums[at] -= math.log2(float(p))
            rows += 1
    assert rows > 4
    torch.testing.assert_close(result, sums / rows, rtol=1e-5, atol=1e-5)


def test_spans_of_positions_cover_the_row() -> None:
    assert language._span_starts(1) == [0]
    assert language._span_starts(16) == [0, 1, 2, 4, 8]
    assert language._span_starts(17) == [0, 1, 2, 4, 8, 16]


def test_a_model_is_trained_and_measured(corpus: TextCorpus) -> None:
    first, repeated, other = (
        language_model(TERMS, "delta_net", seed=seed, device=CPU) for seed in (0, 0, 1)
    )
    assert first[BITS] == repeated[BITS] != other[BITS]
    result = language.model_for_cell(TERMS, "delta_net")
    assert first["parameters"] == parameter_count(result)
    assert abs(parameter_count(result) - TERMS["parameters"]) <= 12 * 16
    assert first["tokens"] == 3 * 32
    assert first["FLOPs"] == model_flops(result, context=16) * 3 * 32
    spans = first["bits by position"]
    assert isinstance(spans, list)
    widths = [1, 1, 2, 4, 8]
    mean = sum(w * x for w, x in zip(widths, spans, strict=True)) / 16
    assert mean == pytest.approx(first[BITS])
    assert math.isnan(first["diverged at step"])  # type: ignore[arg-type]


def test_grid_varies_the_model(corpus: TextCorpus) -> None:
    config = language.model_for_cell(TERMS, "delta_net", width=32, heads=4, parameters=40_000)
    assert (config.hidden_size, config.num_attention_heads) == (32, 4)
    assert abs(parameter_count(config) - 40_000) <= 12 * 32
    config = language.model_for_cell(
        {**TERMS, "channels": 8}, "delta_net", width=32, parameters=40_000
    )
    assert config.num_attention_heads == 4
    result = language_model(TERMS, "delta_net", seed=0, device=CPU, length=8)
    assert len(result["bits by position"]) == 4  # type: ignore[arg-type]
    assert result["tokens"] == 3 * 32


def test_diverged_model_is_reported_last(corpus: TextCorpus) -> None:
    result = language_model({**TERMS, "lr": 1e30}, "delta_net", seed=0, device=CPU)
    assert math.isnan(result[BITS])  # type: ignore[arg-type]
    assert result["diverged at step"] in (2.0, 3.0)
    results = Results.from_rows([({"model": "a"}, 0, result), ({"model": "b"}, 0, {BITS: 9.0})])
    outcome = below(BITS, lower=("b",), upper=("a",)).judge(results)
    assert (outcome.status, "a diverged" in outcome.evidence) == ("holds", True)
    with pytest.raises(NotMeasured):
        below(BITS, lower=("b",), upper=("c",)).judge(results)


def test_models_worse_than_a_bigram_have_no_verdict() -> None:
    few = [({"model": "a"}, 0, {BITS: 3.7, BIGRAM: 3.6}), ({"model": "b"}, 0, {BITS: 4.0})]

    def status(rows: Any, models: tuple[str, ...] = (), **cell: Any) -> str:
        rule = if_learned(less_than(BITS, 9.0), models=models, **cell)
        return rule.judge(Results.from_rows(rows)).status

    untestable = if_learned(less_than(BITS, 9.0), model="a").judge(Results.from_rows(few))
    assert untestable.status == "not testable at this scale"
    assert "3.700 bits per byte, and a byte bigram has 3.600" in untestable.evidence
    assert status(few, model="b") == "holds"
    assert status([*few, ({"model": "a"}, 1, {BITS: 3.5, BIGRAM: 3.6})], model="a") == "holds"
    with pytest.raises(NotMeasured, match="were not measured"):
        status(few, model="c")
    assert status(few, models=("a",)) == "not testable at this scale"
    assert status(few, models=("a", "b")) == "holds"
    two = [({"kernel": "exp", "heads": n}, 0, {BITS: 4.0, BIGRAM: 3.6}) for n in (1, 4)]
    (claim,) = [c for c in heads.FIG2.claims if "exponential" in c.name]
    assert claim.verdict(Results.from_rows(two)).status == "not testable at this scale"


def planned(tmp_path: Path, paragraphs: str) -> dict[str, Any]:
    for name in ("text.txt", "heldout.txt"):
        (tmp_path / name).write_text(paragraphs, "utf-8")
    return {
        **{name: x for name, x in TERMS.items() if name != "steps"},
        "tokens": 96,
        "vocab": 264,
        "data": {"train": [str(tmp_path / "text.txt")], "heldout": [str(tmp_path / "heldout.txt")]},
        "tasks": [],
        "folder": str(tmp_path / "models"),
    }


def test_plan_runs_once_and_its_model_is_reused(tmp_path: Path, paragraphs: str) -> None:
    terms = planned(tmp_path, paragraphs)
    result = language_model(terms, "delta_net", seed=0, device=CPU)
    assert result["tokens"] == 96
    assert 0 < result[BITS] < 10  # type: ignore[operator]
    (folder,) = (tmp_path / "models").iterdir()
    saved = RecollectForCausalLM.from_pretrained(folder / "model")
    assert parameter_count(saved.config) == result["parameters"]
    weights = (folder / "model" / "model.safetensors").read_bytes()
    assert language_model(terms, "delta_net", seed=0, device=CPU)[BITS] == result[BITS]
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    language_model(terms, "delta_net", seed=1, device=CPU)
    assert len(list((tmp_path / "models").iterdir())) == 2


def test_tasks_measure_the_model_of_a_plan(
    tmp_path: Path, paragraphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a replacement for the network's tasks; the arguments are those of `evaluate`."""
    module = importlib.import_module("recollect.lm.evaluation.evaluate")
    parameters, requested = inspect.signature(module.evaluate), {}

    def measured(*args: Any, **kwargs: Any) -> SimpleNamespace:
        requested.update(parameters.bind(*args, **kwargs).arguments)
        return SimpleNamespace(tasks=(SimpleNamespace(task="wikitext", metrics=WIKITEXT),))

    monkeypatch.setattr(module, "evaluate", measured)
    terms = {**planned(tmp_path, paragraphs), "tasks": ["wikitext"]}
    result = language_model(terms, "delta_net", seed=0, device=CPU)
    (folder,) = (tmp_path / "models").iterdir()
    assert requested["model"] == folder / "model"
    assert (requested["tasks"], requested["context"], requested["device"]) == (
        ["wikitext"],
        16,
        "cpu",
    )
    assert requested["out"] == folder / "evaluation"
    assert result[BITS] == 1.25
    assert result["wikitext word_perplexity"] == 80.0


WIKITEXT = {"bits_per_byte": 1.25, "word_perplexity": 80.0}


def test_numbers_of_tasks() -> None:
    tasks = COMMON_SENSE.items()
    accuracies = {task: {name: i / 10, "other": 9.0} for i, (task, name) in enumerate(tasks)}
    result = language._task_metrics({"wikitext": {"bits_per_byte": 0.9}, **accuracies})
    assert result[BITS] == 0.9
    assert result["accuracy"] == pytest.approx(0.35)
    assert result["piqa other"] == 9.0
    del accuracies["boolq"]
    assert "accuracy" not in language._task_metrics(accuracies)
    assert BITS not in language._task_metrics(accuracies)


# -- variants differ in their stated choice, and in nothing else -----------------------------------


def changed(recipe: Recipe, of: Recipe) -> set[str]:
    return {f.name for f in fields(of) if getattr(recipe, f.name) != getattr(of, f.name)}


@pytest.mark.parametrize(
    ("part", "choices"),
    [
        ("without retention gate", {"retention"}),
        ("without input-dependent threshold", set()),
        ("without ℓ₂", {"bias"}),
        ("without ℓ₁", {"bias"}),
        ("without deep memory", {"memory"}),
    ],
)
def test_parts_of_yaad(part: str, choices: set[str]) -> None:
    full = get("yaad")
    name, recipe, options = miras.yaad_variant(part)  # type: ignore[misc]
    assert name == part
    assert changed(recipe, full.recipe) == choices  # type: ignore[arg-type]
    gates = {gate.name for gate in recipe.gates()} | {param.name for param in recipe.params()}  # type: ignore[union-attr]
    assert set(dict(options.gate_options)) <= gates  # type: ignore[union-attr]
    if not choices:
        assert dict(options.gate_options)["threshold"].source == "learned"  # type: ignore[union-attr]


def test_parts_of_atlas() -> None:
    full = get("atlas")
    for name, choice in (
        ("linear memory", "memory"),
        ("without Muon", "algorithm"),
        ("c = 1", "context"),
        ("without polynomials", "features"),
    ):
        _, recipe, options = atlas.atlas_variant(name)  # type: ignore[misc]
        assert changed(recipe, full.recipe) == {choice}  # type: ignore[arg-type]
        assert options == full.options
    omega_net = get("omega_net").recipe
    assert changed(omega_net, full.recipe) == {"algorithm", "memory"}
    assert changed(get("atlas_plus_plus").recipe, full.recipe) == {"memory"}


def test_powers_of_moneta_and_kernels_of_attention() -> None:
    full = get("moneta")
    _, recipe, options = miras._moneta({"p": 3.0, "q": 4.0})  # type: ignore[misc]
    assert (recipe, options) == (full.recipe, full.options)
    _, recipe, _ = miras._moneta({"p": 1.5, "q": 2.0})  # type: ignore[misc]
    assert changed(recipe, full.recipe) == {"bias", "retention"}  # type: ignore[arg-type]
    assert replace(recipe.retention, q=4.0) == full.recipe.retention  # type: ignore[union-attr]
    cells = miras._pq_cells({"p": [3.0, 4.0], "q": [2.0, 4.0], "lengths": [8]})
    assert [(c["p"], c["q"]) for c in cells] == [(3.0, 4.0), (4.0, 4.0), (3.0, 2.0)]
    linear, exp = (heads._model({"kernel": kernel}) for kernel in heads.KERNELS)
    assert changed(linear[1], exp[1]) == {"features"}  # type: ignore[arg-type]
    assert linear[2] == exp[2]  # type: ignore[misc]
