"""Context: the associations of the objective at time t, and their weights.

A context that restricts another (`KernelWeighted`'s ``restrictions``) defines its weights in
`Context.over`. Engines use declared structure only: whether the weights are positive, a product of
a factor of the query and one of the association, or a horizon.

Examples:
    >>> rc.context.Window(size=4).horizon, rc.context.Online().horizon, rc.context.Prefix().horizon
    (4, 1, None)
"""

from recollect.choices.context.base import Context
from recollect.choices.context.moved_keys import KeyDecay, KeyReflection
from recollect.choices.context.restrictions import Bilinear, SinkWindow, SkipFirst, TopBlocks
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.context.stick_breaking import StickBreaking
from recollect.choices.context.windows import Online, Prefix, Window

__all__ = [
    "Bilinear",
    "Context",
    "KernelWeighted",
    "KeyDecay",
    "KeyReflection",
    "Online",
    "Prefix",
    "SinkWindow",
    "SkipFirst",
    "StickBreaking",
    "TopBlocks",
    "Window",
]
