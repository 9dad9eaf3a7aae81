"""English prose that every machine with Python and torch has: their own documentation.

Sources are read as text and parsed, never imported or run, so gathering has no side effects and
does not depend on what a module needs in order to import.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Directories of the standard library that hold tests, vendored code or other people's packages.
_NOT_PROSE = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "lib2to3",
        "_vendor",
    }
)
# The documented face of torch. What is left out (compilers, test helpers) is two thirds of the
# source, has little prose in it, and would cost more seconds than all the rest.
_TORCH = (
    "__init__.py",
    "_tensor.py",
    "_tensor_docs.py",
    "_torch_docs.py",
    "amp",
    "autograd",
    "cuda",
    "distributed",
    "distributions",
    "fft",
    "func",
    "functional.py",
    "futures",
    "hub.py",
    "jit",
    "linalg",
    "nn",
    "optim",
    "profiler",
    "random.py",
    "serialization.py",
    "signal",
    "sparse",
    "special",
    "utils",
)

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LEAST_DOCUMENTED = 0.15  # share of a source
_TRIPLE_QUOTED = re.compile(rb"""\"{3}.*?\"{3}|'{3}.*?'{3}""", re.DOTALL)
_MARKUP = re.compile(r":[\w:+.-]+:(?=`)|[`]+|\*\*|\s_(?=\s)")
_DIRECTIVE = re.compile(r"^\s*(\.\.\s|:\w+:(?!`)|@|\$|#|\|)")
_DOCTEST = re.compile(r"^\s*(>>>|In \[\d+\])")
_WORD = re.compile(r"[A-Za-z]{2,}")


def documentation() -> list[str]:
    """Paragraphs of prose, each on one line, in an order that depends only on the sources.

    First the language reference that ``pydoc`` shows, then the docstrings of torch, then those of
    the standard library. Repeated paragraphs are still in it.
    """
    with _collector_paused():
        return list(_documentation())


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Parsing makes millions of objects and no cycles; looking for cycles doubles its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _documentation() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    topics = _parse(library / "pydoc_data" / "topics.py", all_prose=True)
    for text in _long_strings(topics) if topics else ():
        yield from prose(text)
    for path in (*_torch_sources(), *_library_sources(library)):
        for text in _docstrings(path):
            yield from prose(text)


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a docstring that read as English, each with its whitespace joined up.

    Examples at the prompt, code, directives, tables and drawings are left out; markup around words
    is taken off.
    """
    for block in re.split(r"\n[^\S\n]*\n", inspect.cleandoc(text)):
        lines = block.splitlines()
        if any(_DOCTEST.match(line) for line in lines):
            # What follows the prompt is output. What comes before it is a sentence, if anything.
            first = next(i for i, line in enumerate(lines) if _DOCTEST.match(line))
            lines = lines[:first]
        lines = [line for line in lines if not _DIRECTIVE.match(line)]
        paragraph = " ".join(_MARKUP.sub("", " ".join(lines)).split())
        if _reads_as_english(paragraph):
            yield paragraph


def _reads_as_english(paragraph: str) -> bool:
    """Tell a sentence or more from code, a table, a formula or a fragment."""
    words = _WORD.findall(paragraph)
    if len(words) < 8 or not paragraph.isascii():
        return False
    letters = sum(map(len, words))
    spaces = paragraph.count(" ")
    # English has some 80 % letters and a space every five or six characters. Code has operators and
    # brackets in place of letters; tables and rulers have other fill, or very long "words".
    return letters >= 0.72 * len(paragraph) and 0.09 <= spaces / len(paragraph) <= 0.25


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a source, in order, and the texts that torch gives to ``add_docstr``."""
    tree = _parse(path)
    if tree is not None:
        yield from _docstrings_below(tree)


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    # Only statements are visited: there are ten times as many expressions, and no docstring is
    # inside one.
    if isinstance(node, _DOCUMENTED):
        if text := ast.get_docstring(node, clean=False):
            yield text
    elif isinstance(node, ast.Expr) and _adds_docstring(node.value):
        yield from _long_strings(node)
    for block in ("body", "orelse", "handlers", "finalbody"):
        for child in getattr(node, block, ()):
            yield from _docstrings_below(child)


def _adds_docstring(node: ast.expr) -> bool:
    name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
    return name.lstrip("_").startswith("add_docstr")


def _long_strings(tree: ast.AST) -> Iterator[str]:
    """Every literal text of more than one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            yield node.value


def _parse(path: Path, *, all_prose: bool = False) -> ast.Module | None:
    """The syntax tree, or None where a distribution left the file out or wrote another dialect."""
    try:
        source = path.read_bytes()
        # Parsing is what takes time, so sources that are nearly all code are passed over.
        documented = sum(map(len, _TRIPLE_QUOTED.findall(source)))
        if not all_prose and documented < _LEAST_DOCUMENTED * len(source):
            return None
        return ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None


def _library_sources(library: Path) -> list[Path]:
    paths = library.rglob("*.py")
    return sorted(p for p in paths if not _NOT_PROSE & set(p.relative_to(library).parts))


def _torch_sources() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    root = Path(spec.origin).parent
    paths: list[Path] = []
    for name in _TORCH:
        entry = root / name
        paths.extend(sorted(entry.rglob("*.py")) if entry.is_dir() else [entry])
    return paths
