"""The documentation matches the package: order of pages, references, tables of defaults."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import recollect as rc
from recollect.recipe.stability import step_limit

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n    options:\n((?:      .*\n?)*))?", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| .* \|$", re.MULTILINE)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def resolve(path: str) -> Any:
    """Return the object of a reference directive."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            result: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            result = getattr(result, name)
        return result
    raise AssertionError(f"there is no {path}")


def referenced(text: str) -> Iterator[Any]:
    """Yield every object that the directives of a page show."""
    for path, options in DIRECTIVE.findall(text):
        result = resolve(path)
        yield result
        members = re.search(r"members: \[(.*?)\]", options)
        for name in members[1].split(", ") if members else ():
            yield getattr(result, name)


def table(text: str, heading: str) -> dict[str, str]:
    """Return keys and defaults of the first table below a heading."""
    _, _, below = text.partition(f"\n{heading}\n")
    assert below, heading
    rows = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert rows is not None
    return dict(ROW.findall(rows[0]))


def public_names() -> Iterator[tuple[str, Any]]:
    """Return every public name by its path: of `rc` and of each module that `rc` names."""
    for name in rc.__all__:
        value = getattr(rc, name)
        yield f"rc.{name}", value
        if inspect.ismodule(value):
            yield from ((f"rc.{name}.{n}", getattr(value, n)) for n in value.__all__)


CPU = {
    "sdpa": "`scaled_dot_product_attention`",
    **{
        name: f"`{name}`" for name in ("linear_attention", "retnet", "delta_net", "longhorn", "gla")
    },
    "gated_delta_net": "`gated_delta_net`",
}
TITANS = {
    "b=16": "recollect",
    "titans-pytorch exact, b=16": "titans-pytorch, gates per token",
    "titans-pytorch practical, b=16": "titans-pytorch, gates per batch",
}


def test_tables_of_measurements_equal_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "hooks")
    measured = importlib.import_module("measured")
    tables = {
        ("choose.md", "layers"): measured.choices(ROOT / "results"),
        ("comparison-with-others.md", "cpu"): measured.speed(ROOT / "results", "linear", CPU),
        ("comparison-with-others.md", "titans"): measured.speed(ROOT / "results", "titans", TITANS),
    }
    for (name, mark), expected in tables.items():
        _, _, rest = page(name).partition(f"<!-- {mark}: begin -->\n")
        text, end, _ = rest.partition(f"<!-- {mark}: end -->")
        assert end and text.strip() == expected, f"docs/{name}, {mark}:\n{expected}"


