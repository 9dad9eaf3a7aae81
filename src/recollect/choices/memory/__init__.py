"""Memory: what function stores the associations, and how it is read.

A finite memory answers its weights' shapes and a `forward`. Memories made of linear maps extend
`Stack` and state a program over `apply(l, h)`; engines that know linear maps run any such program.

Examples:
    >>> rc.memory.Matrix().shapes(4, 3)
    ((3, 4),)
    >>> rc.memory.MLP(depth=2, expansion=2).shapes(4, 4)
    ((8, 4), (4, 8))
"""

from typing import TYPE_CHECKING

from recollect.choices.memory.base import LinearMap, Memory, Read, Stack
from recollect.choices.memory.local import LocalConstant, LocalPolynomial
from recollect.choices.memory.maps import MLP, GatedMLP, Matrix, Vector
from recollect.choices.memory.module import Module, module_factory
from recollect.wording import suggests

__all__ = [
    "MLP",
    "GatedMLP",
    "LinearMap",
    "LocalConstant",
    "LocalPolynomial",
    "Matrix",
    "Memory",
    "Module",
    "Read",
    "Stack",
    "Vector",
    "module_factory",
]

if not TYPE_CHECKING:
    __getattr__ = suggests(__name__, __all__)
