"""A recipe in words and equations, and its diagnosis; see `explain`."""

from recollect.explain.composition import Composition
from recollect.explain.explain import Explanation, explain
from recollect.explain.naming import PROPERTIES, Named, fingerprint, named, properties

__all__ = [
    "PROPERTIES",
    "Composition",
    "Explanation",
    "Named",
    "explain",
    "fingerprint",
    "named",
    "properties",
]
