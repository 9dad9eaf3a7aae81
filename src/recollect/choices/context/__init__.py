"""Context: which associations count at time t, and how much."""

from recollect.choices.context.windows import (
    Bilinear,
    Blocks,
    Context,
    Online,
    Prefix,
    Similar,
    Window,
)

__all__ = ["Bilinear", "Blocks", "Context", "Online", "Prefix", "Similar", "Window"]
