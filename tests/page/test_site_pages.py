"""Pages of the documentation's hook: one per system, results, and the first picture."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import recollect as rc
import systems
import uses
from measured import results_for
from recollect.page.python_text import as_python
from systems import INDEX, families, system_pages

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SYSTEMS = [*rc.zoo.names(), *rc.zoo.names(kind="hybrid")]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return system_pages(RESULTS)


def test_every_system_has_a_page_and_a_row(pages: dict[str, str]) -> None:
    assert set(pages) == {INDEX, *(f"zoo/{name}.md" for name in SYSTEMS)}
    assert sorted(SYSTEMS) == sorted(name for names in families().values() for name in names)
    rows = re.findall(r"^\| \[`(\w+)`\]\(\1\.md\)", pages[INDEX], re.MULTILINE)
    assert sorted(rows) == sorted(SYSTEMS)
    for name in SYSTEMS:
        system, page = rc.zoo.get(name), pages[f"zoo/{name}.md"]
        assert system.rule in page
        assert f"**{system.fidelity.kind.capitalize()}**, from " in page
        unescaped = page.replace("\\", "")
        assert all(str(reference) in unescaped for reference in system.references)


def test_a_page_states_use_and_cost_in_a_line_each(pages: dict[str, str]) -> None:
    for name in SYSTEMS:
        introduction = pages[f"zoo/{name}.md"].partition("## Equation")[0]
        for label in ("Used for", "Cost"):
            (line,) = re.findall(rf"^- \*\*{label}:\*\* (.+)$", introduction, re.M)
            assert line.endswith("."), name
    models = {name for name in SYSTEMS if "**Used in:**" in pages[f"zoo/{name}.md"]}
    assert models == set(uses.published_models()) and "gated_delta_net" in models


def test_the_use_of_a_system_follows_from_its_structure() -> None:
    lines = {
        name: uses.use_line(rc.zoo.get(name), rc.explain(name))
        for name in ("linear_attention", "gated_delta_net", "softmax_attention", "titans_mac")
    }
    assert lines == {
        "linear_attention": "long texts (constant state).",
        "gated_delta_net": "long texts (constant state), pairs whose values change and texts whose "
        "subject changes.",
        "softmax_attention": "recall of every earlier token (growing state).",
        "titans_mac": "long texts (constant state), pairs whose values change, texts whose subject "
        "changes, nonlinear maps from keys to values and recall of recent tokens.",
    }


def test_a_page_has_the_printed_equation_of_a_variant(pages: dict[str, str]) -> None:
    with_section = {name for name in SYSTEMS if "## Printed equation" in pages[f"zoo/{name}.md"]}
    deep = {x for x in rc.zoo.names(kind="deep") if rc.zoo.get(x).family != "ttt_2025"}
    assert with_section == deep
    for name in deep:
        variant = rc.zoo.get(name, variant="published")
        section = pages[f"zoo/{name}.md"].partition("## Printed equation")[2].partition("\n## ")[0]
        assert variant.rule in section and f"`{variant.name}`" in section
        items = [line for line in section.splitlines() if line.startswith("- ")]
        assert len(items) == len(variant.fidelity.deviations)


PRINTED = {
    "titans": (
        "M_t = α_t M_(t−1) + S_t  (ATLAS eq. 12)",
        "S_t = θ_t S_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t)  (ATLAS eq. 13)",
    ),
    "titans_with_base": (
        "M_t = α_t M_(t−1) + S_t  (ATLAS eq. 12)",
        "S_t = θ_t S_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t)  (ATLAS eq. 13)",
    ),
    "titans_minus": ("M_t = α_t M_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t)  (ATLAS table 1, Titans–)",),
    "omega_net": (
        "M_t = α_t M_(t−1) − ∇ Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ(k_i)) − v_i‖²_2  (ATLAS eq. 10)",
    ),
    "omega_net_with_base": (
        "M_t = α_t M_(t−1) − ∇ Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ(k_i)) − v_i‖²_2  (ATLAS eq. 10)",
    ),
    "moneta": (
        "A_t = α_t A_(t−1) − η_t ∇ℓ_p(W_(i−1); k_t, v_t)  and  W_t = A_t / ‖A_t‖_q^(q−2)  "
        "(MIRAS eq. 24)",
    ),
    "yaad": (
        "W_t = α_t W_(t−1) − { η_t ∇ℓ_2(W_(t−1); k_t, v_t)      if ‖M(k_t) − v_t‖ ≤ δ_t,",
        "                      η_t δ_t ∇ℓ_1(W_(t−1); k_t, v_t)  otherwise  (MIRAS eq. 26)",
    ),
    "memora_per_token": (
        "W_t = Softmax(α_t log(W_(t−1)) − η_t ∇ℓ_2(W_(t−1); k_t, v_t))  (MIRAS eq. 27)",
    ),
    "ttt_linear": ("M_t = M_(t−1) − η ∇L(M_(t−1), x_t)  (MIRAS table 1)",),
    "ttt_mlp": ("M_t = M_(t−1) − η ∇L(M_(t−1); k_t, v_t)  (MIRAS table 1)",),
}
"""Equations of ATLAS and MIRAS, copied from the papers, of presets with normalised steps."""


@pytest.mark.parametrize("name", PRINTED)
def test_the_equation_of_the_source_is_the_printed_one(name: str, pages: dict[str, str]) -> None:
    """Only the computed rule has the scale ρ of normalised steps and the overlap r."""
    section = pages[f"zoo/{name}.md"].partition("## Equation\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```{ \.text \.equations }\n(.*?)\n```$", section, re.S | re.M)
    assert blocks[0].splitlines() == list(PRINTED[name])
    assert blocks[1] == rc.zoo.get(name).rule
    assert all("ρ" in block for block in blocks[1:])


def test_labels_of_any_length_have_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels may have more than eight characters."""
    blocks = (("a label of many words", ("one | two", "three")), ("write", ("left out",)))
    result = SimpleNamespace(blocks=blocks, equations=())
    monkeypatch.setattr("systems.explain", lambda recipe: result)
    section = "\n".join(systems._preset_sections(rc.zoo.get("delta_net")))
    assert "| **a label of many words** | one \\| two<br>three |" in section
    assert "left out" not in section


