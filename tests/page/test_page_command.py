"""`recollect page`, and the page as part of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recollect.page import write
from recollect.page.write import PAGE

pytest.importorskip("typer")
from typer.testing import CliRunner

from recollect.cli import build

ROOT = Path(__file__).parents[2]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(build(), ["page", *arguments])


def test_command_writes_the_page_and_prints_its_path(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    result = call("--out", str(out), "--systems", "delta_net, gla")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(out / PAGE)
    text = (out / PAGE).read_text(encoding="utf-8")
    assert '"name":"gla"' in text
    assert '"name":"titans"' not in text


def test_unknown_system_gives_one_sentence_and_no_file(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    result = call("--out", str(out), "--systems", "delta_met")
    assert result.exit_code == 2
    assert result.stderr.strip().startswith("recollect page: the zoo has no architecture named")
    assert "did you mean delta_net" in result.stderr
    assert not out.exists()


def test_a_system_of_several_recipes_is_refused(tmp_path: Path) -> None:
    result = call("--out", str(tmp_path / "mine"), "--systems", "titans_mac")
    assert result.exit_code == 2
    assert "one recipe is expected here" in " ".join(result.stderr.split())


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("kept")
    result = call("--out", str(tmp_path / "taken"), "--systems", "delta_net")
    assert result.exit_code == 2
    assert "cannot be written to" in result.stderr
    assert (tmp_path / "taken").read_text() == "kept"


def test_site_contains_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hook in mkdocs.yml adds a file, to which links are checked."""
    pytest.importorskip("mkdocs")
    from mkdocs.config import load_config
    from mkdocs.structure.files import Files

    monkeypatch.setattr(write, "render", lambda: "<!doctype html>")
    monkeypatch.setattr("systems.system_pages", lambda results: {"zoo/x.md": "# X"})
    hook = "docs/hooks/site.py"
    path = tmp_path / "mkdocs.yml"
    path.write_text(
        f"site_name: x\ndocs_dir: {ROOT / 'docs'}\nsite_dir: {tmp_path / 'site'}\n"
        f"hooks:\n  - {ROOT / hook}\n"
    )
    config = load_config(str(path))
    files = config.plugins.on_files(Files([]), config=config)
    result = {file.src_uri: file for file in files}
    assert {"zoo/x.md", "results/README.md"} <= result.keys()
    file = result[PAGE]
    assert file.dest_uri == PAGE
    assert file.content_string == "<!doctype html>"
    assert f"  - {hook}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"]({PAGE})" in (ROOT / "docs" / "page.md").read_text(encoding="utf-8")
