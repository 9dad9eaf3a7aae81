"""Published models whose recurrent layers recollect computes."""

from __future__ import annotations

import recollect.lm.adoption.builtin
import recollect.lm.adoption.own_caches  # noqa: F401
from recollect.lm.adoption.adopt import AdoptedLayerReport, AdoptionReport, adopt
from recollect.lm.adoption.family import Family, MemoryArguments, families, register_family

__all__ = [
    "AdoptedLayerReport",
    "AdoptionReport",
    "Family",
    "MemoryArguments",
    "adopt",
    "families",
    "register_family",
]
