"""The functional face: `recall` memorises and reads, `read` only reads.

Everything that is the same for all engines happens here, once: checks, packing, padding, grouped
query heads, several associations per token, and the normaliser. Engines see dense right-padded
rows.
"""

from recollect.recall.reading import read
from recollect.recall.recall import recall

__all__ = ["read", "recall"]