def test_deviations_are_a_list(pages: dict[str, str]) -> None:
    for name in SYSTEMS:
        section = pages[f"zoo/{name}.md"].partition("## Fidelity\n")[2].partition("\n## ")[0]
        items = [line for line in section.replace("\\", "").splitlines() if line[:2] == "- "]
        assert items == [f"- {item}" for item in rc.zoo.get(name).fidelity.deviations]


def test_equations_and_engines_are_those_of_the_explanation(pages: dict[str, str]) -> None:
    for name in ("titans", "lru", "samba", "delta_former"):
        page = pages[f"zoo/{name}.md"].replace("\\", "")
        result = rc.explain(name)
        for part in [result] if hasattr(result, "write_equations") else result.parts.values():
            assert f"problem  min  {part.problem}" in page
            assert all(line in page for line in part.write_equations)
            assert f"{part.engine} ({part.engine_mode})" in page


@pytest.mark.parametrize("family", families())
def test_the_code_of_a_page_makes_its_system(family: str, pages: dict[str, str]) -> None:
    pytest.importorskip("transformers")
    for name in families()[family]:
        code, *variants = CODE.findall(pages[f"zoo/{name}.md"])
        for variant in variants:
            names: dict[str, Any] = {}
            exec(compile(variant, name, "exec"), names)
            published = rc.zoo.get(name, variant="published")
            assert (names["recipe"], names["options"]) == (published.recipe, published.options)
            assert names["layer"].options == published.options
        result: dict[str, Any] = {}
        exec(compile(code, name, "exec"), result)
        system = rc.zoo.get(name)
        if "recipe" in result:
            assert result["recipe"] == system.recipe
            assert result.get("options", rc.LayerOptions()) == system.options
        elif "mixer" in result:
            assert rc.blocks.as_mixer(result["mixer"]) == system.mixer
        else:
            mixers = {key: rc.blocks.as_mixer(one) for key, one in result["layers"].items()}
            assert tuple(mixers.items()) == system.layers


