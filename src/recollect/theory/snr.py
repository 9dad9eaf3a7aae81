"""Noise of a retrieval: AM section 2.1, equations 6 to 17.

A memory stores N + 1 pairs, and the query is one of their keys: o = c v_i + r, and
SNR⁻¹ = E ‖r‖²/(c² ‖v_i‖²). Keys and values are standard normal. The queried key and its value have
‖k_i‖² = K and ‖v_i‖² = V exactly, so that the closed forms are exact. N counts the *other* pairs.

For o = Σ_j v_j κ(k_j, k_i) (AM 10), with X ~ N(0, K) the product of the queried key with another:

    SNR⁻¹ = N E[κ(X)²]/κ(K)²

| kernel | κ(x) | SNR⁻¹ |
|---|---|---|
| linear | x | N/K |
| ReLU | max(x, 0) | N/2K |
| exp | exp(x/τ) | N exp(−2(τ−1)K/τ²) |
| SoLU | x exp(x/τ) | N (1 + 4K/τ²)/K · exp(−2(τ−1)K/τ²) |

The SoLU form printed as 5N/(K exp(2√K)) (AM 17) drops a factor e² at τ = √K and is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from recollect.messages import RecipeError
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.theory.helpers import apply_features, write_and_read

__all__ = [
    "KernelName",
    "Sampled",
    "averaged_inverse_snr",
    "inverse_snr",
    "kernel_inverse_snr",
    "measured_inverse_snr",
    "min_key_dim",
    "recipe_kernel",
    "truncation_order",
]

KernelName = Literal["linear", "relu", "exp", "solu"]
"""Kernels of AM section 2.2: κ(q, k) = s, max(s, 0), exp(s/τ) or s exp(s/τ), with s = q·k.

Examples:
    >>> from typing import get_args
    >>> get_args(rc.theory.KernelName)
    ('linear', 'relu', 'exp', 'solu')
"""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A mean over independent trials.

    Attributes:
        value: Mean.
        error: Standard error of the mean, from the spread of the trials.
        trials: Number of trials.

    Examples:
        >>> sampled = rc.theory.Sampled(value=0.52, error=0.01, trials=100)
        >>> sampled.is_within(0.5), sampled.is_within(0.6)
        (True, False)
    """

    value: float
    error: float
    trials: int

    def is_within(self, expected: float, *, errors: float = 5.0) -> bool:
        """Whether the mean is close to an expected value.

        Args:
            expected: Value to compare with the mean.
            errors: Maximum difference in standard errors.
        """
        return abs(self.value - expected) <= errors * self.error


def inverse_snr(
    kernel: KernelName, *, num_distractors: float, size: int, temperature: float | None = None
) -> float:
    """Return the closed form of a kernel, from the table above.

    Args:
        kernel: Name of κ.
        num_distractors: N, the number of other pairs.
        size: K.
        temperature: τ > 0 of ``"exp"`` and ``"solu"``; ``None`` is √K. (τ − 1)/τ² is largest at
            τ = 2, the most precise temperature. Below τ = 1 noise grows with K. (AM only requires
            τ > 1.)

    Raises:
        ValueError: A number is out of range, or the kernel is unknown.

    Examples:
        >>> rc.theory.inverse_snr("linear", num_distractors=32, size=64)
        0.5
        >>> rc.theory.inverse_snr("exp", num_distractors=32, size=64) < 1e-4
        True
    """
    if kernel not in get_args(KernelName):
        raise ValueError(f"inverse_snr: kernel must be one of {get_args(KernelName)}, not {kernel}")
    if num_distractors < 0 or size < 1:
        raise ValueError(
            f"inverse_snr: num_distractors ≥ 0 and size ≥ 1, got {num_distractors} and {size}"
        )
    tau = math.sqrt(size) if temperature is None else temperature
    if tau <= 0:
        raise ValueError(f"inverse_snr: temperature must be above 0, got {tau}")
    if kernel == "linear":
        return num_distractors / size
    if kernel == "relu":
        return num_distractors / (2 * size)
    noise = num_distractors * math.exp(-2 * (tau - 1) * size / tau**2)
    return noise if kernel == "exp" else noise * (1 + 4 * size / tau**2) / size


