"""Shared by all commands: the console, JSON output, and checks of options."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import os
import select
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.layer.options import LayerOptions
    from recollect.recipe.recipe import Recipe
    from recollect.zoo.preset import Hybrid, Preset


WIDE = 120
"""Columns of a page that no terminal bounds."""

INTERRUPTED = 130
"""Exit status after an interrupt, as shells have it."""


def console_of_page(*, stderr: bool = False, bounded: bool = False) -> Page:
    """The terminal, or a page of `WIDE` or ``COLUMNS`` columns without a terminal.

    Args:
        stderr: whether it is the standard error.
        bounded: whether tables leave out columns that do not fit the page without a terminal.
    """
    console = Page(stderr=stderr)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    page = Page(stderr=stderr, width=WIDE)
    page.bounded = bounded
    return page


class Page(Console):
    """A console that shows texts as they are, and falls silent when nobody reads it any more.

    Brackets are no markup and colons no emoji, because names, reasons and paths are other people's.
    Silent, because the work goes on.

    Attributes:
        bounded: whether a terminal bounds its width, so that what is wider is left out.
    """

    bounded = True

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nobody_reads()


def nobody_reads() -> bool:
    """Whether the reader of an output has closed it; what is said there goes nowhere from then."""
    closed = False
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):  # no file of the system
            continue
        look = select.poll()
        look.register(number, select.POLLOUT)
        if any(event & select.POLLERR for _, event in look.poll(0)):
            closed = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
    return closed


def ready(stream: Any, seconds: float) -> bool:
    """Whether a stream has something to read, or has ended, within so many seconds.

    Args:
        stream: of text; one that is no file of the system always is.
        seconds: to wait for it.
    """
    look = select.poll()
    try:
        look.register(stream.fileno(), select.POLLIN)
    except (AttributeError, OSError, ValueError):
        return True
    return bool(look.poll(1000 * seconds))


def said(sentence: str) -> None:
    """A sentence on the standard error, if anybody reads it."""
    with contextlib.suppress(OSError):
        typer.echo(sentence, err=True)


def print_json(data: object) -> None:
    """Data as JSON on the standard output."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def stated(name: str) -> Preset | Hybrid | tuple[str, Recipe] | tuple[str, Recipe, LayerOptions]:
    """A model by zoo name, or one's own in a JSON or TOML file.

    The file holds a recipe, or ``recipe`` and ``options`` of its layer.

    Raises:
        RecipeError: no such name or file, or neither of both in it.
    """
    from recollect.layer.options import LayerOptions
    from recollect.recipe.files import load_recipe, read_data
    from recollect.recipe.recipe import Recipe
    from recollect.zoo.preset import find

    path = Path(name)
    if path.suffix not in (".json", ".toml"):
        return find(name)
    data = read_data(path)
    if not isinstance(data, dict) or set(data) != {"recipe", "options"}:
        return path.stem, load_recipe(path)
    try:
        options = LayerOptions.from_dict(data["options"])
        return path.stem, Recipe.from_dict(data["recipe"]), options
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


# The next three checks come before torch is imported, which takes seconds.


def check_models(names: Iterable[str]) -> None:
    """Refuse names that the zoo does not have, and recipe files that do not exist.

    Raises:
        RecipeError: such a name or file.
    """
    # A module of ``--import`` may have registered presets: then the zoo itself checks the names.
    known = None if "recollect.zoo" in sys.modules else _zoo_names()
    for name in names:
        if Path(name).suffix.lower() in (".json", ".toml"):
            check_exists(Path(name))
        elif known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "recollect zoo lists all"
            raise RecipeError(f"the zoo has no architecture named {name!r}; {hint}")


def check_words(option: str, words: Iterable[str], allowed: Sequence[str]) -> None:
    """Refuse a word that an option does not take.

    Raises:
        ValueError: a word that is not allowed.
    """
    for word in words:
        if word not in allowed:
            raise ValueError(f"{option} must be one of {', '.join(allowed)}, not {word!r}")


def check_exists(path: Path) -> None:
    """Refuse a file that does not exist.

    Raises:
        RecipeError: there is no such file.
    """
    if not os.path.lexists(path):
        raise RecipeError(f"there is no file {path}")


def _zoo_names() -> list[str]:
    """Names of all presets and hybrids, read from the decorators in the source of the zoo."""
    return [
        node.name
        for file in resources.files("recollect").joinpath("zoo").iterdir()
        if file.name.endswith(".py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("preset", "hybrid")
    ]


def named_or_loaded(name: str) -> str | Recipe:
    """The name of an architecture, or the recipe in the file of this name.

    A name of the zoo stays a name, even where a file is called the same.

    Raises:
        RecipeError: no such file, or no recipe in it.
    """
    is_path = "." in name or "/" in name
    if not is_path or Path(name).suffix.lower() in (".json", ".toml"):
        check_models([name])
    from recollect.recipe.files import load_recipe
    from recollect.zoo.preset import hybrids, names

    return load_recipe(name) if is_path and name not in (*names(), *hybrids()) else name


def check_device(device: str) -> None:
    """That ``--device`` is one that torch sees."""
    if device == "cuda":
        import torch

        if torch.cuda.is_available():
            return
    if device != "cpu":
        raise ValueError(f"--device {device} is not here: use cpu, or cuda where torch sees a GPU")


def check_writable(out: Path) -> None:
    """That the report will have a place: better known before hours of training than after."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to: {error.strerror}") from None
