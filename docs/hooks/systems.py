"""A page for every system of the zoo and a table of all systems, as Markdown.

Titles, sources and fidelity come from the presets, equations and engines from `rc.explain`, and
numbers from the committed results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from measured import bits_per_byte, results_for
from recollect import zoo
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.costs import Cost
from recollect.explanation.composition import Composition
from recollect.explanation.explain import Explanation, explain
from recollect.layer.options import LayerOptions
from recollect.page.python_text import as_python
from recollect.page.write import PAGE
from recollect.report.formatting import format_si
from recollect.report.tables import CellValue, Column, Table
from recollect.zoo.preset import Preset
from uses import cost_line, published_models, use_line

__all__ = ["INDEX", "families", "system_pages"]

INDEX = "zoo/index.md"
"""Path of the table of all systems; the path of a system is ``zoo/NAME.md``."""

_OTHER_SECTIONS = ("problem", "write", "read", "where", "fidelity")
"""Labels of an explanation that have a section of their own."""


def families() -> dict[str, list[str]]:
    """Return the names of systems by family, hybrids last, in the order of registration."""
    names: dict[str, list[str]] = {}
    for name in (*zoo.names(), *zoo.names(kind="hybrid")):
        names.setdefault(zoo.get(name).family, []).append(name)
    return names


def system_pages(results: Path) -> dict[str, str]:
    """Return every page as Markdown, by its path in the site.

    Args:
        results: Folder of measured results; without it, the pages contain no numbers.
    """
    pages = {INDEX: _index(results)}
    for names in families().values():
        for name in names:
            pages[f"zoo/{name}.md"] = _page(name, results)
    return pages


def _index(results: Path) -> str:
    lines = [
        "# All systems",
        "",
        f"{len(zoo.names())} presets of one recipe and "
        f"{len(zoo.names(kind='hybrid'))} hybrids of several.",
        "`rc.cost` counts state and FLOPs, for one head at K = V = 64 and T = 4096. Bits per byte",
        "are those of [language models](../results/language_models/README.md) with 3 million",
        "parameters after a million bytes. [How to use the zoo](../zoo.md).",
        "",
    ]
    for family, names in families().items():
        table = Table(
            columns=[
                *("system", "fidelity", "engine"),
                *(Column(name=name, align="right") for name in ("state", "FLOPs per token")),
                Column(name="bits per byte", align="right"),
            ],
            rows=[_index_row(name, results) for name in names],
        )
        lines += [f"## {family}", "", table.to_markdown(), ""]
    return "\n".join(lines)


def _index_row(name: str, results: Path) -> list[CellValue]:
    system, explanation = zoo.get(name), explain(name)
    bits = bits_per_byte(name, results)
    composed = isinstance(explanation, Composition)
    parts = explanation.parts.values() if composed else [explanation]
    costs = list(explanation.costs.values()) if composed else [explanation.cost]
    return [
        f"[`{name}`]({name}.md) {system.title}",
        system.fidelity.kind,
        ", ".join(dict.fromkeys(part.engine for part in parts)),
        "; ".join(map(_state_size, costs)),
        "; ".join(map(_flops, costs)),
        "" if bits is None else f"{bits:.3f}",
    ]


def _state_size(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    return f"{format_si(cost.state_bytes, 'B')}{', grows' if cost.state_bytes_per_token else ''}"


def _flops(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    return format_si(cost.total / cost.sizes["T"], "FLOP").removesuffix("FLOP")


def _page(name: str, results: Path) -> str:
    system = zoo.get(name)
    lines = [*_front_matter(name), f"# {_escape(system.title)}", "", _facts(system), ""]
    if system.summary:
        lines += [_escape(system.summary), ""]
    lines += [*_use_and_cost(system), ""]
    lines += ["## Equation", "", *_equations(system)]
    lines += _hybrid_sections(system) if system.kind == "hybrid" else _preset_sections(system)
    lines += ["## Sources", "", *(f"- {_escape(str(x))}" for x in system.references), ""]
    lines += [*_fidelity(system), *_printed_variant(system), "## Measured", ""]
    tables = results_for(name, results)
    if not tables:
        lines += [
            f"No results yet. `recollect compare --models {name} --task text` trains a model.",
            "",
        ]
    for table in tables:
        lines += [f"**{table.title}**", "", table.to_markdown(), "", table.caption, ""]
    return "\n".join(lines)


def _use_and_cost(system: Preset) -> list[str]:
    """Return lines with the use, the published models and the cost of a system."""
    explanation = explain(system)
    lines = [f"- **Used for:** {use_line(system, explanation)}"]
    if models := published_models().get(system.name):
        lines += [f"- **Used in:** {models} ([published models](../adopt.md#models))."]
    return [*lines, f"- **Cost:** {cost_line(system, explanation)}"]


def _equations(system: Preset) -> list[str]:
    """Return the source's equation as printed, and the rule that is computed if it differs."""
    rule, printed = _fenced("text", system.rule), system.fidelity.source_equation
    if not printed:
        return ["As in the source:", "", *rule, ""]
    lines = ["As printed in the source:", "", *_fenced("text", printed), ""]
    return [*lines, "As recollect computes it ([deviations](#fidelity)):", "", *rule, ""]


def _fidelity(system: Preset) -> list[str]:
    fidelity = system.fidelity
    sentence = f"**{fidelity.kind.capitalize()}**, from {_escape(fidelity.source)}."
    lines = ["## Fidelity", "", sentence]
    if fidelity.deviations:
        lines += ["", "Deviations, and choices that the source leaves open:", ""]
        lines += [f"- {_escape(str(item))}" for item in fidelity.deviations]
    return [*lines, ""]


