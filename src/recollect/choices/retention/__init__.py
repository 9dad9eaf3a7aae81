"""Retention: what keeps the memory near its past and bounded.

A retention is a decay α and, for most members, a mirror map ``link`` from the dual state A to the
weights W that are read. Members that rebuild A from W override ``advance``.

Examples:
    >>> [gate.name for gate in rc.retention.Decay().gates()]
    ['log_decay']
    >>> rc.retention.Lq(q=4).linked, rc.retention.Keep().linked
    (True, False)
"""

from typing import TYPE_CHECKING

from recollect.choices.retention.base import Decay, Keep, Retention
from recollect.choices.retention.divergence import FDivergence
from recollect.choices.retention.links import Ball, Bregman, ElasticNet, Lq, Simplex
from recollect.wording import suggests

__all__ = [
    "Ball",
    "Bregman",
    "Decay",
    "ElasticNet",
    "FDivergence",
    "Keep",
    "Lq",
    "Retention",
    "Simplex",
]

if not TYPE_CHECKING:
    __getattr__ = suggests(__name__, __all__)
