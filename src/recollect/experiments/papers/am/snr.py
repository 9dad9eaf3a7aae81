"""Retrieval noise: AM section 2.1, nothing trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.features.base import Kernel
from recollect.choices.features.finite import Identity
from recollect.choices.features.kernels import Exponential, ReluKernel, Solu
from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.recipe.recipe import Recipe
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.theory.snr import inverse_snr, kernel_inverse_snr, measured_inverse_snr, needed_size

__all__ = ["EXPERIMENTS"]

KERNELS = ("linear", "relu", "exp", "solu")


def _kernel(name: str, tau: float | None) -> Kernel:
    return {
        "relu": ReluKernel(),
        "exp": Exponential(temperature=tau),
        "solu": Solu(temperature=tau),
    }[name]


def _function(name: str, tau: float) -> Callable[[Tensor], Tensor]:
    """κ as a function of the product."""
    return {
        "linear": lambda x: x,
        "relu": lambda x: x.clamp_min(0),
        "exp": lambda x: (x / tau).exp(),
        "solu": lambda x: x * (x / tau).exp(),
    }[name]


def _snr_cells(config: Config) -> list[Cell]:
    cells: list[Cell] = [
        {"axis": "N", "kernel": kernel, "at": n} for kernel in KERNELS for n in config["Ns"]
    ]
    cells += [{"axis": "d", "kernel": kernel, "at": d} for kernel in KERNELS for d in config["ds"]]
    cells += [
        {"axis": "τ", "kernel": kernel, "at": tau}
        for kernel in ("exp", "solu")
        for tau in config["taus"]
        if kernel == "exp" or tau >= 2
    ]
    cells += [
        {"axis": "needed d", "kernel": kernel, "at": n}
        for kernel in ("linear", "exp")
        for n in config["needed"]
    ]
    cells += [
        {"axis": "heads", "kernel": kernel, "at": h}
        for kernel in ("linear", "exp")
        for h in config["heads"]
    ]
    cells += [{"axis": "order", "kernel": "exp", "at": s} for s in (2.0, 3.0)]
    return cells


def _snr_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    axis, kernel, at = str(cell["axis"]), str(cell["kernel"]), float(cell["at"])
    generator = torch.Generator().manual_seed(1000 * seed + round(100 * at))
    N, d = config["N"], config["d"]
    if axis == "order":
        return {"order": float(_order(at, 2.0**-8))}
    if axis == "needed d":
        return _needed(kernel, round(at), generator, config["draws"])
    if axis == "heads":
        return _averaged(kernel, N, d, round(at), generator, config["draws"])
    if axis == "τ":
        # Products alone: at low temperatures whole memories would have to be drawn by the million.
        d = config["d of τ"]
        found = kernel_inverse_snr(
            _function(kernel, at), others=N, size=d, generator=generator, trials=config["draws"]
        )
        theory = inverse_snr(kernel, others=N, size=d, temperature=at)  # type: ignore[arg-type]
    else:
        N, d = (round(at), d) if axis == "N" else (N, round(at))
        # The linear kernel's feature is the key itself, and needs no list of associations.
        tau = 2 * math.sqrt(d)
        features = Identity() if kernel == "linear" else _kernel(kernel, tau)
        recipe = Recipe(features=features, bias=DotProduct(), algorithm=GradientDescent(lr=1.0))
        found = measured_inverse_snr(
            recipe, others=N, K=d, V=d, generator=generator, trials=config["trials"]
        )
        theory = inverse_snr(kernel, others=N, size=d, temperature=tau)  # type: ignore[arg-type]
    return {
        "SNR⁻¹": found.value,
        "theory": theory,
        "standard errors apart": abs(found.value - theory) / found.error,
    }


def _order(deviations: float, tolerance: float) -> int:
    """The least order whose series of exp has that relative error on [0, deviations]."""
    x = torch.linspace(0, deviations, 257, dtype=torch.float64)
    total, term, order = torch.ones_like(x), torch.ones_like(x), 0
    while float(((x.exp() - total) / x.exp()).max()) > tolerance:
        order += 1
        term = term * x / order
        total = total + term
    return order


def _needed(kernel: str, others: int, generator: torch.Generator, draws: int) -> Values:
    """The least d at which sampled noise is as large as the signal."""
    formula = needed_size(kernel, others=others, level=1.0)  # type: ignore[arg-type]

    def noisy(size: int) -> bool:
        kappa = _function(kernel, math.sqrt(size))
        return (
            kernel_inverse_snr(
                kappa, others=others, size=size, generator=generator, trials=draws
            ).value
            > 1.0
        )

    low, high = 0, 2 * math.ceil(formula) + 2  # noise falls with d
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if noisy(middle) else (low, middle)
    return {"d": float(high), "formula": formula}


def _averaged(
    kernel: str, others: int, d: int, heads: int, generator: torch.Generator, draws: int
) -> Values:
    """SNR⁻¹ of the mean over heads with keys of their own, d channels each, and shared values."""
    kappa = _function(kernel, math.sqrt(d))
    x = torch.randn(draws // heads, heads, generator=generator, dtype=torch.float64) * math.sqrt(d)
    peak = float(kappa(torch.tensor(float(d), dtype=torch.float64))) ** 2
    return {"SNR⁻¹": others * float(kappa(x).mean(1).square().mean()) / peak}


def _snr_agrees(results: Results) -> Verdict:
    apart = [
        x for axis in ("N", "d", "τ") for x in results.values("standard errors apart", axis=axis)
    ]
    far = sum(not x <= 5.0 for x in apart)
    return verdict(
        far == 0,
        f"{len(apart)} comparisons, {far} further than 5 standard errors apart; the largest "
        f"{max(apart):.1f}.",
    )


def _snr_dimension(results: Results) -> Verdict:
    told, holding = [], True
    for n in results.axis_values("at", axis="needed d", kernel="exp"):
        cell = {"axis": "needed d", "at": n}
        found = results.mean("d", kernel="exp", **cell)
        formula = results.mean("formula", kernel="exp", **cell)
        linear = results.mean("d", kernel="linear", **cell)
        holding = holding and abs(found - formula) <= 1.5 and linear > found
        told.append(f"N = {n}: {found:.1f} (formula {formula:.1f}; linear {linear:.0f})")
    return verdict(bool(told) and holding, f"Least d for SNR⁻¹ = 1: {'; '.join(told)}.")


def _snr_temperature(results: Results) -> Verdict:
    taus = sorted(tau for tau in results.axis_values("at", axis="τ") if tau > 1)
    found = [results.mean("SNR⁻¹", axis="τ", kernel="exp", at=tau) for tau in taus]
    rising = all(a < b for a, b in pairwise(found))
    least = taus[found.index(min(found))]
    told = ", ".join(f"{tau:g}: {x:.3g}" for tau, x in zip(taus, found, strict=True))
    return verdict(
        rising, f"SNR⁻¹ of the exponential kernel by τ: {told}; it is least at τ = {least:g}."
    )


def _snr_order(results: Results) -> Verdict:
    found = {s: results.max("order", axis="order", at=s) for s in (2.0, 3.0)}
    told = ", ".join(f"{s:g} standard deviations {order:.0f}" for s, order in found.items())
    return verdict(
        max(found.values()) <= 8, f"Order for a relative error of 2⁻⁸ (bfloat16): {told}."
    )


def _snr_heads(results: Results) -> Verdict:
    told, holding = [], True
    for kernel in ("linear", "exp"):
        heads = results.axis_values("at", axis="heads", kernel=kernel)
        found = [results.mean("SNR⁻¹", axis="heads", kernel=kernel, at=h) for h in heads]
        holding = holding and all(b < a for a, b in pairwise(found))
        told.append(f"{kernel} from {found[0]:.3g} with {heads[0]} to {found[-1]:.3g} with")
        told[-1] += f" {heads[-1]}"
    return verdict(holding, f"SNR⁻¹ of the mean over heads: {'; '.join(told)}.")


def _snr_draw(results: Results) -> RenderedFigure:
    panels = []
    for axis, title, x in (
        ("N", f"d = {results.config['d']}, τ = 2√d", "N, other pairs stored"),
        ("d", f"N = {results.config['N']}, τ = 2√d", "d, size of keys"),
        ("τ", f"N = {results.config['N']}, d = {results.config['d of τ']}", "temperature τ"),
    ):
        series = []
        for kernel in results.axis_values("kernel", axis=axis):
            places = results.axis_values("at", axis=axis, kernel=kernel)
            look = KERNELS.index(kernel)
            # The closed form first, so that what was measured lies above it.
            for measure, name in (("theory", "closed form"), ("SNR⁻¹", str(kernel))):
                each = [results.values(measure, axis=axis, kernel=kernel, at=p) for p in places]
                mean = [sum(some) / len(some) for some in each]
                if measure == "theory":
                    series.insert(0, Series(name=name, x=places, y=mean, style=6))
                    continue
                low, high = [min(some) for some in each], [max(some) for some in each]
                series.append(Series(name=name, x=places, y=mean, low=low, high=high, style=look))
        log_x = axis != "τ"
        panels.append(Panel(title=title, x=x, y="SNR⁻¹", series=series, log_x=log_x, log_y=True))
    places = results.axis_values("at", axis="needed d", kernel="exp")
    panels.append(
        Panel(
            title="d for SNR⁻¹ = 1",
            x="N, other pairs stored",
            y="d, size of keys",
            log_x=True,
            log_y=True,
            series=[
                Series(
                    name=name,
                    x=places,
                    y=[results.mean(measure, axis="needed d", kernel=kernel, at=n) for n in places],
                    style=look,
                )
                for kernel, measure, name, look in (
                    ("exp", "formula", "closed form", 6),
                    ("linear", "d", "linear", 0),
                    ("exp", "d", "exp", 2),
                )
            ],
        )
    )
    return panel_figure(
        panels, x="", title="Retrieval noise: Monte Carlo against closed forms", height=2.7
    )


SNR = Experiment(
    name="am-snr",
    title="Retrieval signal-to-noise of four kernels",
    source="AM section 2.1, eqs. 6–17",
    protocol=(
        "Keys and values are normal draws; N + 1 pairs are written by Σ v κ(k, ·), and one, whose "
        "key and value have length √d exactly, is asked for. SNR⁻¹ = E‖r‖²/(c²‖v‖²). Against N and "
        "d whole memories are written by `recollect.recall` with τ = 2√d (at √d the exponential's "
        "tail is so heavy that the spread of a few hundred trials says little of the error); "
        "against τ eq. 10 is sampled. Closed forms: N/d, N/2d, N exp(−2(τ−1)d/τ²) and N(1 + "
        "4d/τ²)/d exp(−2(τ−1)d/τ²). Also the least d at which SNR⁻¹ is 1 at τ = √d, the order at "
        "which the series of exp is as good as exp in bfloat16 for products of 2 and 3 standard "
        "deviations, and the noise of the mean over heads with keys of their own."
    ),
    claims=(
        Claim(
            name="closed forms",
            text="SNR⁻¹ is N/d, N/2d, N exp(−2(τ−1)d/τ²) and so on.",
            rule=special(
                "Every estimate against N, d and τ is within five of its standard errors of the "
                "closed form.",
                _snr_agrees,
            ),
        ),
        Claim(
            name="d = O(log² N)",
            text="The exponential kernel needs d = O(log² N) where the linear one needs d ∝ N.",
            rule=special(
                "For every N the least d found for the exponential kernel is within 1.5 of "
                "(1 + ½ log N)² and below the linear kernel's.",
                _snr_dimension,
            ),
        ),
        Claim(
            name="temperature",
            text="A lower temperature (τ > 1) is more precise.",
            rule=special(
                "Over all temperatures above 1 that were measured, the exponential kernel's SNR⁻¹ "
                "rises with τ.",
                _snr_temperature,
            ),
        ),
        Claim(
            name="truncation",
            text="Low-precision arithmetic sees the series of exp end at order 7 or 8.",
            rule=special(
                "Orders up to 8 bring the relative error to 2⁻⁸ for products up to 3 standard "
                "deviations.",
                _snr_order,
            ),
        ),
        Claim(
            name="heads",
            text="Averaging over heads lowers the noise.",
            rule=special(
                "For both kernels SNR⁻¹ of the mean falls with every increase of the number of "
                "heads of full size.",
                _snr_heads,
            ),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "N": 32, "d": 16, "Ns": [16], "ds": [8, 16], "trials": 200}
        | {"taus": [1.5, 2.0, 4.0], "d of τ": 4, "needed": [16], "heads": [1, 4]}
        | {"draws": 200_000},
        "small": {"seeds": 3, "N": 64, "d": 16, "Ns": [16, 32, 64, 128, 256], "trials": 200}
        | {"ds": [4, 8, 16, 32], "taus": [1.5, 1.75, 2.0, 3.0, 4.0, 6.0, 8.0], "d of τ": 4}
        | {"needed": [16, 64, 256, 1024], "heads": [1, 2, 4, 8], "draws": 1_000_000},
        "paper": {"seeds": 3, "N": 128, "d": 64, "Ns": [16, 64, 256, 1024, 4096], "trials": 4096}
        | {"ds": [8, 16, 32, 64, 128], "taus": [1.5, 1.75, 2.0, 3.0, 4.0, 6.0, 8.0], "d of τ": 4}
        | {"needed": [16, 64, 256, 1024, 4096], "heads": [1, 2, 4, 8, 16], "draws": 20_000_000},
    },
    cells=_snr_cells,
    measure=_snr_measure,
    figure=_snr_draw,
    notes=(
        "The temperature claim is true above τ = 2 only: (τ − 1)/τ², the exponent of eq. 13, is "
        "largest there, so that between 1 and 2 a higher temperature is the more precise one."
    ),
)

EXPERIMENTS = (SNR,)
