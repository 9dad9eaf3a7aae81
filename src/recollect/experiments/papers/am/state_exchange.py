"""Associative-memory view of Transformers: what needs no training (Zhong et al. 2025)."""

from __future__ import annotations

import torch

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.features.base import Kernel
from recollect.choices.features.kernels import LinearKernel, Round
from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.tasks.exchange import exchange, welch

__all__ = ["EXPERIMENTS"]

# -- am-state-exchange: theorem 1 ------------------------------------------------------------------

KERNELS: dict[str, Kernel] = {"rounding": Round(), "linear": LinearKernel()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WINDOW = 40
"""Swaps over which the figure's accuracy is averaged."""


def _tracker(kernel: Kernel) -> Recipe:
    """u_t = v_t − Σ_{i<t} κ(k_i, k_t) u_i, y_t = Σ_{i≤t} κ(k_i, q_t) u_i: the delta rule on κ."""
    return Recipe(features=kernel, algorithm=GradientDescent(lr=1.0))


def _exchange_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    n, d = int(cell["n"]), int(cell["d"])
    generator = torch.Generator().manual_seed(seed)
    stream = exchange(n, d, config["swaps"], generator, dtype=DTYPES[str(cell["dtype"])])
    q, k, v = (x[None, :, None].to(device) for x in (stream.q, stream.k, stream.v))
    y, _ = recall(_tracker(KERNELS[str(cell["kernel"])]), q, k, v, output_final_state=False)
    y = y[0, :, 0].float().cpu()
    wanted = torch.nn.functional.one_hot(stream.holds, n).float()
    right = (y.argmax(-1) == stream.holds).float()[n:]
    error = (y - wanted).abs().amax(-1)[n:]
    return {
        "accuracy": float(right.mean()),
        "last quarter": float(right[-len(right) // 4 :].mean()),
        "largest error": float(error.nan_to_num(float("inf")).max().clamp_max(1e30)),
        "accuracy by swaps": [float(part.mean()) for part in right.split(WINDOW)],
    }


def _sizes(results: Results) -> list[tuple[int, int]]:
    return [(n, results.axis_values("d", n=n)[0]) for n in results.axis_values("n")]


def _rounding_tracks(results: Results) -> Verdict:
    worst = results.min("accuracy", kernel="rounding")
    error = results.max("largest error", kernel="rounding")
    return verdict(
        worst == 1.0 and error < 0.5,
        f"Rounding: accuracy at least {worst:.4f} over sizes, precisions and seeds, largest error "
        f"{error:.2g}.",
    )


def _linear_fails(results: Results) -> Verdict:
    told, holding = [], True
    for n, d in _sizes(results):
        if n <= d:
            continue
        found = results.max("last quarter", kernel="linear", n=n, d=d)
        holding = holding and found < 0.9
        told.append(f"{found:.3f} with n = {n}, d = {d}")
    return verdict(
        bool(told) and holding, f"Linear kernel, last quarter of the swaps: {', '.join(told)}."
    )


def _exchange_draw(results: Results) -> RenderedFigure:
    panels = []
    for n, d in _sizes(results):
        series = []
        for kernel in results.axis_values("kernel"):
            for dtype in results.axis_values("dtype"):
                cell = {"n": n, "d": d, "kernel": kernel, "dtype": dtype}
                mean, low, high = results.mean_and_range("accuracy by swaps", **cell)
                ends = [WINDOW * (i + 1) for i in range(len(mean))]
                name = f"{kernel}, {dtype}"
                series.append(Series(name=name, x=ends, y=mean, low=low, high=high))
        panels.append(
            Panel(
                title=f"n = {n} items in d = {d}",
                y="accuracy",
                series=series,
                y_range=(-0.03, 1.05),
            )
        )
    return panel_figure(
        panels, x="swaps", title="Following exchanged items, nothing trained", height=2.8
    )


EXCHANGE = Experiment(
    name="am-state-exchange",
    title="State exchange with more items than dimensions",
    source="AM appendix 10, theorem 1",
    protocol=(
        "n unit keys in d < n dimensions with inner products below 1/8 get one-hot values; then "
        "each token swaps two items: its key is k_a − k_b and its value 0. The memory is the delta "
        "rule on a kernel, u_t = v_t − Σ κ(k_i, k_t) u_i, read by Σ κ(k_i, q_t) u_i with the same "
        "kernel. After every swap a random key is asked, and the answer is the largest of n "
        "outputs. Nothing is trained. "
        f"64 keys need d ≥ 33 (Welch: {welch(64, 33):.4f} at 33); keys as `recollect.tasks."
        "spread_keys` builds them."
    ),
    claims=(
        Claim(
            name="rounding tracks",
            text="With |inner products| < 1/8 and a kernel that rounds, any sequence of swaps of "
            "n > d items is tracked exactly.",
            rule=special(
                "Every answer of every size, precision and seed is right, and no output is "
                "further than 1/2 from its one-hot value.",
                _rounding_tracks,
            ),
        ),
        Claim(
            name="linear fails",
            text="A linear kernel cannot hold more items than dimensions.",
            rule=special(
                "Wherever n > d its accuracy over the last quarter of the swaps is below 0.9 for "
                "every seed and precision.",
                _linear_fails,
            ),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "sizes": [[64, 36]], "swaps": 80, "dtypes": ["float32"]},
        "small": {"seeds": 3, "sizes": [[64, 36], [256, 128]], "swaps": 400}
        | {"dtypes": ["float32", "bfloat16"]},
        "paper": {"seeds": 3, "sizes": [[64, 36], [128, 56], [192, 64], [256, 128], [512, 128]]}
        | {"swaps": 2000, "dtypes": ["float32", "bfloat16"]},
    },
    cells=lambda config: [
        {"n": n, "d": d, "kernel": kernel, "dtype": dtype}
        for n, d in config["sizes"]
        for kernel in KERNELS
        for dtype in config["dtypes"]
    ],
    measure=_exchange_measure,
    figure=_exchange_draw,
)

EXPERIMENTS = (EXCHANGE,)
