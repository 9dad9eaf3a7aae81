"""Online regression without trained parameters: TTR section 5, figure 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.algorithm.closed_form import Analytic, LeastSquares
from recollect.choices.context.windows import Prefix
from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Values,
    above,
    below,
)
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.tasks.switching import SwitchingConfig, switching
from recollect.zoo.preset import get

__all__ = ["FIG2", "least_squares"]

LINEAR, RLS, SOFTMAX, LOCAL = (
    "linear attention",
    "RLS",
    "softmax attention",
    "local linear attention",
)
PLAIN, NAIVE = "softmax, keys as they are", "naive forecaster"
PRESETS = {
    LINEAR: "linear_attention",
    SOFTMAX: "qk_norm_attention",
    LOCAL: "local_linear_attention",
    PLAIN: "softmax_attention",
}


def least_squares(ridge: float) -> Recipe:
    """Return least squares over the whole past, with equal weights."""
    return Recipe(context=Prefix(), algorithm=LeastSquares(ridge=ridge))


def _predict(layer: str, config: Config, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a layer's outputs ``[B, T, K]``; it has no parameters."""
    if layer in (SOFTMAX, LOCAL):  # TTR 51 and 52: queries and keys of length √K
        q, k = (math.sqrt(q.shape[-1]) * functional.normalize(x, dim=-1) for x in (q, k))
    recipe = least_squares(config["ridge"]) if layer == RLS else get(PRESETS[layer]).recipe
    if layer == LOCAL:
        recipe = recipe.replace(algorithm=Analytic(ridge=config["slopes_ridge"]))
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    y, _ = recall(recipe, q, k, v, output_final_state=False)
    y = y.squeeze(2)
    return functional.normalize(y, dim=-1) if layer == LINEAR else y


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    process = SwitchingConfig(size=config["size"], length=config["length"])
    generator = torch.Generator().manual_seed(seed)
    sample = switching(process, config["sequences"], generator, dtype=torch.float64)
    q, k, v = (x.to(device) for x in (sample.q, sample.k, sample.v))
    layer = cell["layer"]
    y = sample.repeat_last if layer == NAIVE else _predict(layer, config, q, k, v).cpu()
    loss = sample.loss(y).mean(0)  # [T]
    switch = process.switch_time + 1
    return {
        "before": float(loss[:switch].mean()),
        "after": float(loss[switch:].mean()),
        "last quarter": float(loss[-len(loss) // 4 :].mean()),
        "loss": loss.tolist(),
    }


PHASES = {"before": "loss before the switch", "after": "loss after the switch"}
LATE = {"last quarter": "loss in the last quarter"}
SMALL = {"seeds": 3, "size": 64, "length": 256, "sequences": 8, "ridge": 1e-3, "slopes_ridge": 1.0}

FIG2 = Experiment(
    name="ttr-fig2",
    title="Online regression by a forward pass",
    source="TTR section 5, figure 2, eq. 55",
    protocol=(
        "Keys follow k_{t+1} = a k_t + 0.02 ε_t with a = 0.9 for t < T/4 and 0.999 from then on, "
        "K = 64, T = 256; ε has unit variances and correlations of 0.5; v_t = k_{t+1}/‖k_{t+1}‖ "
        "and q_t = k_{t+1}, so that y_t forecasts v_{t+1}. No number is learned. Linear attention "
        "has a normalized output. Least squares over the whole past has a ridge; the paper uses "
        "the pseudo-inverse. Softmax attention of eq. 51 and local linear attention of eq. 52 "
        "have queries and keys of length √K. Softmax attention on unchanged keys (eq. 50) is no "
        "part of the claims. Losses are means over sequences; a seed is a set of sequences. "
        "float64."
    ),
    claims=(
        Claim(
            name="linear attention is worst",
            text="Linear attention performs the worst, since the keys' covariance is not the "
            "identity.",
            rule=above(PHASES, upper=[LINEAR], lower=(RLS, SOFTMAX, LOCAL), by="layer"),
        ),
        Claim(
            name="RLS does not adapt",
            text="Unweighted RLS cannot discount the time before the transition and maintains a "
            "high error.",
            rule=above(LATE, upper=[RLS], lower=(LOCAL, NAIVE), by="layer"),
        ),
        Claim(
            name="slopes help",
            text="p = 1 adapts better than p = 0 to the fast period and to the regime change.",
            rule=below(PHASES, lower=[LOCAL], upper=[SOFTMAX], by="layer"),
        ),
    ),
    configs={
        "smoke": {**SMALL, "seeds": 1, "sequences": 1},
        "small": SMALL,
        "paper": {**SMALL, "seeds": 10, "sequences": 64},
    },
    cells=lambda config: [{"layer": name} for name in (LINEAR, RLS, SOFTMAX, LOCAL, PLAIN, NAIVE)],
    measure=_measure,
    figure=Lines(
        y="loss",
        by="layer",
        x_label="time step t (tokens)",
        y_label="out-of-sample loss ‖v − y‖²",
        title="Forecasting a process that changes at T/4, nothing learned",
        height=4.2,
        log_y=True,
    ),
    notes=(
        "Two choices that the paper does not state determine the order. The first is the width of "
        "the kernel. Unchanged keys have lengths of 0.3 to 2. The temperature √K then makes "
        "softmax attention nearly a plain mean, which is worse than linear attention. With queries "
        "and keys of length √K it is better. The second is the ridge of RLS: below 1e-4 (the "
        "pseudo-inverse) its loss peaks when t passes K, and after the switch it is worse than "
        "linear attention for a while."
    ),
)
