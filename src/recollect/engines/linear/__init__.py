"""Engine ``linear``: a matrix (or vector) memory, exact at every token and parallel in chunks."""

from recollect.engines.linear.cost import flops, reading
from recollect.engines.linear.decode import per_value_systems, plan, scans, token
from recollect.engines.linear.engine import (
    describes,
    follows,
    refuses,
    run,
)

__all__ = [
    "describes",
    "flops",
    "follows",
    "per_value_systems",
    "plan",
    "reading",
    "refuses",
    "run",
    "scans",
    "token",
]
