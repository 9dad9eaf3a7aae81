"""Engine ``kernel``: memories that store associations, in one of several forms; see `engine`."""

from recollect.engines.kernel.cost import flops, reading
from recollect.engines.kernel.engine import (
    FORMS,
    Form,
    describes,
    follows,
    inner_gradients,
    needs_digits,
    plan,
    read,
    refuses,
    run,
    token,
)

__all__ = [
    "FORMS",
    "Form",
    "describes",
    "flops",
    "follows",
    "inner_gradients",
    "needs_digits",
    "plan",
    "read",
    "reading",
    "refuses",
    "run",
    "token",
]