def _printed_variant(system: Preset) -> list[str]:
    """Return the section of the variant ``"published"``; empty without one."""
    name = f"{system.twin_of or system.name}:published"
    if name not in zoo.variants():
        return []
    variant = zoo.get(name)
    options = (
        "" if variant.options == LayerOptions() else f"\noptions = {as_python(variant.options)}"
    )
    code = (
        f'import recollect as rc\n\nlayer = rc.zoo.get("{name}").build(d_model=64, num_heads=4)\n'
        f"recipe = {as_python(variant.recipe)}{options}"
    )
    return [
        *("## Printed equation", ""),
        f"`{name}`: {_escape(variant.summary)} **Exact**, from {_escape(variant.fidelity.source)}.",
        *("", *_fenced("text", variant.rule), "", *_fenced("python", code), ""),
        *(f"- {_escape(str(item))}" for item in variant.fidelity.deviations),
        *("", "[Published equations](../zoo.md#published-equations)", ""),
    ]


def _front_matter(name: str) -> list[str]:
    """Return front matter by which a search ranks the page of a system first.

    The name is a tag, which ranks above all text. A system with variants has a larger boost,
    because the titles of the variants contain the same word.
    """
    has_variants = any(
        other.startswith(f"{name}_") or other.endswith(f"_{name}")
        for other in (*zoo.names(), *zoo.names(kind="hybrid"))
    )
    boost = 16 if has_variants else 4
    return ["---", f"tags: [{name}]", "search:", f"  boost: {boost}", "---", ""]


def _facts(system: Preset) -> str:
    link = f"[{system.family}](index.md#{system.family})"
    twin = f" · variation of [`{system.twin_of}`]({system.twin_of}.md)" if system.twin_of else ""
    return f"`{system.name}` · {system.kind.replace('_', ' ')} memory · family {link}{twin}"


def _preset_sections(preset: Preset) -> list[str]:
    explanation = explain(preset)
    has_options = preset.options != LayerOptions()
    code = f"import recollect as rc\n\nrecipe = {as_python(preset.recipe)}\n"
    if has_options:
        code += f"options = {as_python(preset.options)}\n"
    if preset.options.persistent:
        code += f'layer = rc.zoo.get("{preset.name}").build(d_model=64, num_heads=4)'
    else:
        code += f"layer = rc.MemoryLayer(64, 4, recipe{', options' if has_options else ''})"
    equations = "\n".join(
        f"{label if i == 0 else '':<9}{line}"
        for label, lines in explanation.equations
        for i, line in enumerate(lines)
    )
    return [
        *("As recollect derives it from the recipe:", "", *_fenced("text", equations), ""),
        *("## Recipe", "", *_fenced("python", code), ""),
        f"[Change its six choices](../{PAGE}#recipe={preset.name}){{ .md-button }}",
        *("", "## How it runs", ""),
        "The other lines of `rc.explain` ([how to read them](../explain.md#the-blocks)).",
        *("", _other_blocks(explanation).to_markdown(), ""),
    ]


def _other_blocks(explanation: Explanation) -> Table:
    """Return the blocks of an explanation that have no section of their own."""
    return Table(
        columns=["block", "lines"],
        rows=[
            [f"**{label}**", "\n".join(map(_escape, lines))]
            for label, lines in explanation.blocks
            if label not in _OTHER_SECTIONS
        ],
    )


def _hybrid_sections(hybrid: Preset) -> list[str]:
    text = str(explain(hybrid)).partition("\n")[2].strip("\n")
    lines = ["As recollect derives it from the parts:", "", *_fenced("text", text), ""]
    lines += ["## Recipe", "", *_fenced("python", _hybrid_code(hybrid)), ""]
    parts = dict.fromkeys(name for _, mixer in hybrid.layers for name in _part_names(mixer))
    if parts:
        lines += ["Parts of it: " + ", ".join(f"[`{name}`]({name}.md)" for name in parts) + ".", ""]
    return lines


def _hybrid_code(hybrid: Preset) -> str:
    if len(hybrid.layers) == 1:
        ((_, mixer),) = hybrid.layers
        return (
            f"import recollect as rc\n\nmixer = {as_python(mixer)}\n"
            f'layer = rc.zoo.get("{hybrid.name}").build(d_model=64, num_heads=4)  # an equal layer'
        )
    lines = "".join(f'    "{name}": {as_python(mixer)},\n' for name, mixer in hybrid.layers)
    return (
        f"import recollect as rc\n\nlayers = {{  # repeated over the depth\n{lines}}}\n"
        f'config = rc.lm.RecollectConfig.from_recipes("{hybrid.name}", hidden_size=64)  # equal'
    )


def _part_names(mixer: Mixer) -> Iterable[str]:
    """Yield the names of the parts that are systems of the zoo."""
    for leaf in mixer.leaves.values():
        text = as_python(leaf) if isinstance(leaf, RecipeMixer) else ""
        if text.startswith('"'):
            yield text.strip('"')


def _fenced(kind: str, text: str) -> list[str]:
    """Return a block of code; the lines of equations (kind ``text``) are wrapped."""
    info = "{ .text .equations }" if kind == "text" else kind
    return [f"```{info}", *text.splitlines(), "```"]


def _escape(text: str) -> str:
    """Escape the characters of Markdown outside code spans."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_|<\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
