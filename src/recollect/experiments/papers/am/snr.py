"""Retrieval noise: AM section 2.1, nothing trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.features.base import Kernel
from recollect.choices.features.finite import Identity
from recollect.choices.features.kernels import Exponential, ReluKernel, Solu
from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Results,
    Values,
    Verdict,
    at_most,
    decreasing,
    for_each,
    increasing,
    plot_panels,
    special,
    verdict,
)
from recollect.recipe.recipe import Recipe
from recollect.theory.snr import (
    inverse_snr,
    kernel_inverse_snr,
    measured_inverse_snr,
    min_key_dim,
    truncation_order,
)

__all__ = ["SNR"]

KERNELS = ("linear", "relu", "exp", "solu")


def _kernel(name: str, tau: float) -> Kernel | Identity:
    return {
        "linear": Identity(),  # the key itself: needs no list of associations
        "relu": ReluKernel(),
        "exp": Exponential(temperature=tau),
        "solu": Solu(temperature=tau),
    }[name]


def _function(name: str, tau: float) -> Callable[[Tensor], Tensor]:
    """Return κ as a function of the product."""
    return {
        "linear": lambda x: x,
        "relu": lambda x: x.clamp_min(0),
        "exp": lambda x: (x / tau).exp(),
        "solu": lambda x: x * (x / tau).exp(),
    }[name]


def _cells(config: Config) -> list[Cell]:
    both = ("linear", "exp")
    axes: list[tuple[str, tuple[str, ...], list[float]]] = [
        ("N", KERNELS, config["Ns"]),
        ("d", KERNELS, config["ds"]),
        ("τ", ("exp",), config["taus"]),
        ("τ", ("solu",), [tau for tau in config["taus"] if tau >= 2]),
        ("needed d", both, config["needed"]),
        ("heads", both, config["heads"]),
        ("order", ("exp",), [2.0, 3.0]),
    ]
    return [
        {"axis": axis, "kernel": kernel, "at": x}
        for axis, kernels, values in axes
        for kernel in kernels
        for x in values
    ]


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    axis, kernel, at = cell["axis"], cell["kernel"], float(cell["at"])
    generator = torch.Generator().manual_seed(1000 * seed + round(100 * at))
    N, d, draws = config["N"], config["d"], config["draws"]
    if axis == "order":
        return {"order": float(truncation_order(at, 2.0**-8))}
    if axis == "needed d":
        return _needed_dim(kernel, round(at), generator, draws)
    if axis == "heads":
        return _noise_of_mean(kernel, N, d, round(at), generator, draws)
    if axis == "τ":
        # Products alone: at low temperatures whole memories would need millions of draws.
        d, tau = config["d of τ"], at
        noise = kernel_inverse_snr(
            _function(kernel, tau), num_distractors=N, size=d, generator=generator, trials=draws
        )
    else:
        N, d = (round(at), d) if axis == "N" else (N, round(at))
        tau = 2 * math.sqrt(d)
        recipe = Recipe(
            features=_kernel(kernel, tau), bias=DotProduct(), algorithm=GradientDescent(lr=1.0)
        )
        noise = measured_inverse_snr(
            recipe, num_distractors=N, K=d, V=d, generator=generator, trials=config["trials"]
        )
    theory = inverse_snr(kernel, num_distractors=N, size=d, temperature=tau)
    errors = abs(noise.value - theory) / noise.error
    return {"SNR⁻¹": noise.value, "theory": theory, "standard errors apart": errors}


def _needed_dim(kernel: Any, others: int, generator: torch.Generator, draws: int) -> Values:
    """Return the least d at which sampled noise is at most as large as the signal."""
    formula = min_key_dim(kernel, num_distractors=others, level=1.0)
    low, high = 0, 2 * math.ceil(formula) + 2  # noise falls with d
    while high - low > 1:
        size = (low + high) // 2
        kappa = _function(kernel, math.sqrt(size))
        noise = kernel_inverse_snr(
            kappa, num_distractors=others, size=size, generator=generator, trials=draws
        )
        low, high = (size, high) if noise.value > 1.0 else (low, size)
    return {"d": float(high), "formula": formula}


def _noise_of_mean(
    kernel: str, others: int, d: int, heads: int, generator: torch.Generator, draws: int
) -> Values:
    """Return SNR⁻¹ of the mean over heads with separate keys of d channels and common values."""
    kappa = _function(kernel, math.sqrt(d))
    x = torch.randn(draws // heads, heads, generator=generator, dtype=torch.float64) * math.sqrt(d)
    peak = float(kappa(torch.tensor(float(d), dtype=torch.float64))) ** 2
    return {"SNR⁻¹": others * float(kappa(x).mean(1).square().mean()) / peak}


def _needs_log_squared(results: Results) -> Verdict:
    parts, conditions = [], []
    for n in results.axis_values("at", axis="needed d", kernel="exp"):
        cell = {"axis": "needed d", "at": n}
        size, formula = (results.mean(name, kernel="exp", **cell) for name in ("d", "formula"))
        linear = results.mean("d", kernel="linear", **cell)
        conditions.append(abs(size - formula) <= 1.5 and linear > size)
        parts.append(f"N = {n}: {size:.1f} (formula {formula:.1f}; linear {linear:.0f})")
    return verdict(bool(parts) and all(conditions), f"Least d for SNR⁻¹ = 1: {'; '.join(parts)}.")


def _noise_panel(axis: str, title: str, x: str, *, log_x: bool = True) -> Lines:
    """Return a panel of measured noise above the closed forms of all kernels."""
    theory = Lines(
        y="theory", x="at", by={"kernel": KERNELS[::-1]}, name="closed form", style=6, band=False
    )
    return Lines(
        y="SNR⁻¹",
        x="at",
        by="kernel",
        style_order=KERNELS,
        underlays=[theory],
        panel_title=title,
        panel_x=x,
        y_label="SNR⁻¹",
        log_x=log_x,
        log_y=True,
        cell={"axis": axis},
    )


ERRORS = {"standard errors apart": "difference from the closed form in standard errors"}
NOISE_OF_MEAN = {"SNR⁻¹": "SNR⁻¹ of the mean over heads"}
ORDER = {"order": "order with a relative error of 2⁻⁸ (bfloat16)"}
SMALL = {
    "seeds": 3, "N": 64, "d": 16, "Ns": [16, 32, 64, 128, 256], "trials": 200,
    "ds": [4, 8, 16, 32], "taus": [1.5, 1.75, 2.0, 3.0, 4.0, 6.0, 8.0], "d of τ": 4,
    "needed": [16, 64, 256, 1024], "heads": [1, 2, 4, 8], "draws": 1_000_000,
}  # fmt: skip

SNR = Experiment(
    name="am-snr",
    title="Retrieval signal-to-noise of four kernels",
    source="AM section 2.1, eqs. 6–17",
    protocol=(
        "Keys and values are normal draws; Σ v κ(k, ·) stores N + 1 pairs, and the query is the "
        "key of one, whose key and value have length √d exactly. SNR⁻¹ = E‖r‖²/(c²‖v‖²). Against "
        "N and d `recollect.recall` writes whole memories with τ = 2√d (at √d the exponential's "
        "tail is so heavy that the spread of a few hundred trials does not estimate the error); "
        "against τ eq. 10 is sampled. Closed forms: N/d, N/2d, N exp(−2(τ−1)d/τ²) and N(1 + "
        "4d/τ²)/d exp(−2(τ−1)d/τ²). Also the least d at which SNR⁻¹ is 1 at τ = √d, the order at "
        "which the series of exp is as good as exp in bfloat16 for products of 2 and 3 standard "
        "deviations, and the noise of the mean over heads with separate keys."
    ),
    claims=(
        Claim(
            name="closed forms",
            text="SNR⁻¹ is N/d, N/2d, N exp(−2(τ−1)d/τ²) and so on.",
            rule=for_each(
                "axis",
                at_most(ERRORS, 5.0, statistic="max"),
                values=("N", "d", "τ"),
            ),
        ),
        Claim(
            name="d = O(log² N)",
            text="The exponential kernel needs d = O(log² N) where the linear one needs d ∝ N.",
            rule=special(
                "For every N the least d of the exponential kernel is within 1.5 of "
                "(1 + ½ log N)² and below the linear kernel's.",
                _needs_log_squared,
            ),
        ),
        Claim(
            name="temperature",
            text="A lower temperature (τ > 1) is more precise.",
            rule=increasing("SNR⁻¹", along={"at": "temperature τ"}, axis="τ", kernel="exp"),
        ),
        Claim(
            name="truncation",
            text="Low-precision arithmetic sees the series of exp end at order 7 or 8.",
            rule=at_most(ORDER, 8, statistic="max", axis="order"),
        ),
        Claim(
            name="heads",
            text="Averaging over heads lowers the noise.",
            rule=for_each("kernel", decreasing(NOISE_OF_MEAN, along={"at": "heads"}), axis="heads"),
        ),
    ),
    configs={
        "smoke": {
            **SMALL, "seeds": 1, "N": 32, "Ns": [16], "ds": [8, 16], "taus": [1.5, 2.0, 4.0],
            "needed": [16], "heads": [1, 4], "draws": 200_000,
        },
        "small": SMALL,
        "paper": {
            **SMALL, "N": 128, "d": 64, "Ns": [16, 64, 256, 1024, 4096], "trials": 4096,
            "ds": [8, 16, 32, 64, 128], "needed": [16, 64, 256, 1024, 4096],
            "heads": [1, 2, 4, 8, 16], "draws": 20_000_000,
        },
    },
    cells=_cells,
    measure=_measure,
    figure=plot_panels(
        _noise_panel("N", "d = {d}, τ = 2√d", "N, other pairs stored"),
        _noise_panel("d", "N = {N}, τ = 2√d", "d, size of keys"),
        _noise_panel("τ", "N = {N}, d = {d of τ}", "temperature τ", log_x=False),
        Lines(
            y="d",
            x="at",
            by="kernel",
            style_order=KERNELS,
            band=False,
            underlays=[
                Lines(
                    y="formula", x="at", name="closed form", style=6, band=False,
                    cell={"kernel": "exp"},
                )
            ],
            panel_title="d for SNR⁻¹ = 1",
            panel_x="N, other pairs stored",
            y_label="d, size of keys",
            log_x=True,
            log_y=True,
            cell={"axis": "needed d"},
        ),
        title="Retrieval noise: Monte Carlo against closed forms",
        height=2.7,
    ),
    notes=(
        "The temperature claim is true above τ = 2 only. The exponent of eq. 13, (τ − 1)/τ², is "
        "largest at 2, so between 1 and 2 a higher temperature is more precise."
    ),
)  # fmt: skip
