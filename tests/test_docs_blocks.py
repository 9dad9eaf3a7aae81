"""Every block of README and the documentation runs as printed, in the order of its page.

The Python blocks of a page share their names. Console blocks run if they name ``recollect``, and
the targets that they pass to make and pip must exist. A block with a title, such as a TOML file, is
written under that name and not run, unless ``torchrun`` runs it. The text below a block is its
output, and a line ``…`` in it stands for omitted lines. Each page starts in an empty folder with
the files that it assumes (`_prepare`): a saved model, texts. A training of minutes runs at another
size (`SMOKE`), and all other blocks unchanged. Blocks that still take seconds are slow.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import recollect as rc
from recollect.choices import member
from recollect.zoo.preset import _PRESETS

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from recollect.cli import build

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(\w*)(?: title="([\w.]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
RUN = ("python", "pycon", "console", "toml")
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
    if any(kind in RUN for kind, _, _ in FENCE.findall(path.read_text(encoding="utf-8")))
]
SLOW_PAGES = (
    "docs/reproduce.md",
    "docs/training.md",
    "docs/tutorials/scale-out.md",
    "docs/tutorials/train.md",
)
# Seconds each, also at smoke size.
SLOW_AT_SMOKE_SIZE = (
    "docs/compare.md",
    "docs/eval.md",
    "docs/tutorials/compare.md",
    "docs/tutorials/own-memory.md",
    "docs/tutorials/own-retention-and-algorithm.md",
)
TUTORIALS = "docs/tutorials/"
ROUGH = 0.02  # of a tutorial's decimal numbers, because other processors round differently
NUMBER = re.compile(r"\d+\.\d+")
SLOW_COMMANDS = ("recollect compare",)

TOML_NAMES = {
    "docs/training.md": "CONFIG.toml",
    "docs/explain.md": "mine.toml",
    "docs/run-file.md": "run.toml",
}
SMOKE = {
    "--parameters 3000000 --tokens 1000000 --rows": (
        "--parameters 3000000 --tokens 2048 --length 64 --rows"
    ),
    "local_niah_single_2 --context 2048": "local_niah_single_2 --context 512 --limit 2",
    "--tasks wikitext,piqa,hellaswag,arc_easy --device cuda": "--tasks local_babi_1 --limit 2",
    'evaluate("runs/mine/model", ["local_babi_1", "local_text"], limit=50)': (
        'evaluate("runs/mine/model", ["local_babi_1", "local_text"], limit=2, context=600)'
    ),
    "parameters = 3_000_000": "parameters = 100_000\nwidth = 64\ndepth = 2\nheads = 2",
    "context = 512": "context = 64",
    "tokens = 1_000_000": "tokens = 512",
    'out = "runs/mine"': 'out = "runs/mine"\nsave_every = 1',
    'steps={"match_layers": 20, "match_logits": 20, "fine_tune": 20}': (
        'steps={"match_layers": 4, "match_logits": 8, "fine_tune": 16}'
    ),
    "--steps 5,5,5": "--steps 1,1,1",
    "recollect page --out": "recollect page --systems delta_net --out",
    "recollect reproduce ttr-fig2 ": "recollect reproduce ttr-fig2 --scale smoke",
    "recollect reproduce --all --jobs 2": "recollect reproduce --all --scale smoke --jobs 2",
}


class Block(NamedTuple):
    """A block of a page; ``between`` is the text after the block before."""

    kind: str
    text: str
    between: str
    title: str | None


def _blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    result, last = [], 0
    for match in FENCE.finditer(text):
        result.append(Block(match[1], match[3], text[last : match.start()], match[2]))
        last = match.end()
    return result


COMMANDS = ("recollect", "make", "pip", ".venv/bin/pre-commit", "torchrun", "accelerate", "pipx")


def _commands(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        yield " ".join(line.removeprefix("$ ").split())


def _smoke(text: str) -> str:
    for printed, instead in SMOKE.items():
        text = text.replace(printed, instead)
    return text


def _prepare(page: str) -> None:
    """Create the files that a page assumes in the current folder."""
    if page in ("docs/eval.md", "docs/language-models.md"):
        from recollect.lm.data.tokenizers import byte_tokenizer

        config = rc.lm.RecollectConfig.from_recipes(
            "gla", vocab_size=257, hidden_size=16, num_hidden_layers=1, eos_token_id=256
        )
        rc.lm.RecollectForCausalLM(config).save_pretrained("runs/mine/model")
        byte_tokenizer().save_pretrained("runs/mine/model")
    if page == "docs/language-models.md":
        from transformers import LlamaConfig, LlamaForCausalLM

        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
            )
        ).save_pretrained("a/llama")
    if page == "docs/adopt.md":
        from tests.lm.adoption.models import make_model

        from recollect.lm.data.tokenizers import byte_tokenizer

        make_model("qwen3_5_text", vocab_size=257).save_pretrained("qwen")
        byte_tokenizer().save_pretrained("qwen")
    if page in ("README.md", "docs/convert.md"):
        from tests.lm.conversion.published import make, save

        save(Path("gla-1.3B"), *make("gla"))
    if page == "README.md":
        text = next(text for kind, text, *_ in _blocks("docs/training.md") if kind == "toml")
        Path("run.toml").write_text(_smoke(text), encoding="utf-8")
    if page in ("README.md", "docs/training.md"):
        Path("corpus").mkdir()
        Path("corpus/a.jsonl").write_text('{"text": "the memory reads at the query"}\n' * 80)
        Path("heldout.txt").write_text("the memory writes at the key. " * 20)


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, without a hub, and without members that other pages register."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    initial, presets = dict(member._REGISTRY), dict(_PRESETS)
    for name in [n for n, cls in initial.items() if not cls.__module__.startswith("recollect.")]:
        del member._REGISTRY[name]
    yield
    member._REGISTRY.clear()
    member._REGISTRY.update(initial)
    _PRESETS.clear()
    _PRESETS.update(presets)


def _python(page: str, block: str, module: types.ModuleType) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block, page, "exec", dont_inherit=True), vars(module))
    return output.getvalue()


def _console(page: str, block: str, slow: bool) -> str:
    output = ""
    for command in _commands(block):
        if command.startswith("torchrun ") and page.startswith(TUTORIALS):
            output += _torchrun(shlex.split(command)[1:])
        if not command.startswith("recollect ") or (command.startswith(SLOW_COMMANDS) and not slow):
            continue
        result = CliRunner().invoke(build(), shlex.split(_smoke(command), comments=True)[1:])
        assert result.exit_code == 0, f"{page}: {command}\n{result.output}\n{result.exception!r}"
        output += result.stdout
    return output


def _torchrun(arguments: list[str]) -> str:
    """Run several processes in the current folder, on a free port, and return their output."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        [*launch, "--rdzv-endpoint", "localhost:0", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def _equal(line: str, printed: str, page: str) -> bool:
    """Whether a line of the page equals the printed one; decimals of tutorials may differ."""
    if line == printed or not page.startswith(TUTORIALS):
        return line == printed
    if NUMBER.sub("#", line) != NUMBER.sub("#", printed):
        return False
    expected = list(map(float, NUMBER.findall(line)))
    return list(map(float, NUMBER.findall(printed))) == pytest.approx(expected, rel=ROUGH)


