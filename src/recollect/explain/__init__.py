"""A recipe in words and equations, and its diagnosis; see `explain`."""

from recollect.explain.explain import Explanation, explain
from recollect.explain.naming import PROPERTIES, Named, fingerprint, named, properties

__all__ = ["PROPERTIES", "Explanation", "Named", "explain", "fingerprint", "named", "properties"]
