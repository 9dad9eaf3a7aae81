"""Memory: what function stores the associations, and how it is read."""

from recollect.choices.memory.maps import (
    MLP,
    GatedMLP,
    LinearMap,
    LocalConstant,
    LocalPolynomial,
    Matrix,
    Memory,
    Module,
    Read,
    Stack,
    Vector,
    module_factory,
)

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
