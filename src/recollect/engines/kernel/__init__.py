"""Engine ``kernel``: memories that keep associations, in one of several forms."""

from recollect.engines.kernel.engine import FORMS, Form, describes, read, refuses, run

__all__ = ["FORMS", "Form", "describes", "read", "refuses", "run"]