def test_local_member_cannot_be_written() -> None:
    class Elsewhere(rc.bias.L2):
        pass

    with pytest.raises(ValueError, match="Elsewhere is not under rc"):
        as_python(rc.Recipe(bias=Elsewhere()))


def test_numbers_are_those_of_the_results(pages: dict[str, str]) -> None:
    for path in RESULTS.glob("language_models/*.json"):
        value = json.loads(path.read_text())["run"]["value"]
        name, same, _ = path.stem.partition("-same")
        assert f"| {value:.3f} |" in pages[f"zoo/{name}.md"]
        assert f"| {value:.3f} |" in pages[INDEX] or same
        assert ("| `--layer-options same` | " in pages[f"zoo/{name}.md"]) or not same
    records = json.loads((RESULTS / "reproduce/mqar/results.json").read_text())["records"]
    mine = [
        r["values"]["accuracy"]
        for r in records
        if r["cell"] == {"architecture": "delta_net", "width": 16}
    ]
    (table,) = (t for t in results_for("delta_net", RESULTS) if t.title.startswith("mqar"))
    (row,) = (row for row in table.rows if row[0] == "width 16")
    result = row[table.column_names.index("accuracy")]
    assert result == f"{sum(mine) / len(mine):.3f} ({min(mine):.3f} to {max(mine):.3f})"


def test_pages_without_results(tmp_path: Path) -> None:
    assert results_for("titans", tmp_path) == []
    assert "No results yet." in system_pages(tmp_path)["zoo/titans.md"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("[x](../results/notes/steps.md#y), `results/z.md`")
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "docs" / "hooks" / "site.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)  # the standard library has a module `site`
    spec.loader.exec_module(hook)
    assert list(hook._results(tmp_path)) == ["results/notes/steps.md"]


def test_links_between_pages_resolve(pages: dict[str, str]) -> None:
    for path, text in pages.items():
        for link in re.findall(r"\]\((?!http)([^)#]*\.md)", text):
            place = (Path(path).parent / link).as_posix()
            place = re.sub(r"[^/]+/\.\./", "", place)
            if not place.startswith("results/"):
                assert place in pages or (ROOT / "docs" / place).exists(), (path, link)
            else:
                assert (ROOT / place).exists(), (path, link)


def test_picture_shows_computed_values() -> None:
    """Least squares stores one pair per key channel, and memories with decay adapt to changes."""
    pytest.importorskip("matplotlib")
    import picture

    storage, changed = picture.storage_errors(), picture.switch_errors()
    at = picture.PAIRS.index
    assert (
        storage["exact least squares: RLS"][at(12)]
        < 0.01
        < 0.2
        < storage["exact least squares: RLS"][at(20)]
    )
    assert max(storage["all pairs stored: softmax attention"]) < 0.05
    assert all(a[at(1)] < 0.01 for a in storage.values())
    end = {name: sum(y[-8:]) / 8 for name, y in changed.items()}
    assert min(end, key=end.__getitem__) == "least squares that forgets"
    drawing = picture.render_picture()
    assert drawing.svg != drawing.narrow
    assert "<svg" in drawing.svg and "http://www.w3.org/2000/svg" in drawing.narrow


def test_the_figure_of_steps_shows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    import stability
    from recollect.choices import memory

    monkeypatch.setattr(stability, "MULTIPLES", (0.3, 0.5, 0.9, 1.1, 2.0))
    matrix, normed = memory.Matrix(), memory.MLP(norm="layer")
    curves = [stability.errors(matrix, "worst_case", repeated=True)]
    expected = [abs(1 - 2 * s) ** stability.BATCHES for s in stability.MULTIPLES]
    assert curves[0] == pytest.approx(expected, rel=1e-4, abs=1e-9)  # ρ has an ε of 1e-6
    curves += [stability.errors(normed, "worst_case", repeated=True)]
    assert curves[0][-1] > 50 and max(curves[1]) < 1
    for one in (matrix, normed):
        worst, measured = (
            stability.errors(one, overlap, repeated=False) for overlap in ("worst_case", "measured")
        )
        assert all(b < a for a, b in zip(worst, measured, strict=True))
