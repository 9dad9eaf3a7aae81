"""Engine ``linear``: a matrix (or vector) memory, exact at every token and parallel in chunks.

This file asks a recipe the structural questions and hands the numbers to
`recollect.engines.chunked`.
Value channels whose error equations differ (rates or decays per value channel under an error that
sees the prediction) are independent of each other, so each becomes a memory of its own with one
row: correct, at V times the cost of the key products, which `describes` says.
"""

from recollect.engines.linear.cost import flops
from recollect.engines.linear.engine import describes, per_value_systems, refuses, run, scans

__all__ = ["describes", "flops", "per_value_systems", "refuses", "run", "scans"]
