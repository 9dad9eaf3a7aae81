"""English prose of every machine with Python and torch: their documentation.

Sources are read as text and parsed. No module is imported or run, so collecting text has no side
effects and does not depend on the requirements of a module.
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

# Directories of the standard library with tests, vendored code or installed packages.
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
# The documented API of torch. The omitted compilers and test helpers are two thirds of the source.
# They have little prose, and reading them would take longer than everything else.
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
_MIN_DOCUMENTED = 0.15  # fraction of a source
_TRIPLE_QUOTED = re.compile(rb"""\"{3}.*?\"{3}|'{3}.*?'{3}""", re.DOTALL)
_MARKUP = re.compile(r":[\w:+.-]+:(?=`)|[`]+|\*\*|\s_(?=\s)")
_DIRECTIVE = re.compile(r"^\s*(\.\.\s|:\w+:(?!`)|@|\$|#|\|)")
_DOCTEST = re.compile(r"^\s*(>>>|In \[\d+\])")
_WORD = re.compile(r"[A-Za-z]{2,}")


def documentation() -> list[str]:
    """Return paragraphs of prose, one line each, in an order that depends only on the sources.

    The language reference of ``pydoc`` comes first, then the docstrings of torch, then the
    docstrings of the standard library. Paragraphs may be repeated.
    """
    with _collector_paused():
        return list(_documentation())


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the search for cycles, which doubles the time of parsing and finds none."""
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
    """Yield the English paragraphs of a docstring, with single spaces between words.

    Examples at the prompt, code, directives, tables and drawings are omitted. Markup around words
    is removed.
    """
    for block in re.split(r"\n[^\S\n]*\n", inspect.cleandoc(text)):
        lines = block.splitlines()
        if any(_DOCTEST.match(line) for line in lines):
            # Output follows the prompt. The lines before it may be a sentence.
            first = next(i for i, line in enumerate(lines) if _DOCTEST.match(line))
            lines = lines[:first]
        lines = [line for line in lines if not _DIRECTIVE.match(line)]
        paragraph = " ".join(_MARKUP.sub("", " ".join(lines)).split())
        if _reads_as_english(paragraph):
            yield paragraph


def _reads_as_english(paragraph: str) -> bool:
    """Whether a paragraph is sentences rather than code, a table, a formula or a fragment."""
    words = _WORD.findall(paragraph)
    if len(words) < 8 or not paragraph.isascii():
        return False
    letters = sum(map(len, words))
    spaces = paragraph.count(" ")
    # English has about 80 % letters and a space every five or six characters. Code has operators
    # and brackets in place of letters; tables and rulers have other characters, or long "words".
    return letters >= 0.72 * len(paragraph) and 0.09 <= spaces / len(paragraph) <= 0.25


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a source in order, and the texts of torch's ``add_docstr``."""
    tree = _parse(path)
    if tree is not None:
        yield from _docstrings_below(tree)


def _docstrings_below(node: ast.AST) -> Iterator[str]:
    # Only statements are visited: expressions are ten times as many and contain no docstring.
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
    """Yield every literal text of more than one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            yield node.value


def _parse(path: Path, *, all_prose: bool = False) -> ast.Module | None:
    """Return the syntax tree, or None if the file is missing, not valid, or mostly code."""
    try:
        source = path.read_bytes()
        # Parsing takes most of the time, so sources of nearly all code are skipped.
        documented = sum(map(len, _TRIPLE_QUOTED.findall(source)))
        if not all_prose and documented < _MIN_DOCUMENTED * len(source):
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
