"""State exchange with more items than dimensions: AM appendix 10, theorem 1; nothing trained."""

from __future__ import annotations

import torch
from torch.nn import functional

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.features.base import Kernel
from recollect.choices.features.kernels import LinearKernel, Round
from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Values,
    all_of,
    at_least,
    for_each,
    less_than,
)
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.tasks.exchange import swap_stream, welch

__all__ = ["EXCHANGE"]

KERNELS: dict[str, Kernel] = {"rounding": Round(), "linear": LinearKernel()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WINDOW = 40
"""Number of swaps over which the figure's accuracy is averaged."""


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    n, generator = cell["n"], torch.Generator().manual_seed(seed)
    stream = swap_stream(n, cell["d"], config["swaps"], generator, dtype=DTYPES[cell["dtype"]])
    q, k, v = (x[None, :, None].to(device) for x in (stream.q, stream.k, stream.v))
    # The delta rule on κ: u_t = v_t − Σ_{i<t} κ(k_i, k_t) u_i, y_t = Σ_{i≤t} κ(k_i, q_t) u_i.
    recipe = Recipe(features=KERNELS[cell["kernel"]], algorithm=GradientDescent(lr=1.0))
    y, _ = recall(recipe, q, k, v, output_final_state=False)
    y = y[0, n:, 0].float().cpu()
    is_right = (y.argmax(-1) == stream.answer_index[n:]).float()
    error = (y - functional.one_hot(stream.answer_index[n:], n).float()).abs().amax(-1)
    return {
        "accuracy": float(is_right.mean()),
        "last quarter": float(is_right[-len(is_right) // 4 :].mean()),
        "largest error": float(error.nan_to_num(float("inf")).max().clamp_max(1e30)),
        "accuracy by swaps": [float(window.mean()) for window in is_right.split(WINDOW)],
    }


LATE = {"last quarter": "accuracy over the last quarter of the swaps"}
BOTH = ["float32", "bfloat16"]

EXCHANGE = Experiment(
    name="am-state-exchange",
    title="State exchange with more items than dimensions",
    source="AM appendix 10, theorem 1",
    protocol=(
        "n unit keys in d < n dimensions with inner products below 1/8 get one-hot values; then "
        "each token swaps two items: its key is k_a − k_b and its value 0. The memory is the delta "
        "rule on a kernel, u_t = v_t − Σ κ(k_i, k_t) u_i, read by Σ κ(k_i, q_t) u_i with the same "
        "kernel. After every swap the query is a random key, and the answer is the largest of n "
        f"outputs. Nothing is trained. 64 keys need d ≥ 33 (Welch: {welch(64, 33):.4f} at 33); "
        "`recollect.tasks.spread_keys` builds the keys."
    ),
    claims=(
        Claim(
            name="rounding tracks",
            text="With |inner products| < 1/8 and a kernel that rounds, any sequence of swaps of "
            "n > d items is tracked exactly.",
            rule=all_of(
                at_least("accuracy", 1.0, statistic="min", kernel="rounding"),
                less_than(
                    {"largest error": "error of an output"}, 0.5, statistic="max", kernel="rounding"
                ),
            ),
        ),
        Claim(
            name="linear fails",
            text="A linear kernel cannot hold more items than dimensions.",
            rule=for_each("n", less_than(LATE, 0.9, statistic="max", kernel="linear")),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "sizes": [[64, 36]], "swaps": 80, "dtypes": ["float32"]},
        "small": {"seeds": 3, "sizes": [[64, 36], [256, 128]], "swaps": 400, "dtypes": BOTH},
        "paper": {"seeds": 3, "sizes": [[64, 36], [128, 56], [192, 64], [256, 128], [512, 128]]}
        | {"swaps": 2000, "dtypes": BOTH},
    },
    cells=lambda config: [
        {"n": n, "d": d, "kernel": kernel, "dtype": dtype}
        for n, d in config["sizes"]
        for kernel in KERNELS
        for dtype in config["dtypes"]
    ],
    measure=_measure,
    figure=Lines(
        y="accuracy by swaps",
        x=lambda config, count: [WINDOW * (i + 1) for i in range(count)],
        by=("kernel", "dtype"),
        panels=("n", "d"),
        panel_title="n = {n} items in d = {d}",
        x_label="swaps",
        y_label="accuracy",
        title="Following exchanged items, nothing trained",
        height=2.8,
        y_range=(-0.03, 1.05),
    ),
)
