"""The memory in a long context: AM section 2.2.2, nothing trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recollect.choices.algorithm.descent import GradientDescent
from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.recipe.recipe import Recipe
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.theory.limits import approach, normalized_update_norms

__all__ = ["EXPERIMENTS"]


def _times(config: Config) -> list[int]:
    return [2**i for i in range(3, int(math.log2(config["length"])) + 1)]


def _icl_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    D, T = config["size"], config["length"]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # A covariance with a spread of scales, so that several heads cannot be lucky.
    x = normal(T, D) * torch.linspace(0.5, 1.5, D, dtype=torch.float64) @ _rotation(normal(D, D))
    if cell["model"] == "softmax attention":
        k, v = (x @ _rotation(normal(D, D)) for _ in range(2))
        norms = normalized_update_norms(k, v, temperature=math.sqrt(D) * float(k.square().mean()))
        some = [float(norms[t // 2 : t].mean()) for t in _times(config)]
        return {"at the end": some[-1], "power of t": _power(_times(config), some), "curve": some}
    heads = int(cell["heads"])
    size = D // heads
    w_k = _rotation(normal(D, D)).view(heads, size, D)
    w_v = normal(heads, size, D) / math.sqrt(D)
    sigma = x.mT @ x / T
    recipe = Recipe(algorithm=GradientDescent(lr=config["lr"] / size))
    found = approach(recipe, x, w_k, w_v, at=_times(config), second_moment=sigma).mean(1)
    return {
        "at the end": float(found[-1]),
        "power of t": _power(_times(config), found.tolist()),
        "curve": found.tolist(),
    }


def _rotation(normal: Tensor) -> Tensor:
    return torch.linalg.qr(normal).Q


def _power(times: list[int], values: list[float]) -> float:
    """The power of t with which the later half of a curve moves."""
    a = torch.tensor(times, dtype=torch.float64).log()
    b = torch.tensor(values, dtype=torch.float64).clamp_min(1e-300).log()
    a, b = a[len(a) // 2 :], b[len(b) // 2 :]
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / a.square().sum())


def _icl_one(results: Results) -> Verdict:
    most = results.max("at the end", model="DeltaNet", heads=1)
    return verdict(
        most < 0.01,
        f"One head: ‖S_t − S*‖/‖S*‖ after {results.config['length']} tokens is at most {most:.2g}.",
    )


def _icl_many(results: Results) -> Verdict:
    told, holding = [], True
    for heads in results.axis_values("heads", model="DeltaNet"):
        if heads == 1:
            continue
        least = results.min("at the end", model="DeltaNet", heads=heads)
        one = results.max("at the end", model="DeltaNet", heads=1)
        holding = holding and least > 10 * one and least > 0.01
        told.append(f"{heads} heads at least {least:.2g}")
    return verdict(bool(told) and holding, f"{', '.join(told)}.")


def _icl_softmax(results: Results) -> Verdict:
    power = results.max("power of t", model="softmax attention")
    return verdict(power < -0.5, f"‖S_t − S_(t−1)‖ falls like t^{power:.2f} or faster.")


def _icl_draw(results: Results) -> RenderedFigure:
    times = _times(results.config)
    series = []
    for heads in results.axis_values("heads", model="DeltaNet"):
        mean, low, high = results.mean_and_range("curve", model="DeltaNet", heads=heads)
        name = f"{heads} heads" if heads > 1 else "one head"
        series.append(Series(name=name, x=times, y=mean, low=low, high=high))
    mean, low, high = results.mean_and_range("curve", model="softmax attention")
    softmax = Series(name="softmax attention", x=times, y=mean, low=low, high=high)
    return panel_figure(
        [
            Panel(
                title="DeltaNet",
                y="‖S_t − S*‖/‖S*‖",
                series=series,
                log_x=True,
                log_y=True,
            ),
            Panel(
                title="softmax attention",
                y="‖S_t − S_(t−1)‖",
                series=[softmax],
                log_x=True,
                log_y=True,
            ),
        ],
        x="tokens t",
        title="What the memory becomes in a long context",
        height=3.0,
    )


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
            rule=special(
                "With one head ‖S_t − S*‖/‖S*‖ at the end is below 0.01 for every seed.",
                _icl_one,
            ),
        ),
        Claim(
            name="several heads do not",
            text="With several heads S* depends on the inputs' covariance, and what is left over "
            "keeps moving the memory.",
            rule=special(
                "With several heads the distance at the end stays above 0.01 and above ten times "
                "that of one head, for every seed.",
                _icl_many,
            ),
        ),
        Claim(
            name="softmax's updates vanish",
            text="Softmax attention's normalised memory changes by about 1/t.",
            rule=special(
                "The norm of its change falls with a power of t below −1/2, for every seed.",
                _icl_softmax,
            ),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "size": 8, "length": 512, "heads": [1, 2], "lr": 0.5},
        "small": {"seeds": 3, "size": 16, "length": 2048, "heads": [1, 2, 4], "lr": 0.5},
        "paper": {"seeds": 3, "size": 64, "length": 16384, "heads": [1, 2, 4, 8], "lr": 0.5},
    },
    cells=lambda config: [
        *({"model": "DeltaNet", "heads": heads} for heads in config["heads"]),
        {"model": "softmax attention", "heads": 1},
    ],
    measure=_icl_measure,
    figure=_icl_draw,
)

EXPERIMENTS = (ICL,)
