"""Retentions: how a memory stays near its past and bounded.

A retention is a decay α and, for most members, a mirror map ``link`` from the dual state A to the
weights W. Members that rebuild A from W override ``advance``.

Examples:
    >>> [gate.name for gate in rc.retention.Decay().gates()]
    ['log_decay']
    >>> rc.retention.Lq(q=4).has_link, rc.retention.Keep().has_link
    (True, False)
"""

from recollect.choices.retention.base import Decay, Keep, Retention
from recollect.choices.retention.divergence import FDivergence
from recollect.choices.retention.links import Ball, Bregman, ElasticNet, Lq, Simplex
from recollect.choices.retention.row_norm import RowNorm

__all__ = [
    "Ball",
    "Bregman",
    "Decay",
    "ElasticNet",
    "FDivergence",
    "Keep",
    "Lq",
    "Retention",
    "RowNorm",
    "Simplex",
]
