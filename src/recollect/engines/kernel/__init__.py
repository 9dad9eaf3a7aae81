"""Engine ``kernel``: memories that keep associations, in one of several forms.

Each form says which recipes it is not for, and how it runs the others; the first that fits runs.
"""

from recollect.engines.kernel.cost import flops
from recollect.engines.kernel.engine import FORMS, Form, describes, plan, read, refuses, run

__all__ = ["FORMS", "Form", "describes", "flops", "plan", "read", "refuses", "run"]