def _missing(block: str, printed: str, page: str) -> list[str]:
    """Return the lines of a block that were not printed; a line ``…`` matches any lines.

    A block may end early.
    """
    rest, is_gap = printed.splitlines(), False
    for number, line in enumerate(lines := block.splitlines()):
        if line.strip() == "…":
            is_gap = True
            continue
        result = [i for i, one in enumerate(rest) if _equal(line, one, page)][:1]
        if not result or (result[0] and not is_gap):
            return lines[number:]
        rest, is_gap = rest[result[0] + 1 :], False
    return []


def _module(page: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("somebodys_" + re.sub(r"\W", "_", page))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def _page(page: str, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    module = _module(page, monkeypatch)
    _prepare(page)
    printed = ""
    for kind, block, between, title in _blocks(page):
        if title is not None:
            Path(title).write_text(_smoke(block), encoding="utf-8")
        elif kind == "python":
            printed = _python(page, _smoke(block), module)
        elif kind == "pycon":
            code, printed_error = block.removeprefix(">>> ").split("\n", 1)
            name, _, sentence = " ".join(printed_error.split()).partition(": ")
            with pytest.raises(rc.RecipeError, match=re.escape(sentence)) as refused:
                exec(code, vars(module))
            assert name == type(refused.value).__name__
        elif kind == "toml":
            tomllib.loads(block)
            if not Path(TOML_NAMES[page]).exists():  # later blocks are parts of files
                Path(TOML_NAMES[page]).write_text(_smoke(block), encoding="utf-8")
        elif kind == "console":
            printed = _console(page, block, slow)
        elif kind == "text" and not between.strip():
            assert _missing(block, printed, page) == []
    for test in [value for name, value in vars(module).items() if name.startswith("test_")]:
        test()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW_AT_SMOKE_SIZE))
        for page in PAGES
        if page not in SLOW_PAGES
    ],
)
def test_page_runs_as_printed(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _page(page, monkeypatch, slow=False)


@pytest.mark.slow
def test_the_first_lines_on_language_models_register_them() -> None:
    """In a separate process that has not imported `recollect.lm`."""
    page = "docs/language-models.md"
    _prepare(page)
    first = next(block for kind, block, *_ in _blocks(page) if kind == "python")
    command = [sys.executable, "-c", first]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW_PAGES)
