"""Engine ``deep``: memories made of linear maps, by coefficient matrices; see `engine`."""

from recollect.engines.deep.chain.token import token
from recollect.engines.deep.cost import flops, reading
from recollect.engines.deep.engine import describes, plan, refuses, run, torch_plan, way
from recollect.engines.deep.fused.asked import fused_describes, fused_plan, fused_refuses

__all__ = [
    "describes",
    "flops",
    "fused_describes",
    "fused_plan",
    "fused_refuses",
    "plan",
    "reading",
    "refuses",
    "run",
    "token",
    "torch_plan",
    "way",
]
