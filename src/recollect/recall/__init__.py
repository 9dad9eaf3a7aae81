"""The functional face: `recall` memorises and reads, `read` only reads."""

from recollect.recall.recall import read, recall

__all__ = ["read", "recall"]
