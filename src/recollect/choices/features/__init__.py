"""Features of keys and queries, which are the inputs of the memory.

A finite map defines ``dim`` and ``phi``; an infinite one (a *kernel*) defines ``kappa`` only.

Examples:
    >>> rc.features.Taylor(order=2).dim(4)
    15
    >>> rc.features.Exponential().finite
    False
"""

from recollect.choices.features.base import Features, Kernel
from recollect.choices.features.finite import EluPlusOne, Identity, Polynomial, Relu, Silu, Taylor
from recollect.choices.features.kernels import (
    Exponential,
    Gaussian,
    LinearKernel,
    ReluKernel,
    Round,
    Solu,
    SwishKernel,
)
from recollect.choices.features.learned import (
    Cosine,
    Dpfp,
    GatedUnits,
    Hedgehog,
    LearnedRelu,
    Quadratic,
)
from recollect.choices.features.product_keys import ProductKeys
from recollect.choices.features.random import (
    FrequencyDomain,
    PolynomialSketch,
    PositiveRandom,
    RandomFourier,
)

__all__ = [
    "Cosine",
    "Dpfp",
    "EluPlusOne",
    "Exponential",
    "Features",
    "FrequencyDomain",
    "GatedUnits",
    "Gaussian",
    "Hedgehog",
    "Identity",
    "Kernel",
    "LearnedRelu",
    "LinearKernel",
    "Polynomial",
    "PolynomialSketch",
    "PositiveRandom",
    "ProductKeys",
    "Quadratic",
    "RandomFourier",
    "Relu",
    "ReluKernel",
    "Round",
    "Silu",
    "Solu",
    "SwishKernel",
    "Taylor",
]
