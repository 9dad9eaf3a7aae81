"""Context: which associations count at time t, and how much.

A context that restricts others (`Similar`'s ``within``) states its weights once, in `Context.over`;
engines ask whether they are positive, a product of a factor of the query and one of the
association, or a plain horizon, and never which context it is.

Examples:
    >>> rc.context.Window(size=4).horizon, rc.context.Online().horizon, rc.context.Prefix().horizon
    (4, 1, None)
"""

from typing import TYPE_CHECKING

from recollect.choices.context.base import Context
from recollect.choices.context.restrictions import Bilinear, Blocks, SinkWindow
from recollect.choices.context.similar import Similar
from recollect.choices.context.windows import Online, Prefix, Window
from recollect.wording import suggests

__all__ = ["Bilinear", "Blocks", "Context", "Online", "Prefix", "Similar", "SinkWindow", "Window"]

if not TYPE_CHECKING:
    __getattr__ = suggests(__name__, __all__)
