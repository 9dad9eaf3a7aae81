"""One sequence over several ranks: exact for any recipe, forward and backward."""

from recollect.parallel.context import ContextParallel, context
from recollect.parallel.recall import recall
from recollect.parallel.ways import WAYS, Way, way_of

__all__ = ["WAYS", "ContextParallel", "Way", "context", "recall", "way_of"]