def test_the_table_of_the_readme_has_rows_of_the_page_on_layers() -> None:
    rows = re.findall(r"^\|.*\|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 4
    assert set(rows) <= set(page("choose.md").splitlines())


GENERATED = {"docs/zoo/index.md", "docs/reference/commands.md", "docs/six-knobs.html"}
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def test_relative_links_resolve_in_the_repository() -> None:
    """Links to `results/` go through the root; `docs/hooks/site.py` adapts them to the site."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *ROOT.glob("results/**/*.md")]
    missing = []
    for path in pages:
        folder = path.relative_to(ROOT).parent.as_posix()
        text = CODE.sub("", path.read_text(encoding="utf-8"))
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            target = posixpath.normpath(posixpath.join(folder, link))
            if target not in GENERATED and not (ROOT / target).exists():
                missing.append(f"{path.relative_to(ROOT)}: {link}")
    assert missing == []


def test_references_exist_and_cover_every_public_name() -> None:
    pytest.importorskip("transformers")
    shown = [result for path in PAGES for result in referenced(path.read_text(encoding="utf-8"))]
    ids = {id(result) for result in shown}
    assert [name for name, value in public_names() if id(value) not in ids] == []
    # A name with two pages would be found twice, and a reference would be ambiguous.
    paths = [path for page in PAGES for path, _ in DIRECTIVE.findall(page.read_text("utf-8"))]
    assert sorted(paths) == sorted(set(paths))


def test_references_are_headed_by_public_names() -> None:
    pytest.importorskip("transformers")
    names = dict(public_names())
    for path in (DOCS / "reference").glob("*.md"):
        for path_in_page, options in DIRECTIVE.findall(path.read_text(encoding="utf-8")):
            heading = re.search(r"heading: (.*)", options)
            assert heading is not None, path_in_page
            if heading[1].startswith("rc."):
                assert names[heading[1]] is resolve(path_in_page), heading[1]


def test_reference_starts_with_all_names() -> None:
    for name in (DOCS / "reference").glob("*.md"):
        if name.stem != "index":
            (row,) = re.findall(
                rf"^\| \[.*\]\({name.name}\) \| (.*) \|$", page("reference/index.md"), re.M
            )
            headings = re.findall(
                r"^      toc_label: (\w+)$", name.read_text("utf-8"), re.MULTILINE
            )
            names = set(re.findall(r"`(\w+)`", row))
            families = {f for f in dir(rc.zoo) if inspect.ismodule(getattr(rc.zoo, f))}
            assert names == set(headings) - families, name.name


def _layers() -> int:
    """Return the number of layers with a language model."""
    stems = [path.stem for path in (ROOT / "results/language_models").glob("*.json")]
    return sum(not stem.endswith("-same") for stem in stems)


def _presets_on_gpu() -> int:
    """Return the number of presets measured in float32, all of which are within the bounds."""
    tables = (ROOT / "results/gpu/README.md").read_text("utf-8")
    within, measured = re.findall(r"^\| `float32` \| (\d+) of (\d+) \|", tables, re.M)[0]
    assert within == measured
    return int(measured)


def _minutes(preset: str) -> str:
    stored = json.loads((ROOT / f"results/language_models/{preset}.json").read_text("utf-8"))
    return ("five", "six", "seven")[round(stored["run"]["cpu_seconds"] / 60) - 5]


def _bits(preset: str) -> float:
    stored = json.loads((ROOT / f"results/language_models/{preset}.json").read_text("utf-8"))
    return stored["run"]["value"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        # The example trains the model of this result.
        (
            "examples/train_on_your_text.py",
            "about {} minutes on one thread",
            lambda: _minutes("gated_delta_net"),
        ),
        ("docs/choose.md", "reaches {:.3f} bits per byte", lambda: _bits("softmax_attention-same")),
        ("README.md", "it reaches {:.3f} bits per byte", lambda: _bits("softmax_attention-same")),
        ("README.md", "{} layers were trained with 3 million parameters", _layers),
        ("README.md", "{} presets were measured and equal the CPU", _presets_on_gpu),
    ],
)
def test_numbers_in_sentences_equal_the_results(
    name: str, text: str, value: Callable[[], Any]
) -> None:
    page_text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert text.format(value()) in page_text


def test_every_page_names_one_duration_of_the_demo() -> None:
    texts = {
        name: " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/index.md")
    }
    for name, text in texts.items():
        assert "about six minutes on two cores" in text.partition("make demo")[2], name


def test_defaults_of_devices_equal_those_of_the_commands() -> None:
    pytest.importorskip("typer")
    from command_line import render_commands

    sections = re.findall(r"^## recollect (\w+)\n(.*?)(?=^## |\Z)", render_commands(), re.M | re.S)
    defaults = {
        name: row[1]
        for name, section in sections
        if (row := re.search(r"^\| `--device <str>` \| .* \| (.*) \|$", section, re.M))
    }
    on_gpu = {name for name, default in defaults.items() if default == "a GPU if there is one"}
    assert {default for name, default in defaults.items() if name not in on_gpu} == {"cpu", ""}
    assert defaults["train"] == ""  # the run file's, by default a GPU if there is one
    paragraph = page("commands.md").partition("**Devices.**")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) - {"cpu", "cuda", "mps"} == on_gpu | {"train"}


@pytest.mark.parametrize("name", ["docs/design/README.md", "CONTRIBUTING.md"])
def test_every_package_is_in_the_tree(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    packages = [
        path.name for path in (ROOT / "src/recollect").iterdir() if (path / "__init__.py").exists()
    ]
    assert len(packages) > 15
    assert [one for one in packages if f"{one}/" not in text] == []


def test_order_of_pages() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    order = re.findall(r"([\w/-]+\.md)$", nav.partition("\n\n")[0], re.MULTILINE)
    assert sorted(order) == sorted(str(path.relative_to(DOCS)) for path in PAGES)
    assert order[:2] == ["index.md", "install.md"]
    assert order.index("tutorials/state-a-layer.md") < order.index("guides.md")
    assert order.index("recipe.md") < order.index("layer.md") < order.index("language-models.md")
    assert order.index("language-models.md") < order.index("reproduce.md")
    assert all(name.startswith("design/") for name in order[order.index("design/README.md") :])


def test_first_pages_link_every_page() -> None:
    """In two steps: the first page, and the tutorials, guides and reference that it names."""
    links = {"index.md"}
    for name in ("index.md", "guides.md", "tutorials/index.md", "reference/index.md"):
        assert name in links
        result = re.findall(r"\]\(([\w/.-]+\.md)(?:#[\w-]+)?\)", page(name))
        links |= {posixpath.normpath(posixpath.join(posixpath.dirname(name), x)) for x in result}
    others = {path.relative_to(DOCS).as_posix() for path in PAGES}
    assert {name for name in others if not name.startswith("design/")} <= links


def toml(value: Any) -> str:
    """Return a default as in a run's file, in the table's type."""
    if value is None:
        return "–"
    return f"`{json.dumps(value)}`"


def test_page_lists_keys_of_a_run_with_defaults() -> None:
    pytest.importorskip("transformers")
    from recollect.lm.training.plan import _SECTIONS

    text = page("run-file.md")
    assert re.findall(r"^## \[(\w+)\]$", text, re.MULTILINE) == list(_SECTIONS)
    for name, kind in _SECTIONS.items():
        defaults = {
            field.name: toml(
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            )
            for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        }
        assert table(text, f"## [{name}]") == defaults, name


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("## LayerOptions: projections, norms and output", rc.LayerOptions),
        ("## GateOptions: gates and params", rc.GateOptions),
    ],
)
def test_page_lists_layer_options_with_defaults(heading: str, kind: type) -> None:
    defaults = {
        field.name: f"`{field.default!r}`".replace("'", '"') for field in dataclasses.fields(kind)
    }
    assert table(page("layer.md"), heading) == defaults


def test_page_lists_config_fields_with_defaults() -> None:
    pytest.importorskip("transformers")
    from transformers import PretrainedConfig

    inherited = PretrainedConfig.__dataclass_fields__
    defaults = {
        field.name: f"`{field.default!r}`".replace("'", '"')
        for field in dataclasses.fields(rc.lm.RecollectConfig)
        if field.name not in inherited
    }
    assert table(page("language-models.md"), "## Configuration") == defaults


def test_design_page_lists_the_rates_of_presets() -> None:
    row = re.compile(r"^\| (`.*`) \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|$", re.MULTILINE)
    result = {
        name: tuple(map(float, values))
        for names, *values in row.findall(page("design/steps.md"))
        for name in re.findall(r"`(\w+)`", names)
    }
    expected = {}
    for name in rc.zoo.names():
        preset = rc.zoo.get(name)
        if preset.kind != "hybrid" and step_limit(preset.recipe) is not None:
            options = dict(preset.options.gate_options).get("lr", rc.GateOptions())
            assert options.unit in (None, "stability_limit")
            expected[name] = (options.init or 0.5, options.low or 0.0, options.high or 1.0)
    assert result == expected


def test_page_lists_the_zoo_by_family() -> None:
    families: dict[str, list[str]] = {}
    for name in rc.zoo.names():
        families.setdefault(rc.zoo.get(name).family, []).append(name)
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", page("zoo.md"), re.MULTILINE)
    assert {family: re.findall(r"`(\w+)`", names) for family, names in rows} == families


def test_layers_of_another_package_have_presets_that_exist() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", page("flash-linear-attention.md"), re.M)
    layers = [layer for layer, _, _ in rows]
    assert len(set(layers)) == len(layers) == 45
    assert layers == sorted(layers, key=str.lower)
    for layer, kind, cell in rows:
        names = re.findall(r"`(\w+)`", cell)
        assert bool(names) or kind == "none" or "](#recipes-without-a-preset)" in cell, layer
        for name in names:
            is_composition = rc.zoo.get(name).kind == "hybrid"
            assert kind == "recipe" or (kind == "composition") == is_composition, layer


def test_page_lists_all_layers_of_another_package() -> None:
    spec = importlib.util.find_spec("fla")
    if spec is None or spec.origin is None:
        pytest.skip("needs flash-linear-attention")
    if importlib.metadata.version("flash-linear-attention") != "0.6.0":
        pytest.skip("the page lists the layers of 0.6.0")
    source = (Path(spec.origin).parent / "layers" / "__init__.py").read_text(encoding="utf-8")
    exported = ast.literal_eval(re.split(r"^__all__ = ", source, flags=re.M)[1])
    rows = re.findall(r"^\| `(\w+)` \|", page("flash-linear-attention.md"), re.M)
    assert set(exported) <= set(rows)


def test_page_lists_every_command() -> None:
    pytest.importorskip("typer")
    from recollect.cli.app import COMMANDS

    result = set(re.findall(r"^\| `recollect (\w+)", page("commands.md"), re.MULTILINE))
    assert result == {command.__name__ for command in COMMANDS}


def test_command_line_reference_describes_every_option() -> None:
    typer = pytest.importorskip("typer")
    from command_line import render_commands
    from recollect.cli.app import build

    sections = dict(
        re.findall(r"^## recollect (\w+)\n(.*?)(?=^## |\Z)", render_commands(), re.M | re.S)
    )
    commands = typer.main.get_command(build()).commands
    assert list(sections) == list(commands)
    for name, section in sections.items():
        rows = dict(re.findall(r"^\| `(.*?)` \| (.*?) \| .*\|$", section, re.M))
        assert all(text.endswith(".") for text in rows.values()), name
        listed = {option for row in rows for option in re.findall(r"--[\w-]+", row)}
        options = {
            option
            for param in commands[name].params
            for option in param.opts
            if option.startswith("--")
        }
        assert listed == options - {"--import", "--help"}, name


def test_site_has_the_configured_addresses(tmp_path: Path) -> None:
    from addresses import project_urls

    (tmp_path / "pyproject.toml").write_text(
        '[project.urls]\nRepository = "https://a.dev/b"\nIssues = "https://example.org/b"\n'
    )
    assert project_urls(tmp_path) == {"Repository": "https://a.dev/b"}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    for name in ("mkdocstrings", "material"):
        pytest.importorskip(name)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build.build(config)
    for path in PAGES:
        built = path.relative_to(DOCS).with_suffix(".html")
        built = built.with_name("index.html") if built.name == "README.html" else built
        assert (tmp_path / built).stat().st_size > 1000
    knobs = (tmp_path / "six-knobs.html").read_text(encoding="utf-8")
    assert all(f'"name":"{name}"' in knobs for name in rc.zoo.names())
    assert 'href="six-knobs.html"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    result = {entry["title"]: entry for entry in index["docs"]}
    # A name is followed by its kind, such as a dataclass or a property.
    resolve = (re.sub(r"\s+<code>[\w-]+</code>", "", title) for title in result)
    titles = {re.sub(r"<[^>]*>", "", title).split("¶")[0].strip() for title in resolve}
    moved = {"rc.experiments.compare": "rc.compare", "rc.experiments.reproduce": "rc.reproduce"}
    assert {moved.get(name, name) for name, _ in public_names()} - titles == set()
    assert re.split(index["config"]["separator"], "rc.memory.Matrix") == ["rc", "memory", "Matrix"]


PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FIELD_VALUES = {"quantity": "2.0", "number": "2.0", "integer": "2", "flag": "True"}


def _members_in_examples() -> Iterator[tuple[str, str]]:
    """Yield file and code of the examples in pages, scripts, notebooks and docstrings."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        yield str(path), "\n".join(b for b in PYTHON.findall(path.read_text()) if "@rc.member" in b)
    for path in (ROOT / "examples").glob("*.py"):
        yield str(path), path.read_text()
    for path in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        yield str(path), "\n".join("".join(cell["source"]) for cell in cells if "outputs" in cell)
    for path in (ROOT / "src").glob("**/*.py"):
        if ">>> @rc.member" in path.read_text():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    examples = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
                    members = [e.source for e in examples if "@rc.member" in e.source]
                    yield f"{path}:{node.name}", "".join(members)


def _uses(code: str) -> Iterator[tuple[str, bool]]:
    """Return calls of the members that code defines, one per field, and whether each is valid."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.ClassDef) or not node.decorator_list:
            continue
        yield f"{node.name}(no_such_field=1)", False
        for field in node.body:
            if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(field.value, ast.Call):
                target = field.targets[0] if isinstance(field, ast.Assign) else field.target
                value = FIELD_VALUES.get(ast.unparse(field.value.func).removeprefix("rc."))
                if value is not None:
                    yield f"{node.name}({ast.unparse(target)}={value})", True


@pytest.mark.slow
def test_members_in_examples_pass_pyright(tmp_path: Path) -> None:
    """``LogCosh(scale=2.0)`` passes only if the field has an annotation."""
    pyright = [sys.executable, "-m", "pyright"]
    if subprocess.run([*pyright, "--version"], capture_output=True).returncode:
        pytest.skip("pyright is not installed, or could not fetch its Node package")
    wrong, right = set(), 0
    for place, code in _members_in_examples():
        if "@rc.member" not in code:
            continue
        file = tmp_path / (re.sub(r"\W", "_", place) + ".py")
        lines = ["import math, torch", "import recollect as rc", *code.splitlines()]
        for use, is_right in _uses(code):
            lines.append(use)
            right += is_right
            if not is_right:
                wrong.add((file.name, len(lines)))
        file.write_text("\n".join(lines))
    assert right >= 8 and len(wrong) >= 10
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [*pyright, "--project", tmp_path, "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True,
        text=True,
    )
    errors = {
        (Path(error["file"]).name, error["range"]["start"]["line"] + 1): error["message"]
        for error in json.loads(done.stdout)["generalDiagnostics"]
        if error["severity"] == "error"
    }
    assert {place: errors[place] for place in errors.keys() - wrong} == {}
    assert errors.keys() == wrong
