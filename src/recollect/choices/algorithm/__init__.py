"""Algorithm: how the objective is minimised, one step per token.

The gradient g_t comes from the bias and the context. The algorithm returns the step that is added
to the decayed memory, and stores its own state (momentum, moments) in named slots.

Examples:
    >>> recipe = rc.Recipe(algorithm=rc.algorithm.Momentum(lr=0.5))
    >>> [gate.name for gate in recipe.gates()]
    ['momentum']
"""

from recollect.choices.algorithm.base import Algorithm, Inverse, Step
from recollect.choices.algorithm.closed_form import (
    Analytic,
    LeastSquares,
    Preconditioned,
    smallest_ridge,
)
from recollect.choices.algorithm.descent import NLMS, Flow, GradientDescent, Implicit, Momentum
from recollect.choices.algorithm.elementwise import Adam, RMSProp
from recollect.choices.algorithm.muon import Muon, newton_schulz

__all__ = [
    "NLMS",
    "Adam",
    "Algorithm",
    "Analytic",
    "Flow",
    "GradientDescent",
    "Implicit",
    "Inverse",
    "LeastSquares",
    "Momentum",
    "Muon",
    "Preconditioned",
    "RMSProp",
    "Step",
    "newton_schulz",
    "smallest_ridge",
]
