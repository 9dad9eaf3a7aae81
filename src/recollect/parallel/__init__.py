"""One sequence over several ranks: exact for any recipe, forward and backward.

Examples:
    >>> print(rc.parallel.way_of(rc.Recipe()))
    affine, all at once: each row of the weights moves alike
    >>> print(rc.parallel.way_of(rc.zoo.get("softmax_attention").recipe))
    gather, all at once: its state is all associations
"""

from recollect.parallel.context import ContextParallel, context
from recollect.parallel.recall import recall
from recollect.parallel.ways import WAYS, Way, way_of

__all__ = ["WAYS", "ContextParallel", "Way", "context", "recall", "way_of"]
