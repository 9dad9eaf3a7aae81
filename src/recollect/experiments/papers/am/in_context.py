"""The memory in a long context: AM section 2.2.2, nothing trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recollect.choices.algorithm.descent import GradientDescent
from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Results,
    Values,
    Verdict,
    less_than,
    plot_panels,
    special,
    verdict,
)
from recollect.experiments.papers.ttr.stability import loglog_slope
from recollect.recipe.recipe import Recipe
from recollect.theory.limits import normalized_update_norms, relative_distance

__all__ = ["ICL"]


def _steps(config: Config, count: int = 0) -> list[int]:
    return [2**i for i in range(3, int(math.log2(config["length"])) + 1)]


def _rotation(normal: Tensor) -> Tensor:
    return torch.linalg.qr(normal).Q


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    D, T, steps = config["size"], config["length"], _steps(config)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Covariances of different scales, so that no split into heads is uncorrelated by chance.
    x = normal(T, D) * torch.linspace(0.5, 1.5, D, dtype=torch.float64) @ _rotation(normal(D, D))
    if cell["model"] == "softmax attention":
        k, v = (x @ _rotation(normal(D, D)) for _ in range(2))
        norms = normalized_update_norms(k, v, temperature=math.sqrt(D) * float(k.square().mean()))
        curve = [float(norms[t // 2 : t].mean()) for t in steps]
    else:
        heads = cell["heads"]
        w_k = _rotation(normal(D, D)).view(heads, D // heads, D)
        w_v = normal(heads, D // heads, D) / math.sqrt(D)
        recipe = Recipe(algorithm=GradientDescent(lr=config["lr"] / (D // heads)))
        distances = relative_distance(recipe, x, w_k, w_v, at=steps)
        curve = distances.mean(1).tolist()
    late = len(steps) // 2
    power = loglog_slope(steps[late:], curve[late:])
    return {"at the end": curve[-1], "power of t": power, "curve": curve}


def _several_heads_do_not(results: Results) -> Verdict:
    heads = [n for n in results.axis_values("heads", model="DeltaNet") if n != 1]
    one = results.max("at the end", model="DeltaNet", heads=1)
    lowest = {n: results.min("at the end", model="DeltaNet", heads=n) for n in heads}
    numbers = ", ".join(f"{n} heads at least {x:.2g}" for n, x in lowest.items())
    are_far = all(x > 10 * one and x > 0.01 for x in lowest.values())
    return verdict(bool(lowest) and are_far, f"{numbers}.")


DISTANCE = {"at the end": "distance ‖S_t − S*‖/‖S*‖ at the end"}
POWER = {"power of t": "power of t in the norm of its change"}
SMALL = {"seeds": 3, "size": 16, "length": 2048, "heads": [1, 2, 4], "lr": 0.5}

ICL = Experiment(
    name="am-icl",
    title="The memory in an infinitely long context",
    source="AM section 2.2.2, eqs. 45–49",
    protocol=(
        "Inputs x are normal with a rotated covariance of deviations 0.5 to 1.5, k = W_k x and "
        "v = W_v x with W_k orthogonal, cut into heads. DeltaNet with a constant step η = lr/K; "
        "S* = W_v Σ W_kᵀ (W_k Σ W_kᵀ)⁻¹ per head with the Σ of the tokens shown. For softmax "
        "attention, the norm of the change of S_t = (1/t) Σ v φ(k)ᵀ, from its kernel. float64."
    ),
    claims=(
        Claim(
            name="one head converges",
            text="As memory updates progress, the memory converges to a fixed S*, which no longer "
            "depends on the context.",
            rule=less_than(DISTANCE, 0.01, statistic="max", model="DeltaNet", heads=1),
        ),
        Claim(
            name="several heads do not",
            text="With several heads S* depends on the inputs' covariance, and what is left over "
            "keeps moving the memory.",
            rule=special(
                "With several heads the distance at the end stays above 0.01 and above ten times "
                "that of one head, for every seed.",
                _several_heads_do_not,
            ),
        ),
        Claim(
            name="softmax's updates vanish",
            text="Softmax attention's normalised memory changes by about 1/t.",
            rule=less_than(POWER, -0.5, statistic="max", model="softmax attention"),
        ),
    ),
    configs={
        "smoke": {**SMALL, "seeds": 1, "size": 8, "length": 512, "heads": [1, 2]},
        "small": SMALL,
        "paper": {**SMALL, "size": 64, "length": 16384, "heads": [1, 2, 4, 8]},
    },
    cells=lambda config: [
        *({"model": "DeltaNet", "heads": heads} for heads in config["heads"]),
        {"model": "softmax attention", "heads": 1},
    ],
    measure=_measure,
    figure=plot_panels(
        Lines(
            y="curve",
            x=_steps,
            by="heads",
            name=lambda cell: f"{cell['heads']} heads" if cell["heads"] > 1 else "one head",
            panel_title="DeltaNet",
            y_label="‖S_t − S*‖/‖S*‖",
            log_x=True,
            log_y=True,
            cell={"model": "DeltaNet"},
        ),
        Lines(
            y="curve",
            x=_steps,
            by="model",
            panel_title="softmax attention",
            y_label="‖S_t − S_(t−1)‖",
            log_x=True,
            log_y=True,
            cell={"model": "softmax attention"},
        ),
        x_label="tokens t",
        title="What the memory becomes in a long context",
        height=3.0,
    ),
)
