"""Documents from text files, JSON lines, Parquet files and datasets of the Hugging Face Hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recollect.messages import argument_name, renamed_arguments
from recollect.serialization import read_json

if TYPE_CHECKING:
    from recollect.tasks.text import TextCorpus

__all__ = [
    "BadLinePolicy",
    "FileDocuments",
    "HubDocuments",
    "find_files",
    "iter_chunks",
    "stream_text",
]


CHUNK_CHARS = 1 << 16
"""Characters that are read from a text file, or tokenized, at once."""

_SUFFIXES = (".txt", ".md", ".text", ".jsonl", ".parquet")  # of the files read from a folder
# Half of a surrogate pair: an escape of JSON, or a byte that is not UTF-8 after "surrogateescape".
_SURROGATE = re.compile("[\ud800-\udfff]")
# Pre-tokenizers of byte-level tokenizers split here in any case, so chunks do not change a token.
_BOUNDARIES = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*\S(?= \S)", re.DOTALL))


class TextChunk(NamedTuple):
    """Consecutive part of a document."""

    text: str
    is_last: bool  # whether the document ends with it


@dataclass(kw_only=True)
class BadLinePolicy:
    """Policy for lines that cannot be read, with the number of skipped lines."""

    skip: bool = False  # otherwise the first bad line raises an error
    count: int = 0
    examples: list[str] = field(default_factory=list)  # the first ten, each with file and line

    def report(self, location: str, reason: str) -> None:
        """Count a line that cannot be read, or raise a ValueError unless lines are skipped."""
        if not self.skip:
            setting = argument_name("bad_lines", 'bad_lines = "skip" in [data]')
            skip = f", or set {setting} to go on without such lines" if setting else ""
            raise ValueError(f"{location}: {reason}; repair it{skip}")
        self.count += 1
        message = f"{location}: {reason}"
        if len(self.examples) < 10 and message not in self.examples:
            self.examples.append(message)


@dataclass(frozen=True, kw_only=True)
class FileDocuments:
    """Documents of files in order, read again on each iteration."""

    files: tuple[Path, ...]
    column: str = "text"  # field of a JSON line or a Parquet row
    separator: str = ""  # between the documents of a text file; "" for one document per file
    bad_lines: BadLinePolicy = field(default_factory=BadLinePolicy)

    def __iter__(self) -> Iterator[str]:
        parts: list[str] = []
        for text, is_last in self.chunks():
            parts.append(text)
            if is_last:
                yield "".join(parts)
                parts.clear()

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the documents in chunks, without loading a text file at once."""
        for path in self.files:
            if path.suffix not in (".jsonl", ".parquet"):
                yield from self._text_chunks(path)
                continue
            read = self._json_lines if path.suffix == ".jsonl" else self._parquet
            for text in read(path):
                yield from _split_text(text)

    def _text_chunks(self, path: Path) -> Iterator[TextChunk]:
        buffer, started = "", False  # started: whether a chunk of this document was yielded
        for block in self._decoded_blocks(path):
            buffer += block
            if self.separator:
                *documents, buffer = buffer.split(self.separator)
                for text in documents:
                    if started or text.strip():
                        yield from _split_text(text)
                    started = False
            # The last characters may be the beginning of a separator.
            while len(buffer) > CHUNK_CHARS + len(self.separator) and (started or buffer.strip()):
                end = _chunk_end(buffer, 0, CHUNK_CHARS)
                yield TextChunk(buffer[:end], is_last=False)
                buffer, started = buffer[end:], True
        if started or buffer.strip():
            yield from _split_text(buffer)

    def _decoded_blocks(self, path: Path) -> Iterator[str]:
        num_bytes, num_lines, is_reported = 0, 1, False
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            while block := file.read(CHUNK_CHARS):
                bad = _SURROGATE.search(block)
                if bad is not None and not is_reported:
                    prefix = block[: bad.start()]
                    line, byte = prefix.count("\n"), len(prefix.encode())
                    self.bad_lines.report(
                        f"{path}:{num_lines + line}", f"not UTF-8 at byte {num_bytes + byte}"
                    )
                    is_reported = True
                num_bytes += len(block.encode("utf-8", "surrogateescape"))
                num_lines += block.count("\n")
                yield block if bad is None else _SURROGATE.sub("", block)

    def _json_lines(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row: Any = read_json(line)
                except ValueError as error:
                    reason = str(error).removeprefix("it is ")
                    if not reason.startswith("not "):
                        reason = f"not JSON ({reason})"
                    self.bad_lines.report(f"{path}:{number}", reason)
                    continue
                yield from _extract_text(row, self.column, f"{path}:{number}", self.bad_lines)

    def _parquet(self, path: Path) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            self.bad_lines.report(str(path), f"not a Parquet file ({error})")
            return
        with file:
            if self.column not in file.schema_arrow.names:
                raise ValueError(
                    f"{path} has no column {self.column!r}; it has "
                    f"{', '.join(file.schema_arrow.names)}: name one as {_column_option()}"
                )
            number = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                try:
                    table = file.read_row_group(group, columns=[self.column])
                    texts = table.column(self.column).to_pylist()
                except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                    location = f"{path}: rows {number + 1} to {number + rows}"
                    self.bad_lines.report(location, f"cannot be read ({error})")
                    number += rows
                    continue
                for text in texts:
                    number += 1
                    row, location = {self.column: text}, f"{path}: row {number}"
                    yield from _extract_text(row, self.column, location, self.bad_lines)


def _extract_text(row: Any, column: str, location: str, bad_lines: BadLinePolicy) -> Iterator[str]:
    """Yield the text of a row unless it is empty."""
    if not isinstance(row, dict):
        reason = f"a {type(row).__name__}, not an object with {column!r}"
    elif column not in row:
        fields = ", ".join(map(str, row)) or "none"
        reason = f"no field {column!r}; its fields are: {fields} (name one as {_column_option()})"
    elif not isinstance(row[column], str):
        reason = f"{column!r} is of type {type(row[column]).__name__}, not text"
    elif _SURROGATE.search(row[column]) is not None:
        reason = f"{column!r} has half of a surrogate pair, which is no character"
    else:
        if row[column]:
            yield row[column]
        return
    bad_lines.report(location, reason)


def _column_option() -> str:
    return argument_name("column", "column in [data]")


def find_files(patterns: Sequence[str], *, key: str) -> tuple[Path, ...]:
    """Return the files of names, folders and glob patterns, sorted within each pattern.

    ``key`` of ``[data]`` names the patterns in the `ValueError` for one that matches no file.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = [p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file()]
        elif path.is_file():
            matches = [path]
        else:
            matches = [Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not matches:
            raise ValueError(
                f"{argument_name(key, f'[data] {key}')}: no file matches {pattern!r} (in a folder: "
                f"{', '.join(_SUFFIXES)})"
            )
        files += sorted(matches)
    return tuple(dict.fromkeys(files))


@dataclass(frozen=True, kw_only=True)
class HubDocuments:
    """Documents of a dataset, streamed with `datasets.load_dataset`."""

    path: str  # a hub name or a folder
    name: str | None = None  # name of the configuration
    split: str = "train"
    column: str = "text"
    bad_lines: BadLinePolicy = field(default_factory=BadLinePolicy)

    def __iter__(self) -> Iterator[str]:
        from datasets import load_dataset

        try:
            rows = load_dataset(self.path, self.name, split=self.split, streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"dataset {self.path!r} cannot be streamed: {reason}") from None
        for number, row in enumerate(rows, start=1):
            location = f"dataset {self.path}, {self.split}, row {number}"
            yield from _extract_text(row, self.column, location, self.bad_lines)


def iter_chunks(documents: Iterable[str]) -> Iterator[TextChunk]:
    """Yield documents in chunks; text files of `FileDocuments` are read as a stream."""
    if isinstance(documents, FileDocuments):
        yield from documents.chunks()
        return
    for text in documents:
        yield from _split_text(text)


def _split_text(text: str) -> Iterator[TextChunk]:
    """Yield a document in chunks of at most ``CHUNK_CHARS`` characters."""
    start = 0
    while len(text) - start > CHUNK_CHARS:
        end = _chunk_end(text, start, start + CHUNK_CHARS)
        yield TextChunk(text[start:end], is_last=False)
        start = end
    yield TextChunk(text[start:], is_last=True)


def _chunk_end(text: str, start: int, stop: int) -> int:
    """Return the last position up to ``stop`` after a line end, else before a space, else it."""
    for boundary in _BOUNDARIES:
        if (match := boundary.match(text, start, stop)) is not None:
            return match.end()
    return stop


@renamed_arguments({"column": "--column", "bad_lines": ""})
def stream_text(name: str, *, limit: int = 8_000_000, column: str = "text") -> TextCorpus:
    """Split the first ``limit`` bytes of a dataset's training split as `load_text` splits a file.

    Raises:
        ValueError: the dataset cannot be loaded, or a row has no text in the column.
        ImportError: datasets is not installed.
    """
    from recollect.tasks.text import split_documents

    num_bytes = 0

    def documents() -> Iterator[str]:
        nonlocal num_bytes
        for text in HubDocuments(path=name, column=column):
            num_bytes += len(text.encode()) + len("\n\n")
            yield text
            if num_bytes >= limit:
                break

    corpus = split_documents(documents(), source=f"dataset {name}")
    return replace(corpus, source=f"{corpus.source}, first {num_bytes:,} bytes")
