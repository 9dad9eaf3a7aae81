"""Operators of flash-linear-attention in place of an engine's products, on CUDA.

`structure` extracts the structure of a recipe, `operators` is the table of operators, `choose`
selects the operator of a call, and `calls` runs it. The first such call imports the package.
"""

from recollect.engines.fla.calls import run, supports_cu_seqlens, token
from recollect.engines.fla.choose import DEVICES, Offer, offer
from recollect.engines.fla.operators import PACKAGE

__all__ = ["DEVICES", "PACKAGE", "Offer", "offer", "run", "supports_cu_seqlens", "token"]
