"""Engine ``least_squares``: the exact minimum over all of the past, at every token."""

from recollect.engines.least_squares.engine import Cut, cut, describes, refuses, run

__all__ = ["Cut", "cut", "describes", "refuses", "run"]
