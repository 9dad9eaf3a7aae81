"""Growing lengths against the full length from the start: AM section 3.2, figure 6."""

from __future__ import annotations

import torch

from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.fitting import accuracy, fit
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.experiments.framework.task_models import TaskModel
from recollect.experiments.papers.am.swaps import (
    curve_panels,
    delta_mixer,
    fit_values,
    swap_budget,
)
from recollect.report.figures import panel_figure
from recollect.tasks.swaps import SwapConfig, swaps

__all__ = ["EXPERIMENTS"]


def _fig6_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    longest, first = config["length"], config["from"]
    levels = [longest]
    if cell["training"] == "curriculum":
        levels = [first * 2**i for i in range(20) if first * 2**i <= longest]
    tasks = {n: SwapConfig(length=n) for n in (*levels, 2 * longest)}

    def held(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 + seed)
        return swaps(tasks[length], config["tested"], generator)

    rope = 10_000.0 if cell["position"] == "RoPE" else None
    mixer = delta_mixer("round", heads=1, size=12, w_heads=1, rope=rope)
    whole = held(longest)
    found = fit(
        lambda: TaskModel(tasks[longest].vocab, tasks[longest].items, 12, [mixer]),
        lambda generator, length: swaps(tasks[length], config["batch"], generator),
        lambda model: accuracy(model, *whole),
        swap_budget(config),
        seed=seed,
        device=device,
        levels=levels,
    )
    values = dict(fit_values(found, config))
    values["accuracy"] = found.curve[-1][1] if found.curve else float("nan")
    values["at twice the length"] = accuracy(found.model, *held(2 * longest))
    values["last length"] = float(found.levels[-1][1] if found.levels else levels[0])
    return values


def _fig6_wins(results: Results) -> Verdict:
    told, holding = [], True
    for position in ("RoPE", "NoPE"):
        grown = results.mean("accuracy", position=position, training="curriculum")
        direct = results.mean("accuracy", position=position, training="direct")
        holding = holding and grown > direct + 0.01
        told.append(f"{position} {grown:.3f} against {direct:.3f}")
    return verdict(holding, f"Curriculum against direct training: {'; '.join(told)}.")


def _fig6_slower(results: Results) -> Verdict:
    told, holding = [], True
    for training in ("curriculum", "direct"):
        areas = []
        for position in ("NoPE", "RoPE"):
            curve, _, _ = results.mean_and_range(
                "accuracy by steps", position=position, training=training
            )
            areas.append(sum(curve) / len(curve))
        holding = holding and areas[0] < areas[1]
        told.append(f"{training} NoPE {areas[0]:.3f}, RoPE {areas[1]:.3f}")
    return verdict(holding, f"Mean accuracy over training: {'; '.join(told)}.")


def _fig6_further(results: Results) -> Verdict:
    cells = [{"position": position, "training": "curriculum"} for position in ("NoPE", "RoPE")]
    kept = [
        results.mean("at twice the length", **cell) - results.mean("accuracy", **cell)
        for cell in cells
    ]
    return verdict(
        kept[0] > kept[1],
        f"From the training length to twice it, accuracy changes by {kept[0]:+.3f} without and "
        f"{kept[1]:+.3f} with RoPE.",
    )


FIG6 = Experiment(
    name="am-fig6",
    title="Growing lengths, with and without rotary positions",
    source="AM section 3.2, figure 6",
    protocol=(
        "The swap task of am-fig4 with DeltaFormer of one layer, one head of size 12, κ₁ rounded "
        "to two decimals, κ₂ softmax. Curriculum: training begins at a short length, which doubles "
        "when 99 % of the last batches' answers were right; or the full length from the start. "
        "Every point of the figure is measured at the full length. A step whose gradient is not "
        "finite is not taken. Smaller than the paper: 8 to 32 swaps instead of 32 to 256, and "
        "fewer steps, the same for both."
    ),
    claims=(
        Claim(
            name="curriculum wins",
            text="Curriculum learning achieves better performance with fewer computation and "
            "samples.",
            rule=special(
                "At the end its mean accuracy over seeds at the full length is at least 0.01 "
                "above direct training's, with RoPE and with NoPE.",
                _fig6_wins,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="NoPE is slower",
            text="Without positional embedding convergence is slower.",
            rule=special(
                "Averaged over training, NoPE's mean accuracy is below RoPE's in both trainings.",
                _fig6_slower,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="NoPE generalises further",
            text="NoPE has better length generalisation.",
            rule=special(
                "After the curriculum, accuracy falls less from the full length to twice it "
                "without RoPE than with it.",
                _fig6_further,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "from": 4, "length": 8, "steps": 4, "batch": 8, "lrs": [0.01]}
        | {"tested": 8, "evaluations": 2},
        "small": {"seeds": 3, "from": 8, "length": 32, "steps": 1000, "batch": 32, "lrs": [0.01]}
        | {"tested": 128, "evaluations": 20},
        "paper": {"seeds": 3, "from": 32, "length": 256, "steps": 10_000, "batch": 128}
        | {"lrs": [0.01], "tested": 512, "evaluations": 100},
    },
    cells=lambda config: [
        {"position": position, "training": training}
        for position in ("RoPE", "NoPE")
        for training in ("curriculum", "direct")
    ],
    measure=_fig6_measure,
    figure=lambda results: panel_figure(
        curve_panels(
            results,
            [
                (
                    position,
                    [
                        (training, {"position": position, "training": training})
                        for training in ("curriculum", "direct")
                    ],
                )
                for position in ("RoPE", "NoPE")
            ],
        ),
        x="training steps",
        title=f"Accuracy at {results.config['length']} swaps",
        height=3.0,
    ),
    notes=(
        "Where it stands, both trainings solve 32 swaps, and the curriculum with RoPE is there in "
        "fewer steps. With 352 steps (one seed) RoPE has 0.80 with and 0.31 without the "
        "curriculum, NoPE 0.46 and 0.56. With 64 swaps the full length has no finite gradient from "
        "the first step on, in float32 and with α = β = 1 at the start, while the curriculum "
        "solves it within 2000 steps: there it is not faster but the only one that trains. Now and "
        "then, without positions, it stays at the first length."
    ),
)

EXPERIMENTS = (FIG6,)
