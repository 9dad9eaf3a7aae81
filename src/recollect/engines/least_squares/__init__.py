"""Engine ``least_squares``: the exact minimum over all of the past, at every token.

A ridge that decays with the data, or is refreshed at the borders of spans, has a recursion in
chunks (`recursion_backward`), in the state's dtype where that holds the digits that
decays leave and in float64 elsewhere (`recollect.engines.common.resolution`). A constant ridge, and
approximations of the inverse, go through products with the Gram matrices of all prefixes at once
(`conjugate_gradient`).
"""

from recollect.engines.least_squares.cost import flops
from recollect.engines.least_squares.engine import describes, refuses, run

__all__ = ["describes", "flops", "refuses", "run"]