def min_key_dim(
    kernel: KernelName, *, num_distractors: float, level: float, temperature: float | None = None
) -> float:
    """Return the K with an SNR⁻¹ of ``level``: N/level for linear, O(log² N) for exp at τ = √K.

    At τ = √K the exponent is 2(√K − 1), so K = (1 + ½ log(N/level))². With a fixed τ > 1 it is
    τ² log(N/level)/(2(τ − 1)).

    Args:
        kernel: ``"linear"``, ``"relu"`` or ``"exp"``.
        num_distractors: N, the number of other pairs.
        level: SNR⁻¹ to reach, > 0.
        temperature: τ; ``None`` is √K.

    Raises:
        ValueError: The kernel is SoLU, which has no closed form, or τ ≤ 1, for which no K exists.

    Examples:
        >>> rc.theory.min_key_dim("linear", num_distractors=64, level=0.5)
        128.0
    """
    ratio = num_distractors / level
    if kernel in ("linear", "relu"):
        return ratio / (1 if kernel == "linear" else 2)
    if kernel != "exp":
        raise ValueError(f"min_key_dim: no closed form for {kernel!r}; search with inverse_snr")
    if temperature is None:
        return (1 + max(0.0, math.log(ratio)) / 2) ** 2
    if temperature <= 1:
        raise ValueError(f"min_key_dim: temperature must be above 1, got {temperature}")
    return max(0.0, math.log(ratio)) * temperature**2 / (2 * (temperature - 1))


def averaged_inverse_snr(
    kernel: KernelName,
    *,
    num_distractors: float,
    size: int,
    heads: int,
    sliced: bool = True,
    temperature: float | None = None,
) -> float:
    """Return SNR⁻¹ of the mean output of ``heads`` heads with independent keys and shared values.

        SNR⁻¹ = N (E[κ²] + (h − 1) E[κ]²) / (h κ(K)²)

    The noises of a kernel of mean 0 are independent, and averaging reduces them to 1/h (AM, note
    7). Other kernels have an equal positive mean in every head, which averaging does not reduce:
    exp at τ = √K reaches 1/e of one head's SNR⁻¹ at best. Heads that are slices of keys of size K
    have K/h channels each. Then a linear kernel gains nothing, N/(K/h)/h = N/K, and the exponential
    kernel loses nearly all of its precision.

    Args:
        kernel: ``"linear"``, ``"relu"``, ``"exp"`` or ``"solu"``.
        num_distractors: N, the number of other pairs.
        size: K, the number of channels of all heads together if ``sliced``, else of each head.
        heads: h; a divisor of ``size`` if ``sliced``.
        sliced: Whether heads share K channels or have K channels each.
        temperature: τ of one head; ``None`` is the square root of the head's size.

    Raises:
        ValueError: The number of heads does not divide the size.

    Examples:
        >>> rc.theory.averaged_inverse_snr("linear", num_distractors=32, size=64, heads=4)
        0.5
        >>> rc.theory.averaged_inverse_snr(
        ...     "linear", num_distractors=32, size=64, heads=4, sliced=False
        ... )
        0.125
    """
    if heads < 1 or (sliced and size % heads):
        raise ValueError(f"averaged_inverse_snr: {heads} heads do not divide a size of {size}")
    dim = size // heads if sliced else size
    single = inverse_snr(kernel, num_distractors=num_distractors, size=dim, temperature=temperature)
    return single * (1 + (heads - 1) * _squared_mean_ratio(kernel, dim, temperature)) / heads


