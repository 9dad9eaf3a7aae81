"""A page for every system of the zoo and a table of all of them, as Markdown for the site.

Nothing on these pages is written by hand: titles, sources and fidelity are the presets', equations
and engines what `rc.explain` says, code what makes the recipe again, numbers those of committed
results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from recollect import zoo
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.costs import Cost
from recollect.explanation.composition import Composition
from recollect.explanation.explain import Explanation, explain
from recollect.layer.options import LayerOptions
from recollect.page.measured import bits_per_byte, measured
from recollect.page.python_text import as_python
from recollect.page.write import PAGE
from recollect.report.formatting import format_si
from recollect.zoo.preset import Preset

__all__ = ["INDEX", "families", "system_pages"]

INDEX = "zoo/index.md"
"""The table of all systems; the page of one is ``zoo/NAME.md``."""

_SHOWN_ABOVE = ("problem", "write", "read", "where", "fidelity")  # blocks of sections of their own


def families() -> dict[str, list[str]]:
    """Names of systems by family, hybrids last, in the order of registration.

    Examples:
        >>> from recollect.page.systems import families
        >>> families()["ttt"]
        ['ttt_linear', 'ttt_mlp']
    """
    found: dict[str, list[str]] = {}
    for name in (*zoo.names(), *zoo.names(kind="hybrid")):
        found.setdefault(zoo.get(name).family, []).append(name)
    return found


def system_pages(results: Path) -> dict[str, str]:
    """Every page by its path below the site's sources, as Markdown.

    Args:
        results: the folder of measured results; one that is missing leaves pages without numbers.

    Examples:
        >>> from pathlib import Path
        >>> from recollect.page.systems import system_pages
        >>> page = system_pages(Path("results"))["zoo/delta_net.md"].partition("# ")[2]
        >>> page.splitlines()[0]
        'DeltaNet'
    """
    pages = {INDEX: _index(results)}
    for names in families().values():
        for name in names:
            pages[f"zoo/{name}.md"] = _page(name, results)
    return pages


# -- the table -----------------------------------------------------------------------------------


def _index(results: Path) -> str:
    lines = [
        "# All systems",
        "",
        f"{len(zoo.names())} presets of one recipe and "
        f"{len(zoo.names(kind='hybrid'))} hybrids of several.",
        "State and FLOPs are of one head at K = V = 64 and T = 4096, counted by `rc.cost`; bits",
        "per byte are of a language model of 3 million parameters after a million bytes, [where",
        "one was trained](../results/language_models/README.md). [How to use the zoo](../zoo.md).",
        "",
    ]
    for family, names in families().items():
        head = ("system", "fidelity", "engine", "state", "FLOPs per token", "bits per byte")
        rows = [_row(name, results) for name in names]
        lines += [f"## {family}", "", *_table(head, rows), ""]
    return "\n".join(lines)


def _row(name: str, results: Path) -> tuple[str, ...]:
    system, found = zoo.get(name), explain(name)
    bits = bits_per_byte(name, results)
    parts = found.parts.values() if isinstance(found, Composition) else [found]
    costs = list(found.costs.values()) if isinstance(found, Composition) else [found.cost]
    return (
        f"[`{name}`]({name}.md) {system.title}",
        system.fidelity.kind,
        ", ".join(dict.fromkeys(part.engine for part in parts)),
        "; ".join(map(_kept, costs)),
        "; ".join(_flops(cost) for cost in costs),
        "" if bits is None else f"{bits:.3f}",
    )


def _kept(cost: Cost | None) -> str:
    if cost is None:
        return "–"
    return f"{format_si(cost.state_bytes, 'B')}{', grows' if cost.state_bytes_per_token else ''}"


def _flops(cost: Cost | None) -> str:
    return (
        "–"
        if cost is None
        else format_si(cost.total / cost.sizes["T"], "FLOP").removesuffix("FLOP")
    )


# -- one page ------------------------------------------------------------------------------------


def _page(name: str, results: Path) -> str:
    system = zoo.get(name)
    lines = [*_found_first(name), f"# {_prose(system.title)}", "", _facts(system), ""]
    if system.summary:
        lines += [_prose(system.summary), ""]
    lines += ["## Equation", "", *_rules(system)]
    if system.kind == "hybrid":
        lines += _of_hybrid(system)
    else:
        lines += _of_preset(system)
    lines += ["## Sources", "", *(f"- {_prose(str(one))}" for one in system.references), ""]
    lines += _fidelity(system)
    tables = measured(name, results)
    lines += ["## Measured", ""]
    if not tables:
        lines += [f"Nothing yet. `recollect compare --models {name} --task text` trains one.", ""]
    for table in tables:
        lines += [f"**{table.title}**", "", *_table(table.columns, table.rows), "", table.note, ""]
    return "\n".join(lines)


def _rules(system: Preset) -> list[str]:
    """Return the source's equation as printed, and the rule that is computed where it differs."""
    rule, printed = _fenced("text", system.rule), system.fidelity.source_equation
    if not printed:
        return ["As in the source:", "", *rule, ""]
    lines = ["As printed in the source:", "", *_fenced("text", printed), ""]
    return [*lines, "As recollect computes it ([deviations](#fidelity)):", "", *rule, ""]


