"""Memories: functions that store associations, and how they are read.

A finite memory defines the shapes of its weights and a `forward`. Memories of linear maps extend
`Stack` and define a program over ``apply(l, h)``. Engines for linear maps run any such program.

Examples:
    >>> rc.memory.Matrix().shapes(4, 3)
    ((3, 4),)
    >>> rc.memory.MLP(depth=2, expansion=2).shapes(4, 4)
    ((8, 4), (4, 8))
"""

from recollect.choices.memory.base import LinearMap, Memory, Read, Stack
from recollect.choices.memory.local import LocalConstant, LocalPolynomial
from recollect.choices.memory.maps import MLP, GatedMLP, Matrix, Vector
from recollect.choices.memory.module import Module, module_factory

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
