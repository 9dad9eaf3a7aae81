"""Engine ``deep``: memories made of linear maps, by coefficient matrices; see `engine`."""

from recollect.engines.deep.chain.token import token
from recollect.engines.deep.cost import flops, reading
from recollect.engines.deep.engine import (
    describes,
    fused_describes,
    fused_plan,
    fused_refuses,
    plan,
    refuses,
    run,
    way,
)

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
    "way",
]
