"""Text of a hub dataset, streamed: only as much as a comparison needs is fetched."""

from __future__ import annotations

import tempfile
from pathlib import Path

from recollect.tasks.text import TextCorpus, load_text

__all__ = ["stream_text"]


def stream_text(name: str, *, limit: int = 8_000_000, column: str = "text") -> TextCorpus:
    """The first ``limit`` bytes of a dataset's training split, divided like any other text.

    Args:
        name: of the dataset, as `datasets.load_dataset` takes it (a hub name or a local folder).
        limit: bytes to take.
        column: which column holds the text.

    Raises:
        ValueError: the dataset cannot be loaded, or has no such column.
        ImportError: datasets is not installed.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train", streaming=True)
        with tempfile.TemporaryDirectory() as folder:
            path, taken = Path(folder) / "text.txt", 0
            with path.open("w", encoding="utf-8") as file:
                for row in rows:
                    if column not in row:
                        raise ValueError(
                            f"dataset {name!r} has no column {column!r}; it has {', '.join(row)}"
                        )
                    text = str(row[column]) + "\n\n"
                    file.write(text)
                    taken += len(text.encode())
                    if taken >= limit:
                        break
            corpus = load_text(path)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"dataset {name!r} cannot be streamed: {error}") from error
    return TextCorpus(
        train=corpus.train,
        heldout=corpus.heldout,
        sha256=corpus.sha256,
        source=f"dataset {name}, first {taken:,} bytes",
    )
