"""A release has one version, complete archives, and a wheel whose core needs torch alone."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import recollect as rc
from recollect.recipe.recipe import SCHEMA

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

CHECK = """
import sys, time
began = time.perf_counter()
import recollect as rc
took = f"{time.perf_counter() - began:.2f} s, {time.process_time():.2f} s of the processor"
print(f"import recollect: {took}", file=sys.stderr)
import torch

assert rc.__file__.startswith(sys.prefix), rc.__file__
for name in ("typer", "rich", "transformers", "matplotlib", "numpy"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is here, so that this shows nothing")
g = torch.Generator().manual_seed(0)
k = torch.nn.functional.normalize(torch.randn(1, 4, 1, 8, generator=g), dim=-1)
v = torch.randn(1, 4, 1, 8, generator=g)
recipe = rc.Recipe(bias=rc.bias.DotProduct(), algorithm=rc.algorithm.GradientDescent(lr=1.0))
y, state = rc.recall(recipe, k, k, v)
W, expected = torch.zeros(8, 8), []  # W <- W + v k^T, then read by k: the definition
for t in range(4):
    W = W + torch.outer(v[0, t, 0], k[0, t, 0])
    expected.append(W @ k[0, t, 0])
print("recalled", torch.allclose(y[0, :, 0], torch.stack(expected), atol=1e-5))
print(rc.explain("gated_delta_net"))
"""


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"},
    )


def build(kinds: tuple[str, ...], source: Path, out: Path) -> None:
    built = run(sys.executable, "-m", "hatchling", "build", "-d", out, *kinds, cwd=source)
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the wheel and the source distribution from this tree without a network."""
    pytest.importorskip("hatchling", reason="hatchling is not installed, so nothing is built")
    out = tmp_path_factory.mktemp("dist")
    build(("-t", "wheel", "-t", "sdist"), ROOT, out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def core_environment(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel, torch and torch's requirements, and nothing else."""
    home = tmp_path_factory.mktemp("alone")
    result = run(sys.executable, "-m", "venv", "--without-pip", home)
    assert result.returncode == 0, result.stderr
    (site,) = home.glob("lib/python*/site-packages")
    for name in needed("torch"):
        link(name, site)
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    installed = run(*pip, "install", *options, archives[0])
    assert installed.returncode == 0, installed.stderr
    return home


def needed(name: str) -> list[str]:
    """Return a distribution and its installed requirements, without extras."""
    from packaging.requirements import Requirement

    result: list[str] = []
    todo = [name]
    while todo:
        one = todo.pop()
        if one.lower() in result:
            continue
        result.append(one.lower())
        for text in metadata.requires(one) or []:
            expected = Requirement(text)
            if expected.marker is None or expected.marker.evaluate({"extra": ""}):
                todo.append(expected.name)
    return result


def link(name: str, site: Path) -> None:
    """Link an installed distribution's packages and modules into another environment."""
    files = metadata.files(name) or []
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
        target = Path(str(metadata.distribution(name).locate_file(top)))
        if target.exists() and not (site / top).exists():
            (site / top).symlink_to(target)


def test_the_version_has_one_source_and_follows_the_last_release() -> None:
    from packaging.version import Version

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in pyproject["project"] and pyproject["project"]["dynamic"] == ["version"]
    source = (ROOT / pyproject["tool"]["hatch"]["version"]["path"]).read_text("utf-8")
    assert f'\n__version__ = "{rc.__version__}"\n' in source  # no metadata is needed
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    releases = [heading for heading in headings if heading != "Unreleased"]
    assert cited is not None and cited[1] == releases[0]
    # Only the commit of a release has the version of a release.
    unreleased = headings[0] == "Unreleased"
    assert (Version(rc.__version__) > Version(releases[0])) == unreleased
    assert Version(rc.__version__).is_devrelease == unreleased


def test_distribution_has_a_distinct_name(archives: tuple[Path, Path]) -> None:
    """Another project holds `recollect` on the package index, with an import of that name."""
    for archive in archives:
        assert archive.name.startswith(f"recollect_layers-{rc.__version__}")
    with zipfile.ZipFile(archives[0]) as wheel:
        metadata_text = wheel.read(next(n for n in wheel.namelist() if n.endswith("METADATA")))
    assert b"\nName: recollect-layers\n" in metadata_text
    assert f"\nVersion: {rc.__version__}\n".encode() in metadata_text
    # No page, message or file of the build names an extra of the other project.
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git, so there is no list of files")
    for name in listed.stdout.splitlines():
        if name.endswith((".py", ".md", ".toml", "Makefile")) and name != "CHANGELOG.md":
            text = (ROOT / name).read_text("utf-8")
            assert not re.search(r"\brecollect\[(lm|eval|cli|plot|gpu|dev)\b", text), name


def test_the_addresses_of_the_project_are_set() -> None:
    """Until they are set, every test run names the placeholders, and a release fails."""
    from packaging.version import Version

    from addresses import project_urls

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert list(urls) == ["Repository", "Issues", "Documentation"]
    cited = re.search(r"^repository-code: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    placeholders = urls.keys() - project_urls(ROOT).keys()
    if placeholders and Version(rc.__version__).is_devrelease:
        assert cited is None
        pytest.xfail(f"placeholders in [project.urls] of pyproject.toml: {sorted(placeholders)}")
    assert not placeholders
    assert cited is not None and cited[1] == urls["Repository"]


def test_the_supported_pythons_are_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    minimum = project["requires-python"].removeprefix(">=")
    named = [x.rsplit(" ", 1)[1] for x in project["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert named[0] == minimum and ".".join(map(str, sys.version_info[:2])) in named
    assert project["scripts"] == {"recollect": "recollect_command:main"}
    rows = dict(
        re.findall(r"^\| (.+?) \| (.+) \|$", (ROOT / "docs/stability.md").read_text(), re.M)
    )
    assert rows["Python"] == f"{', '.join(named[:-1])} and {named[-1]}"
    (torch,) = (d for d in project["dependencies"] if d.startswith("torch"))
    assert rows["PyTorch"].startswith(f"{torch.removeprefix('torch>=')} and newer.")
    assert f"a schema number, today {SCHEMA}." in rows[next(row for row in rows if "config" in row)]


def test_wheel_contains_the_package_only(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata_text = wheel.read(
            next(n for n in wheel.namelist() if n.endswith("METADATA"))
        ).decode()
    tree = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert files == tree
    for data in (
        "recollect/py.typed",
        "recollect/page/static/page.html",
        "recollect/report/static/report.css",
        "recollect/report/templates/sections.html.j2",
        "recollect/lm/evaluation/local/local_niah_single_1.yaml",
        "recollect/experiments/framework/published/atlas_table2.csv",
        "recollect_command.py",
    ):
        assert data in files, data
    needs = re.findall(r"^Requires-Dist: (.+)$", metadata_text, re.M)
    assert [x for x in needs if "extra ==" not in x] == [
        "filelock>=3.32",
        "jinja2>=3.1",
        "torch>=2.9",
    ]
    assert "License-Expression: Apache-2.0" in metadata_text


def test_the_source_distribution_builds_the_same_wheel(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(archives[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff",
                 "Makefile", "docs/install.md", "examples/generate.py"):  # fmt: skip
        assert (tree / name).is_file(), name
    build(("-t", "wheel"), tree, tmp_path / "again")
    (repeated,) = (tmp_path / "again").glob("*.whl")
    assert contents(repeated) == contents(archives[0])


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_core_works_with_torch_alone(core_environment: Path) -> None:
    """Warnings are errors. The duration is printed (`pytest -rP`) and has no bound.

    One warning is torch's: `import torch` warns if numpy is missing, though it requires none.
    """
    numpy = "ignore:Failed to initialize NumPy:UserWarning"
    result = run(core_environment / "bin" / "python", "-W", "error", "-W", numpy, "-c", CHECK)
    print(result.stderr)
    assert result.returncode == 0, result.stderr
    assert "import recollect:" in result.stderr
    assert result.stdout.startswith(
        "recalled True\ngated_delta_net\nproblem  min  ½‖W k_t − v_t‖²\n"
    )


def test_command_without_extras_names_the_package_to_install(core_environment: Path) -> None:
    result = run(core_environment / "bin" / "recollect", "zoo")
    assert result.returncode == 1 and not result.stdout
    assert result.stderr.strip() == (
        "recollect's commands need typer and rich: pip install typer rich, or in its checkout "
        'pip install -e ".[cli]"'
    )
