"""Check the rules of CONTRIBUTING.md, "Names and sentences", that a program can check.

    python scripts/check_style.py [PATH ...]

Prints each fault with its file and line, and exits with 1 if there is one. The rules: a file has at
most 600 lines. Names are nouns, verbs or predicates rather than bare participles and adverbs
(`found`, `beside`). A docstring does not open with a clause ("What ..."). No sentence has an
unnamed person as its subject ("nobody"). "What" and "where" are rare. Tests may have longer files.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600
# Occurrences per 1,000 words of docstrings and comments, over all checked files of a package.
MAX_RATES = {"what": 1.5, "where": 2.0}
_WORDS = """
again alone anew apart asked before beside begun begins doubtful drawn ended every far found gentle
given glance halves hear heed here holds hosts kept lasts learns least left lies likewise live looks
lost loud made most mover nobody noting once own quiet recurs said seen settles some somewhere
stands suits sure takes tell there together told tried turn unlike up walks wanted way ways when
where whoever whole written
"""
NAMES = frozenset(_WORDS.split())
# Flagged names that stay, because code of users, stored files or a library have them.
PUBLIC_NAMES = {
    "src/recollect/benchmarks/cases/memory.py": {"live"},  # key of stored results
    "src/recollect/choices/memory/base.py": {"when"},  # field of Read
    "src/recollect/choices/retention/base.py": {"when"},  # field of Decay
    "src/recollect/cli/console.py": {"quiet"},  # attribute of rich's Console
    "src/recollect/layer/state.py": {"where"},  # method of states, like torch.where
    "src/recollect/layer/token_shift.py": {"up"},  # key of saved tensors
    "src/recollect/state/state.py": {"where"},  # method of states, like torch.where
}
OPENING = re.compile(
    r"(What|Who|Whose|Whom|Of|That|How much|How many|The same|As|Where|From what|So)\b"
)
PERSON = re.compile(r"\b(nobody|somebody|whoever|anybody)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")

DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Fault = tuple[int, str]


def names(tree: ast.AST, public: set[str]) -> Iterator[Fault]:
    """Yield each definition and assignment of a flagged name that is not public."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                pass
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if name.strip("_").lower() in NAMES and name not in public:
            yield node.lineno, f"name {name!r}: name the value, or use an imperative verb"


def prose(tree: ast.AST, source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it is a docstring, for all docstrings and comments."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def sentences(texts: list[tuple[int, str, bool]]) -> Iterator[Fault]:
    """Yield docstrings that open with a clause, and unnamed persons."""
    for line, text, is_docstring in texts:
        if is_docstring and OPENING.match(text):
            yield line, f"docstring opens with a clause: {text.splitlines()[0][:60]!r}"
        for match in PERSON.finditer(text):
            yield line, f"unnamed person {match[0]!r}: name the caller, the user or the engine"


def main(arguments: list[str]) -> int:
    """Print all faults, and return the exit status."""
    roots = [Path(x).resolve() for x in arguments] or [ROOT / "src", ROOT / "tests"]
    files = [
        f for root in roots for f in ([root] if root.is_file() else sorted(root.rglob("*.py")))
    ]
    num_faults, words = 0, dict[str, list[str]]()

    def report(place: str, fault: str) -> None:
        nonlocal num_faults
        num_faults += 1
        print(f"{place}: {fault}")

    for path in files:
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        folder, *parts = path.relative_to(ROOT).parts
        if (length := source.count("\n")) > MAX_LINES and folder == "src":
            report(name, f"{length} lines, and at most {MAX_LINES} are allowed: split the file")
        key = folder if folder != "src" else parts[1] if len(parts) > 2 else "root modules"
        tree = ast.parse(source)
        texts = list(prose(tree, source))
        for line, fault in sorted([*names(tree, PUBLIC_NAMES.get(name, set())), *sentences(texts)]):
            report(f"{name}:{line}", fault)
        words.setdefault(key, []).extend(w for _, x, _ in texts for w in WORD.findall(x.lower()))
    for package, used in words.items():
        for word, maximum in MAX_RATES.items():
            rate = 1000 * used.count(word) / max(len(used), 1)
            if rate > maximum:
                report(package, f"{rate:.1f} times {word!r} in 1,000 words, at most {maximum}")
    print(f"{len(files)} files, {num_faults} faults")
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
