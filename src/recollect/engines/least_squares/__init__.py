"""Engine ``least_squares``: the exact minimum over all of the past, at every token.

A ridge that decays with the data, or is refreshed at the borders of spans, has a recursion in
chunks (`recollect.engines.recursion`), in the state's dtype where that holds the digits that
decays leave and in float64 elsewhere (`recollect.engines.resolution`). A constant ridge, and
approximations of the inverse, go through products with the Gram matrices of all prefixes at once
(`recollect.engines.conjugate`).
"""

from recollect.engines.least_squares.cost import flops
from recollect.engines.least_squares.engine import Cut, cut, describes, refuses, run

__all__ = ["Cut", "cut", "describes", "flops", "refuses", "run"]
