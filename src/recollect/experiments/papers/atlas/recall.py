"""Recall against the size of the state, over architectures: ATLAS figure 7."""

from __future__ import annotations

from dataclasses import replace

import torch

from recollect.blocks.cost import cost
from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.fitting import Budget, accuracy, fit
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.experiments.framework.task_models import Mixer, TaskModel
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.tasks.mqar import MqarConfig, mqar
from recollect.zoo.preset import get

__all__ = ["ATTENTION", "EXPERIMENTS", "zoo_mixer"]


def zoo_mixer(architecture: str, *, heads: int = 1) -> Mixer:
    """A row of the zoo as its preset has it; recall is told to all with a short convolution."""
    preset = get(architecture)
    options = preset.options
    return Mixer(
        recipe=preset.recipe,
        options=options if options.conv_size else replace(options, conv_size=4),
        heads=heads,
    )


def _state_bytes(mixer: Mixer, width: int, length: int) -> int:
    """What a decoder keeps of one sequence after so many tokens."""
    size = width // mixer.heads
    price = cost(mixer.recipe, B=1, T=length, H=mixer.heads, K=size, V=size)
    return price.state_bytes


# -- mqar ------------------------------------------------------------------------------------------

ATTENTION = "softmax_attention"


def _mqar_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    width, vocab = int(cell["width"]), config["vocab"]

    def task(pairs: int) -> MqarConfig:
        return MqarConfig(vocab=vocab, pairs=pairs, length=config["length"])

    def draw(generator: torch.Generator, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        which = int(torch.randint(len(config["pairs"]), (), generator=generator))
        return mqar(task(config["pairs"][which]), config["batch"], generator)

    test = torch.Generator().manual_seed(1_000_003 + seed)
    held = {pairs: mqar(task(pairs), config["tested"], test) for pairs in config["asked"]}

    def measured(model: torch.nn.Module) -> dict[int, float]:
        return {pairs: accuracy(model, *some) for pairs, some in held.items()}

    mixer = zoo_mixer(str(cell["architecture"]))
    found = fit(
        lambda: TaskModel(vocab, vocab, width, [mixer], norm=True),
        draw,
        lambda model: sum(measured(model).values()) / len(held),
        Budget(
            steps=config["steps"],
            lrs=tuple(config["lrs"]),
            evaluations=config["evaluations"],
            solved=config["solved"],
        ),
        seed=seed,
        device=device,
    )
    final = measured(found.model)
    return {
        "accuracy": sum(final.values()) / len(final),
        "state bytes": float(_state_bytes(mixer, width, config["length"])),
        "lr": found.lr,
        "steps": float(found.steps),
        "lost steps": float(found.lost),
        **{f"{pairs} pairs": value for pairs, value in final.items()},
    }


def _mqar_delta(results: Results) -> Verdict:
    told, gaps = [], []
    for width in results.axis_values("width"):
        delta = results.mean("accuracy", architecture="delta_net", width=width)
        hebbian = results.mean("accuracy", architecture="linear_attention", width=width)
        gaps.append(delta - hebbian)
        told.append(f"width {width}: {delta:.3f} against {hebbian:.3f}")
    return verdict(
        all(gap > -0.01 for gap in gaps) and any(gap > 0.01 for gap in gaps),
        f"Delta rule against Hebbian: {'; '.join(told)}.",
    )


def _mqar_atlas(results: Results) -> Verdict:
    told, holding, seen = [], True, 0
    for width in results.axis_values("width", architecture="atlas"):
        own = results.mean("accuracy", architecture="atlas", width=width)
        size = results.mean("state bytes", architecture="atlas", width=width)
        rivals = {
            (str(cell["architecture"]), int(cell["width"])): results.mean("accuracy", **cell)
            for cell in results.cells()
            if cell["architecture"] not in ("atlas", ATTENTION)
            and results.mean("state bytes", **cell) <= size
        }
        if not rivals:
            continue
        seen += 1
        best = max(rivals, key=lambda rival: rivals[rival])
        holding = holding and own >= rivals[best]
        told.append(
            f"{own:.3f} at {size / 1024:.1f} KiB against {rivals[best]:.3f} ({best[0]}, width "
            f"{best[1]})"
        )
    return verdict(
        bool(seen) and holding, f"Atlas against the best with no more state: {'; '.join(told)}."
    )


def _mqar_draw(results: Results) -> RenderedFigure:
    series = []
    for architecture in results.axis_values("architecture"):
        widths = sorted(results.axis_values("width", architecture=architecture))
        each = [results.values("accuracy", architecture=architecture, width=w) for w in widths]
        sizes = [
            results.mean("state bytes", architecture=architecture, width=w) / 1024 for w in widths
        ]
        series.append(
            Series(
                name=f"{architecture} (cache)" if architecture == ATTENTION else str(architecture),
                x=sizes,
                y=[sum(some) / len(some) for some in each],
                low=[min(some) for some in each],
                high=[max(some) for some in each],
            )
        )
    return panel_figure(
        [Panel(y="recall accuracy", series=series, log_x=True, y_range=(0.0, 1.05))],
        x="state per sequence (KiB)",
        title=f"Multi-query recall of {min(results.config['asked'])} to "
        f"{max(results.config['asked'])} pairs",
        height=4.0,
    )


MQAR = Experiment(
    name="mqar",
    title="Recall against the size of the state",
    source="ATLAS section 6.5, figure 7; Arora et al. 2023",
    protocol=(
        "Zoology's multi-query recall: pairs first, then each key asked once in slots drawn with "
        "probability ∝ i^(a−1), a = 0.01. One layer of the row of the zoo with its preset's "
        "options and a short convolution, one head, norms, residual stream, no MLP; trained on a "
        "mix of numbers of pairs and tested on each. AdamW, cosine. Smaller than the benchmark: "
        "one layer, vocabulary 64 and sequences of 48 tokens instead of 8192 and 64 to 1024."
    ),
    claims=(
        Claim(
            name="delta rule above Hebbian",
            text="The delta rule recalls more than Hebbian updates.",
            rule=special(
                "At no width is DeltaNet's mean accuracy over seeds 0.01 below linear "
                "attention's, and at one it is 0.01 above.",
                _mqar_delta,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="Atlas best per state",
            text="Atlas has the best performance per memory size.",
            rule=special(
                "At every width, no recurrent architecture with as much state or less has a "
                "higher mean accuracy than Atlas.",
                _mqar_atlas,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "vocab": 16, "length": 16, "pairs": [2, 4], "asked": [2, 4]}
        | {"widths": [8], "steps": 2, "batch": 4, "lrs": [1e-2], "tested": 8, "evaluations": 1}
        | {"solved": 0.999, "architectures": ["linear_attention", "delta_net"]},
        "small": {"seeds": 3, "vocab": 64, "length": 48, "pairs": [4, 8, 12], "asked": [4, 8, 12]}
        | {"widths": [8, 16], "steps": 800, "batch": 16, "lrs": [1e-2, 3e-3], "tested": 128}
        | {"evaluations": 10, "solved": 0.995}
        | {
            "architectures": [
                "linear_attention",
                "delta_net",
                "gated_delta_net",
                "titans",
                "omega_net",
                "atlas",
                "softmax_attention",
            ]
        },
        "paper": {"seeds": 3, "vocab": 8192, "length": 512, "pairs": [4, 8, 16, 32, 64]}
        | {"asked": [4, 8, 16, 32, 64, 128], "widths": [64, 128, 256, 512], "steps": 50_000}
        | {"batch": 256, "lrs": [1e-4, 4.6e-4, 2.2e-3, 1e-2], "tested": 1000, "evaluations": 64}
        | {"solved": 0.999}
        | {
            "architectures": [
                "linear_attention",
                "based",
                "gla",
                "mamba2",
                "delta_net",
                "gated_delta_net",
                "titans",
                "omega_net",
                "atlas",
                "softmax_attention",
            ]
        },
    },
    cells=lambda config: [
        {"architecture": name, "width": width}
        for name in config["architectures"]
        for width in config["widths"]
    ],
    measure=_mqar_measure,
    figure=_mqar_draw,
    notes=(
        "120 steps, where every recurrent row was at chance. With steps of a fixed size Atlas was "
        "at chance after 800 (0.045 at width 16), also with steps 8 and 32 times as large or "
        "batches of 4 tokens; with steps that are searched along its direction it has 0.741. Its "
        "tokens read the memory of their batch's start, so what a batch of 16 was told cannot be "
        "answered in it. OmegaNet, which reads at every token, has 0.999."
    ),
)

EXPERIMENTS = (MQAR,)
