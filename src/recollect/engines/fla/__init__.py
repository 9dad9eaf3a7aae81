"""Operators of flash-linear-attention in place of an engine's own products, on CUDA.

`structure` says what of a recipe they ask, `operators` is the table, `choose` says whether a call
is taken, and `calls` runs it. The package is imported when the first call is taken.
"""

from recollect.engines.fla.calls import packs, run, token
from recollect.engines.fla.choose import DEVICES, Offer, offer
from recollect.engines.fla.operators import PACKAGE

__all__ = ["DEVICES", "PACKAGE", "Offer", "offer", "packs", "run", "token"]
