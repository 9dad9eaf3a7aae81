"""Engine ``deep``: memories made of linear maps, by coefficient matrices; see `engine`."""

from recollect.engines.deep.cost import flops, reading
from recollect.engines.deep.engine import describes, execution_mode, plan, refuses, run, torch_plan

__all__ = [
    "describes",
    "execution_mode",
    "flops",
    "plan",
    "reading",
    "refuses",
    "run",
    "torch_plan",
]
