"""Engine ``deep``: memories made of linear maps, by coefficient matrices; see `engine`."""

from recollect.engines.deep.cost import flops
from recollect.engines.deep.engine import describes, refuses, run, way

__all__ = ["describes", "flops", "refuses", "run", "way"]
