"""Engine ``least_squares``: exact minimum over all of the past at every token."""

from recollect.engines.least_squares.cost import flops, reading
from recollect.engines.least_squares.engine import describes, needs_digits, refuses, run

__all__ = ["describes", "flops", "needs_digits", "reading", "refuses", "run"]
