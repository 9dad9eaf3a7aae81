"""Retention: what keeps the memory near its past and bounded."""

from recollect.choices.retention.links import (
    Ball,
    Bregman,
    Decay,
    ElasticNet,
    FDivergence,
    Keep,
    Lq,
    Retention,
    Simplex,
)

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
