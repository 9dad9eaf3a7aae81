"""Reference engine: the definition, one token at a time; see `engine`."""

from recollect.engines.reference.cost import flops, reading
from recollect.engines.reference.engine import read, run

__all__ = ["flops", "read", "reading", "run"]
