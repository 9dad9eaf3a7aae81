"""Algorithm: how the objective is minimised, one step per token."""

from recollect.choices.algorithm.descent import (
    Adam,
    Algorithm,
    Analytic,
    GradientDescent,
    Implicit,
    Inverse,
    LeastSquares,
    Momentum,
    Muon,
    Normalized,
    Preconditioned,
    RMSProp,
    Step,
    newton_schulz,
    smallest_ridge,
)

__all__ = [
    "Adam",
    "Algorithm",
    "Analytic",
    "GradientDescent",
    "Implicit",
    "Inverse",
    "LeastSquares",
    "Momentum",
    "Muon",
    "Normalized",
    "Preconditioned",
    "RMSProp",
    "Step",
    "newton_schulz",
    "smallest_ridge",
]
