"""Engine ``deep``: memories made of linear maps, by coefficient matrices; see `engine`."""

from recollect.engines.deep.cost import batch_flops, orthogonal
from recollect.engines.deep.engine import describes, refuses, run, way

__all__ = ["batch_flops", "describes", "orthogonal", "refuses", "run", "way"]