def _squared_mean_ratio(kernel: KernelName, size: int, temperature: float | None) -> float:
    """Return E[κ]²/E[κ²] of a product X ~ N(0, K)."""
    if kernel == "linear":
        return 0.0
    if kernel == "relu":
        return 1 / math.pi  # (K/2π)/(K/2)
    tau = math.sqrt(size) if temperature is None else temperature
    spread = size / tau**2
    if kernel == "exp":
        return math.exp(-spread)
    return spread / (1 + 4 * spread) * math.exp(-spread)  # E[κ] = (K/τ) exp(K/2τ²)


def kernel_inverse_snr(
    kappa: Callable[[Tensor], Tensor],
    *,
    num_distractors: float,
    size: int,
    generator: torch.Generator,
    trials: int = 100_000,
) -> Sampled:
    """Sample AM 10 for any kernel that is a function of the product.

    Args:
        kappa: Function of a tensor of products q·k.
        num_distractors, size: N and K.
        generator: Source of randomness.
        trials: Number of products to draw.

    Examples:
        >>> sampled = rc.theory.kernel_inverse_snr(
        ...     lambda x: x, num_distractors=8, size=16, generator=torch.Generator().manual_seed(0)
        ... )
        >>> sampled.is_within(rc.theory.inverse_snr("linear", num_distractors=8, size=16))
        True
    """
    x = torch.randn(trials, generator=generator, dtype=torch.float64) * math.sqrt(size)
    peak = float(kappa(torch.tensor([float(size)], dtype=torch.float64)).square())
    ratios: Tensor = num_distractors * kappa(x).square() / peak
    return Sampled(
        value=float(ratios.mean()),
        error=float(ratios.std()) / math.sqrt(trials),
        trials=trials,
    )


def measured_inverse_snr(
    recipe: RecipeLike,
    *,
    num_distractors: int,
    K: int,
    V: int,
    generator: torch.Generator,
    trials: int = 256,
    gates: Mapping[str, float] | None = None,
) -> Sampled:
    """Measure SNR⁻¹ of any recipe by Monte Carlo: store N + 1 pairs, query a random one of them.

    The signal's factor c is the mean of ⟨o, v_i⟩/‖v_i‖² over all trials. The error is the standard
    error of the ratio, to first order in the spreads of noise and factor.

    Args:
        recipe: Any recipe; its gates are constant over tokens.
        num_distractors: N.
        K, V: Sizes of keys and values.
        generator: Source of randomness.
        trials: Number of memories; each stores other pairs.
        gates: Values of gates by name; other gates have a layer's initial values.

    Cost: ``trials`` sequences of N + 1 tokens.

    Raises:
        RecipeError: A value has the name of no gate of the recipe.

    Examples:
        >>> recipe = rc.zoo.get("linear_attention").recipe
        >>> sampled = rc.theory.measured_inverse_snr(
        ...     recipe, num_distractors=8, K=16, V=16, generator=torch.Generator().manual_seed(0)
        ... )
        >>> sampled.is_within(rc.theory.inverse_snr("linear", num_distractors=8, size=16))
        True
    """
    recipe = as_recipe(recipe, "measured_inverse_snr")

    def normal(size: int) -> Tensor:
        return torch.randn(
            trials, num_distractors + 1, size, generator=generator, dtype=torch.float64
        )

    k, v = normal(K), normal(V)
    queried = (
        torch.arange(trials),
        torch.randint(num_distractors + 1, (trials,), generator=generator),
    )
    for x in (k, v):
        x[queried] *= x.shape[-1] ** 0.5 / x[queried].norm(dim=-1, keepdim=True)
    with torch.no_grad():
        o = write_and_read(recipe, k[queried][:, None], k, v, gates=gates)[:, 0]
    value = v[queried]
    factor = (o * value).sum(-1) / V
    c = factor.mean()
    noise = (o - c * value).square().sum(-1) / V
    # d(noise/c²) = d noise/c² − 2 noise dc/c³; at the mean factor, noise is stationary in c.
    influence = (noise - noise.mean()) / c**2 - 2 * noise.mean() / c**3 * (factor - c)
    return Sampled(
        value=float(noise.mean() / c**2),
        error=float(influence.std()) / math.sqrt(trials),
        trials=trials,
    )