def test_a_page_that_trains_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _page(page, monkeypatch, slow=True)


def test_make_and_pip_targets_of_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in PAGES:
        for kind, block, *_ in _blocks(page):
            for command in _commands(block) if kind == "console" else ():
                word, *rest = shlex.split(command, comments=True)
                assert word in COMMANDS, command
                if word == "make":
                    assert rest[0] in targets, command
                for extras in re.findall(r"\.\[(.*?)\]", command):
                    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_every_smoke_size_replaces_a_printed_value() -> None:
    printed = "\n".join(
        "\n".join(_commands(block)) if kind == "console" else block
        for page in PAGES
        for kind, block, *_ in _blocks(page)
    )
    for text in SMOKE:
        assert text in printed


def test_the_readme_counts_the_zoo() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    presets = [rc.zoo.get(name) for name in rc.zoo.names()]
    systems = sum(not preset.twin_of for preset in presets)
    assert f"the {systems} systems" in text
    assert f"in {len(presets)} presets" in text


def test_the_loss_on_the_page_stays_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "CONTRIBUTING.md"
    (block,) = (text for _, text, *_ in _blocks(page) if "class LogCosh" in text)
    module = _module(page, monkeypatch)
    _python(page, block, module)
    bias = vars(module)["LogCosh"](scale=1.0)
    for size in (1e-3, 1.0, 1e3):
        q, k, v = (size * torch.randn(3, 1, 4, 1, 4)).unbind()
        v.requires_grad_()
        y, _ = rc.recall(rc.Recipe(bias=bias), q, k / size, v, {"lr": torch.full((1, 4, 1), 0.1)})
        (slope,) = torch.autograd.grad(y.sum(), v)
        assert torch.isfinite(y).all() and torch.isfinite(slope).all()
    e = torch.tensor([[-2.0, 0.0, 0.3]], dtype=torch.float64)
    numbers = {"scale": torch.ones(1, 1, dtype=torch.float64)}
    expected = torch.cosh(e).log().sum(-1)
    torch.testing.assert_close(bias.loss(e, torch.zeros_like(e), numbers), expected)
