"""One sequence over several ranks: exact for any recipe, forward and backward.

Examples:
    >>> print(rc.parallel.strategy_for(rc.Recipe()))
    affine, all at once: each row of the weights moves alike
    >>> print(rc.parallel.strategy_for(rc.zoo.get("softmax_attention").recipe))
    gather, all at once: its state is all associations
"""

from recollect.parallel.context_parallel import ContextParallel, context
from recollect.parallel.segment_recall import recall
from recollect.parallel.strategies import STRATEGIES, Strategy, strategy_for

__all__ = ["STRATEGIES", "ContextParallel", "Strategy", "context", "recall", "strategy_for"]