def recipe_kernel(recipe: RecipeLike, K: int) -> tuple[KernelName, float | None] | None:
    """Return the kernel of a recipe and its temperature, or ``None`` if no closed form applies.

    The memory must be the sum of v_j κ(k_j, ·) with equal weights: a matrix, the dot-product bias,
    no decay, no denominator. The kernel is recognised by its values, not by its name.

    Args:
        recipe: Any recipe.
        K: Size of keys, ≥ 2.

    Examples:
        >>> rc.theory.recipe_kernel(rc.Recipe(bias=rc.bias.DotProduct()), 8)
        ('linear', None)
    """
    recipe = as_recipe(recipe, "recipe_kernel")
    plain = (
        not recipe.nonparametric
        and recipe.memory.linear
        and not recipe.memory.is_elementwise
        and recipe.memory.read.plain
        and not recipe.step_sees_prediction
        and recipe.bias.probe is None
        and recipe.context.horizon == 1
        and recipe.retention.decay is None
        and recipe.retention.is_plain
        and not recipe.algorithm.slots
        and not recipe.algorithm.rate_depends_on_key
    )
    if not plain or recipe.features.params() or recipe.features.gates():
        return None
    q = torch.zeros(1, K, dtype=torch.float64)
    q[0, 0] = 1.0
    products = torch.tensor([-2.0, -0.5, 0.25, 1.0, 3.0], dtype=torch.float64)
    k = torch.zeros(len(products), K, dtype=torch.float64)
    k[:, 0], k[:, 1] = products, 1.5  # the kernel may not depend on the length
    try:
        if recipe.features.finite:
            kappa_x = (
                apply_features(recipe, q, {}, "query") @ apply_features(recipe, k, {}, "key").T
            )[0]
        else:
            kappa_x = recipe.features.kappa(q, k)[0]
    except (RecipeError, NotImplementedError):
        return None
    x = products
    if torch.allclose(kappa_x, x):
        return "linear", None
    if torch.allclose(kappa_x, x.clamp_min(0)):
        return "relu", None
    if bool((kappa_x > 0).all()) and torch.allclose(kappa_x.log() / x, kappa_x.log()[3].expand(5)):
        return "exp", float(1 / kappa_x.log()[3])
    ratio = kappa_x / x
    if bool((ratio > 0).all()) and torch.allclose(ratio.log() / x, ratio.log()[3].expand(5)):
        return "solu", float(1 / ratio.log()[3])
    return None


def truncation_order(largest: float, tolerance: float) -> int:
    """Return the order at which the series of exp is as precise as exp: AM 11 and its note 5.

    The order is the smallest m with |exp(x) − Σ_{i≤m} xⁱ/i!| ≤ tolerance · exp(x) for all
    0 ≤ x ≤ ``largest``. Products q·k/√K of standard normal vectors are x ~ N(0, 1). At the rounding
    error of bfloat16, 2⁻⁸, two standard deviations need order 7 and three order 8, at which AM
    measured no further gain.

    Args:
        largest: Largest x, ≥ 0.
        tolerance: Relative error, > 0.

    Raises:
        ValueError: The tolerance is not above 0, or the range is negative.

    Examples:
        >>> rc.theory.truncation_order(2.0, 2**-8), rc.theory.truncation_order(3.0, 2**-8)
        (7, 8)
    """
    if tolerance <= 0 or largest < 0:
        raise ValueError(
            f"truncation_order: largest ≥ 0 and tolerance > 0, got {largest} and {tolerance}"
        )
    # exp(−x) Σ_{i>m} xⁱ/i! is the probability that a Poisson variable exceeds m; it grows with x.
    term = math.exp(-largest)
    remainder, order = 1.0 - term, 0
    while remainder > tolerance:
        order += 1
        term *= largest / order
        remainder -= term
    return order
