"""Algorithm: how the objective is minimised, one step per token.

The gradient g_t comes from the bias and the context; the algorithm turns it into the step that is
added to the decayed memory, and keeps what it needs (momentum, moments) in named slots.

Examples:
    >>> recipe = rc.Recipe(algorithm=rc.algorithm.Momentum(lr=0.5))
    >>> [gate.name for gate in recipe.gates()]
    ['momentum']
"""

from typing import TYPE_CHECKING

from recollect.choices.algorithm.base import Algorithm, Inverse, Step
from recollect.choices.algorithm.closed_form import (
    Analytic,
    LeastSquares,
    Preconditioned,
    smallest_ridge,
)
from recollect.choices.algorithm.descent import GradientDescent, Implicit, Momentum, Normalized
from recollect.choices.algorithm.elementwise import Adam, RMSProp
from recollect.choices.algorithm.muon import Muon, newton_schulz
from recollect.wording import suggests

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

if not TYPE_CHECKING:
    __getattr__ = suggests(__name__, __all__)
