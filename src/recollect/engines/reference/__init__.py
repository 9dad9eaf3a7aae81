"""The reference engine: the definition, one token at a time."""

from recollect.engines.reference.engine import read, run

__all__ = ["read", "run"]