def _fidelity(system: Preset) -> list[str]:
    fidelity = system.fidelity
    lines = [
        "## Fidelity",
        "",
        f"**{fidelity.kind.capitalize()}**, from {_prose(fidelity.source)}.",
    ]
    if fidelity.deviations:
        lines += ["", "Deviations, and choices that the source leaves open:", ""]
        lines += [f"- {_prose(str(item))}" for item in fidelity.deviations]
    return [*lines, ""]


def _found_first(name: str) -> list[str]:
    """Front matter: the search finds the page of a system before those that mention it.

    Its name is a tag, which ranks above all text. Who types a word of titles ("Titans") wants the
    system before its variants, whose titles have that word as well.
    """
    variants = any(
        other.startswith(f"{name}_") or other.endswith(f"_{name}")
        for other in (*zoo.names(), *zoo.names(kind="hybrid"))
    )
    boost = 16 if variants else 4
    return ["---", f"tags: [{name}]", "search:", f"  boost: {boost}", "---", ""]


def _facts(system: Preset) -> str:
    link = f"[{system.family}](index.md#{system.family})"
    twin = f" · variation of [`{system.twin_of}`]({system.twin_of}.md)" if system.twin_of else ""
    return f"`{system.name}` · {system.kind.replace('_', ' ')} memory · family {link}{twin}"


def _of_preset(preset: Preset) -> list[str]:
    found = explain(preset)
    lines = [
        "As recollect derives it from the recipe:",
        "",
        *_fenced("text", _equations(found)),
        "",
    ]
    code = f"import recollect as rc\n\nrecipe = {as_python(preset.recipe)}"
    if preset.options != LayerOptions():
        code += f"\noptions = {as_python(preset.options)}"
    given = "recipe" if preset.options == LayerOptions() else "recipe, options"
    code += f"\nlayer = rc.MemoryLayer(64, 4, {given})"
    if preset.options.persistent:
        code = code.rpartition("\n")[0] + (
            f'\nlayer = rc.zoo.get("{preset.name}").build(d_model=64, num_heads=4)'
        )
    lines += [
        "## Recipe",
        "",
        *_fenced("python", code),
        "",
        f"[Turn its six knobs](../{PAGE}#recipe={preset.name}){{ .md-button }}",
        "",
        "## How it runs",
        "",
        "What `rc.explain` says beside the equations ([how to read it](../explain.md#the-blocks)).",
        "",
    ]
    rows = [(f"**{label}**", "<br>".join(map(_prose, block))) for label, block in _runs(found)]
    return [*lines, *_table(("block", "says"), rows), ""]


def _runs(found: Explanation) -> Iterable[tuple[str, Sequence[str]]]:
    """The lines of an explanation that are no equations."""
    blocks: dict[str, list[str]] = {}
    label = ""
    for line in str(found).split("\n")[1:]:
        label = line[:9].strip() or label
        blocks.setdefault(label, []).append(line[9:])
    return [(label, block) for label, block in blocks.items() if label not in _SHOWN_ABOVE]


def _equations(found: Explanation) -> str:
    lines = [
        f"{label if place == 0 else '':<9}{line}"
        for label, block in found.equations
        for place, line in enumerate(block)
    ]
    return "\n".join(lines)


def _of_hybrid(hybrid: Preset) -> list[str]:
    found = explain(hybrid)
    lines = ["As recollect derives it from the parts:", "", *_fenced("text", _body(found)), ""]
    lines += ["## Recipe", "", *_fenced("python", _composed(hybrid)), ""]
    parts = dict.fromkeys(name for _, mixer in hybrid.layers for name in _systems(mixer))
    if parts:
        lines += ["Parts of it: " + ", ".join(f"[`{name}`]({name}.md)" for name in parts) + ".", ""]
    return lines


def _body(found: Composition) -> str:
    return str(found).partition("\n")[2].strip("\n")


def _composed(hybrid: Preset) -> str:
    if len(hybrid.layers) == 1:
        ((_, mixer),) = hybrid.layers
        return (
            f"import recollect as rc\n\nmixer = {as_python(mixer)}\n"
            f'layer = rc.zoo.get("{hybrid.name}").build(d_model=64, num_heads=4)  # the same'
        )
    lines = "".join(f'    "{name}": {as_python(mixer)},\n' for name, mixer in hybrid.layers)
    return (
        f"import recollect as rc\n\nlayers = {{  # in turns over the depth\n{lines}}}\n"
        f'config = rc.lm.RecollectConfig.from_recipes("{hybrid.name}", hidden_size=64)  # the same'
    )


def _systems(mixer: Mixer) -> list[str]:
    """Names of the systems that its parts are."""
    found: list[str] = []
    for leaf in mixer.leaves.values():
        text = as_python(leaf) if isinstance(leaf, RecipeMixer) else ""
        found += [text.strip('"')] if text.startswith('"') else []
    return found


# -- Markdown ------------------------------------------------------------------------------------


def _fenced(kind: str, text: str) -> list[str]:
    """A block of code; one of kind ``text`` has the class of equations, whose lines are wrapped."""
    info = "{ .text .equations }" if kind == "text" else kind
    return [f"```{info}", *text.splitlines(), "```"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]


def _prose(text: str) -> str:
    """Words of a preset or an explanation, in which no sign is Markdown but a code span."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_|<\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
