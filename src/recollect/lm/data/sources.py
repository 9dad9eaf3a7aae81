"""Documents from files, one at a time: text, JSON lines, Parquet, and datasets of the hub."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recollect.messages import argument_name
from recollect.serialization import read_json

__all__ = ["BadLines", "HubDocuments", "Source", "find_files"]

_KINDS = (".txt", ".md", ".text", ".jsonl", ".parquet")  # of files in a folder


@dataclass(kw_only=True)
class BadLines:
    """What is done with a line that cannot be read, and what was.

    Attributes:
        skip: go on without it; otherwise the first one ends the run.
        count: lines left out.
        examples: the first few, each with file and line.
    """

    skip: bool = False
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def note(self, where: str, reason: str) -> None:
        """A line that cannot be read.

        Raises:
            ValueError: unless lines are skipped.
        """
        if not self.skip:
            setting = argument_name("bad_lines", 'bad_lines = "skip" in [data]')
            skip = f", or set {setting} to go on without such lines" if setting else ""
            raise ValueError(f"{where}: {reason}; repair it{skip}")
        self.count += 1
        message = f"{where}: {reason}"
        if len(self.examples) < 10 and message not in self.examples:
            self.examples.append(message)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The documents of some files, in order; each pass reads them anew.

    Attributes:
        files: their paths.
        column: the field that holds the text of a JSON line or a Parquet row.
        separator: what divides a text file into documents; empty for one document per file.
        bad: what is done with lines that cannot be read.
    """

    files: tuple[Path, ...]
    column: str = "text"
    separator: str = ""
    bad: BadLines = field(default_factory=BadLines)

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield from self._documents(path)

    def _documents(self, path: Path) -> Iterator[str]:
        if path.suffix == ".jsonl":
            return self._json_lines(path)
        if path.suffix == ".parquet":
            return self._parquet(path)
        return self._text(path)

    def _text(self, path: Path) -> Iterator[str]:
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            self.bad.note(f"{path}:{line}", f"not UTF-8 at byte {error.start}")
            text = raw.decode("utf-8-sig", errors="ignore")
        parts = text.split(self.separator) if self.separator else [text]
        yield from (part for part in parts if part.strip())

    def _json_lines(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row: Any = read_json(line)
                except ValueError as error:
                    said = str(error).removeprefix("it is ")
                    reason = said if said.startswith("not ") else f"not JSON ({said})"
                    self.bad.note(f"{path}:{number}", reason)
                    continue
                yield from _texts(row, self.column, f"{path}:{number}", self.bad)

    def _parquet(self, path: Path) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            self.bad.note(str(path), f"not a Parquet file ({error})")
            return
        with file:
            if self.column not in file.schema_arrow.names:
                raise ValueError(
                    f"{path} has no column {self.column!r}; it has "
                    f"{', '.join(file.schema_arrow.names)}: name one as {_column()}"
                )
            number = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                try:
                    table = file.read_row_group(group, columns=[self.column])
                    texts = table.column(self.column).to_pylist()
                except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                    where = f"{path}: rows {number + 1} to {number + rows}"
                    self.bad.note(where, f"cannot be read ({error})")
                    number += rows
                    continue
                for text in texts:
                    number += 1
                    where = f"{path}: row {number}"
                    yield from _texts({self.column: text}, self.column, where, self.bad)


def _texts(row: Any, column: str, where: str, bad: BadLines) -> Iterator[str]:
    """The text of a row, if it has one that is not empty."""
    if not isinstance(row, dict):
        bad.note(where, f"a {type(row).__name__}, not an object with {column!r}")
    elif column not in row:
        fields = ", ".join(map(str, row)) or "none"
        bad.note(where, f"no field {column!r}; its fields are: {fields} (name one as {_column()})")
    elif not isinstance(row[column], str):
        bad.note(where, f"{column!r} is of type {type(row[column]).__name__}, not text")
    elif not _encodes(row[column]):
        bad.note(where, f"{column!r} has half of a surrogate pair, which is no character")
    elif row[column]:
        yield row[column]


def _column() -> str:
    return argument_name("column", "column in [data]")


def _encodes(text: str) -> bool:
    """Whether it is text that UTF-8 can write; JSON's escapes can name what is not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def find_files(patterns: Sequence[str], *, key: str) -> tuple[Path, ...]:
    """Return the files of names, folders and patterns, each pattern's in order of their names.

    Args:
        patterns: names, folders and patterns.
        key: in ``[data]`` that has them, for a message.

    Raises:
        ValueError: a pattern that finds nothing.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            here = sorted(p for p in path.rglob("*") if p.suffix in _KINDS and p.is_file())
        elif path.is_file():
            here = [path]
        else:
            here = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
        if not here:
            raise ValueError(
                f"{argument_name(key, f'[data] {key}')}: no file matches {pattern!r} (in a folder: "
                f"{', '.join(_KINDS)})"
            )
        files += here
    return tuple(dict.fromkeys(files))


@dataclass(frozen=True, kw_only=True)
class HubDocuments:
    """The documents of a dataset, streamed: nothing is fetched that is not asked for.

    Attributes:
        path: as `datasets.load_dataset` takes it: a hub name, or a folder.
        name, split: of the configuration and the part.
        column: the field that holds the text.
        bad: what is done with rows that have no text.
    """

    path: str
    name: str | None = None
    split: str = "train"
    column: str = "text"
    bad: BadLines = field(default_factory=BadLines)

    def __iter__(self) -> Iterator[str]:
        from datasets import load_dataset

        try:
            rows = load_dataset(self.path, self.name, split=self.split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"dataset {self.path!r} cannot be streamed: {first}") from None
        for number, row in enumerate(rows, start=1):
            where = f"dataset {self.path}, {self.split}, row {number}"
            yield from _texts(row, self.column, where, self.bad)
