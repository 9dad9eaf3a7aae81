"""The functional interface: `recall` memorises and reads, `read` only reads."""

from recollect.recall.reading import read
from recollect.recall.recall import recall

__all__ = ["read", "recall"]
