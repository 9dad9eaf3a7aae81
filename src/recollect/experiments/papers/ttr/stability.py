"""The norm of the output against the number of tokens: TTR eqs. 13 and 67."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Values,
    all_of,
    at_least,
    less_than,
    more_than,
)
from recollect.experiments.papers.ttr.forecasting import least_squares
from recollect.functional.recall import recall
from recollect.zoo.preset import get

__all__ = ["STABILITY", "loglog_slope"]


def loglog_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the power of x with which y grows, by least squares on the logarithms."""
    a = torch.tensor(x, dtype=torch.float64).log()
    b = torch.tensor(y, dtype=torch.float64).clamp_min(1e-300).log()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / a.square().sum())


def _lengths(config: Config, count: int = 0) -> list[int]:
    """Return the numbers of tokens at which the norm is measured, four per doubling."""
    lengths = {round(config["size"] * 2 ** (i / 4)) for i in range(-12, 80)}
    return sorted(t for t in lengths if 1 <= t <= config["length"])


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    size, lengths = config["size"], _lengths(config)
    shape = (1, config["length"], 1, size)
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(size, generator=generator, dtype=torch.float64)
    q, k, v = (
        functional.normalize(
            torch.randn(shape, generator=generator, dtype=torch.float64) + config["shared"] * mean,
            dim=-1,
        ).to(device)
        for _ in range(3)
    )
    is_rls = cell["layer"] == "RLS"
    recipe = least_squares(config["ridge"]) if is_rls else get("linear_attention").recipe
    y, _ = recall(recipe, q, k, v, output_final_state=False)
    norm = y[0, :, 0].norm(dim=-1).cpu()
    ridge = config["ridge"] * torch.eye(size, dtype=k.dtype, device=k.device)
    grams = (k[0, :t, 0].T @ k[0, :t, 0] + ridge for t in lengths)
    # ‖q‖ Σ ‖v‖ ‖k‖ / λ_min, and all vectors have length 1.
    bounds = [float(t / torch.linalg.eigvalsh(x)[0]) for t, x in zip(lengths, grams, strict=True)]
    under = sum(int(norm[t - 1] <= bound) for t, bound in zip(lengths, bounds, strict=True))
    smooth = [float(norm[max(0, t - max(1, t // 8)) : t].mean()) for t in lengths]
    late = [i for i, t in enumerate(lengths) if t >= 4 * size]
    return {
        "slope": loglog_slope([lengths[i] for i in late], [smooth[i] for i in late]),
        "norm at the end": smooth[-1],
        "under the bound": under / len(lengths),
        "norm": smooth,
        "bound": bounds,
    }


SLOPE = {"slope": "power of T with which the output norm grows from T = 4K on"}
BOUNDED = {"under the bound": "fraction of the outputs under the bound"}
SMALL = {"seeds": 3, "size": 64, "length": 4096, "ridge": 1e-3, "shared": 0.5}

STABILITY = Experiment(
    name="ttr-stability",
    title="The norm of the output against the number of tokens",
    source="TTR eqs. 13 and 67",
    protocol=(
        "Keys, values and queries of length 1, normal draws that share a mean direction of half "
        "their size, K = V = 64. Linear attention's output without normalisation, least squares "
        "over the whole past with a small ridge λ, and the bound "
        "‖q‖ Σ ‖v_i‖ ‖k_i‖ / (λ_min(KᵀK) + λ). The norm at T is a mean over the last eighth of the "
        "tokens. float64."
    ),
    claims=(
        Claim(
            name="linear attention grows",
            text="Without the inverse covariance the output can grow arbitrarily large with the "
            "sequence length.",
            rule=more_than(SLOPE, 0.25, statistic="min", layer="linear attention"),
        ),
        Claim(
            name="least squares stays",
            text="The output of the least-squares layer is bounded by eq. 13.",
            rule=all_of(
                at_least(BOUNDED, 1.0, statistic="min", layer="RLS"),
                less_than(SLOPE, 0.25, statistic="max", layer="RLS"),
            ),
        ),
    ),
    configs={
        "smoke": {**SMALL, "seeds": 1, "size": 16, "length": 512},
        "small": SMALL,
        "paper": {**SMALL, "length": 65536},
    },
    cells=lambda config: [{"layer": "linear attention"}, {"layer": "RLS"}],
    measure=_measure,
    figure=Lines(
        y="norm",
        x=_lengths,
        by="layer",
        overlays=[
            Lines(y="bound", x=_lengths, name="bound of eq. 13 for RLS", cell={"layer": "RLS"})
        ],
        x_label="tokens T",
        y_label="output norm ‖y_T‖",
        title="Output norm; keys, values and queries of length 1, K = {size}",
        height=4.2,
        log_x=True,
        log_y=True,
    ),
)
