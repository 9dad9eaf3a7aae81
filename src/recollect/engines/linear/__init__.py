"""Engine ``linear``: a matrix (or vector) memory, exact at every token and parallel in chunks."""

from recollect.engines.linear.engine import describes, per_value_systems, refuses, run, scans

__all__ = ["describes", "per_value_systems", "refuses", "run", "scans"]
