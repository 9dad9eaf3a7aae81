"""Engine ``deep``: memories made of linear maps, by coefficient matrices; see `engine`."""

from recollect.engines.deep.cost import flops, reading
from recollect.engines.deep.engine import describes, plan, refuses, run, torch_plan, way

__all__ = [
    "describes",
    "flops",
    "plan",
    "reading",
    "refuses",
    "run",
    "torch_plan",
    "way",
]
