"""Text of a hub dataset, streamed: only as much as a comparison needs is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from recollect.lm.data.sources import HubDocuments
from recollect.messages import renamed_arguments
from recollect.tasks.text import TextCorpus, split_documents

__all__ = ["stream_text"]


@renamed_arguments({"column": "--column", "bad_lines": ""})
def stream_text(name: str, *, limit: int = 8_000_000, column: str = "text") -> TextCorpus:
    """Split the first ``limit`` bytes of a dataset's training split as `load_text` splits a file.

    Raises:
        ValueError: the dataset cannot be loaded, or a row has no text in the column.
        ImportError: datasets is not installed.
    """
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
