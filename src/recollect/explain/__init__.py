"""A recipe in words and equations: what it solves, how it moves, which engine runs it and why."""

from recollect.explain.explain import (
    PROPERTIES,
    Explanation,
    Named,
    explain,
    fingerprint,
    named,
    properties,
)

__all__ = ["PROPERTIES", "Explanation", "Named", "explain", "fingerprint", "named", "properties"]
