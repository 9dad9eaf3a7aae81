"""Engine ``linear``: a matrix (or vector) memory, exact at every token and parallel in chunks."""

from recollect.engines.linear.cost import flops, reading
from recollect.engines.linear.decode import plan, token
from recollect.engines.linear.engine import describes, per_value_systems, refuses, run, scans

__all__ = [
    "describes",
    "flops",
    "per_value_systems",
    "plan",
    "reading",
    "refuses",
    "run",
    "scans",
    "token",
]
