"""Maps that a small network learns online: ATLAS section 6.4, figure 6."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import get_args

import torch

from recollect.choices.algorithm.base import Algorithm
from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.algorithm.elementwise import Adam, RMSProp
from recollect.choices.algorithm.muon import Muon
from recollect.choices.memory.maps import MLP
from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    NotMeasured,
    Results,
    Rule,
    Values,
    Verdict,
    heldout_generator,
    special,
    verdict,
)
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.tasks.learnability import MappingConfig, MappingName, draw_mapping

__all__ = ["EXPERIMENTS"]

MAPPINGS: tuple[MappingName, ...] = get_args(MappingName)
TITLES = {
    "low_rank": "1 low rank",
    "mlp": "2 MLP",
    "attention": "3 attention + MLP",
    "attention_inputs": "4 attention outputs as inputs",
    "sliding": "5 sliding window + MLP",
}

ALGORITHMS: dict[str, Algorithm] = {
    "SGD": GradientDescent(),
    "RMSProp": RMSProp(lr="input"),
    "Adam": Adam(lr="input"),
    "Muon": Muon(momentum=0.9),
}
"""Every learning rate is a gate, so that the batch elements of one call have different rates."""


def _recipe(cell: Cell) -> Recipe:
    hidden, expansion = (int(part) for part in str(cell["memory"]).split("×"))
    return Recipe(
        memory=MLP(depth=hidden + 1, expansion=expansion, residual=False),
        algorithm=ALGORITHMS[str(cell["optimizer"])],
    )


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    size, length, optimizer = config["size"], config["length"], str(cell["optimizer"])
    task = MappingConfig(
        name=cell["mapping"],  # type: ignore[arg-type]
        size=size,
        length=length,
        rank=max(1, size // 8),
        window=config["window"],
    )
    pairs = draw_mapping(task, 1, torch.Generator().manual_seed(seed))
    rates = config["lrs"][optimizer]
    i, o = (
        x.to(device).unsqueeze(2).expand(len(rates), -1, -1, -1)
        for x in (pairs.inputs, pairs.outputs)
    )  # [rates, T, 1, size]
    recipe, generator = _recipe(cell), heldout_generator(seed)
    initial_memory = [
        torch.randn(1, *shape, generator=generator).to(device) / math.sqrt(shape[-1])
        for shape in recipe.shapes(size, size)
    ]
    lr = torch.tensor(rates, device=device)[:, None, None].expand(-1, length - 1, 1)
    if optimizer == "SGD":
        # From ½‖e‖² to ‖e‖²/‖o‖².
        lr = lr * 2 / o[:, :-1].square().sum(-1)
    with torch.no_grad():
        # Queries are the next inputs, so that the output is M_t(i_{t+1}), before the step on it.
        y, _ = recall(
            recipe,
            i[:, 1:],
            i[:, :-1],
            o[:, :-1],
            {"lr": lr},
            initial_memory=initial_memory,
            output_final_state=False,
        )
    loss = (y - o[:, 1:]).square().sum(-1) / o[:, 1:].square().sum(-1)
    loss = loss.squeeze(2).nan_to_num(float("inf")).clamp_max(1e6).cpu()  # [rates, T − 1]
    best = int(loss.mean(1).argmin())
    curve = loss[best].tolist()
    width = max(1, len(curve) // 32)
    starts = range(0, len(curve) - width + 1, width)
    last = curve[-len(curve) // 4 :]
    return {
        "loss": float(loss[best].mean()),
        "last quarter": sum(last) / len(last),
        "lr": rates[best],
        "by position": [sum(curve[start : start + width]) / width for start in starts],
    }


def _mean_loss(results: Results, measure: str, name: str) -> float:
    """Return the mean over seeds with the best optimizer, averaged over memories."""
    selected = results.select(mapping=name)
    if not selected.records:
        raise NotMeasured(f"the mapping {name} was not measured")
    losses = [
        min(
            selected.mean(measure, memory=memory, optimizer=optimizer)
            for optimizer in selected.axis_values("optimizer", memory=memory)
        )
        for memory in selected.axis_values("memory")
    ]
    return sum(losses) / len(losses)


def _in_order(results: Results, *, measure: str, groups: tuple[tuple[str, ...], ...]) -> Verdict:
    """Require that all losses of a group are below all losses of the next group."""
    losses = {name: _mean_loss(results, measure, name) for group in groups for name in group}
    in_order = all(
        max(losses[name] for name in lower) < min(losses[name] for name in higher)
        for lower, higher in pairwise(groups)
    )
    numbers = ", ".join(f"{TITLES[name]} {loss:.3f}" for name, loss in losses.items())
    return verdict(in_order, f"{measure[0].upper()}{measure[1:]}: {numbers}.")


def _loss_rule(text: str, measure: str, *groups: tuple[str, ...]) -> Rule:
    return special(text, partial(_in_order, measure=measure, groups=groups))


def _positions(config: Config, count: int) -> list[int]:
    step = (config["length"] - 1) // count
    return [step * (n + 1) for n in range(count)]


def _panel_title(cell: Cell) -> str:
    hidden, expansion = str(cell["memory"]).split("×")
    return f"{cell['optimizer']}; {hidden} hidden layers, ×{expansion}"


LEARNABILITY = Experiment(
    name="atlas-learnability",
    title="Online learning of an MLP memory",
    source="ATLAS section 6.4, figure 6",
    protocol=(
        "A sequence of pairs (i_t, o_t) is shown once, and a network takes one optimizer step per "
        "pair on ‖M(i) − o‖²/‖o‖²; measured is that loss on the next pair before the step on it. "
        "(SGD's steps have the factor 2/‖o‖²; the others take ½‖M(i) − o‖², to whose scale they "
        "are nearly blind.) "
        "Five mappings: 1 a low-rank matrix, 2 an MLP, 3 causal attention then an MLP, 4 the same "
        "with the attention's outputs given as inputs, 5 as 3 in a sliding window. The network is "
        "the recipe's memory and the optimizer its algorithm; of each optimizer the best of a few "
        "rates. Smaller than the paper (d = 256, window 512, 2 and 3 hidden layers, ×1 and ×4): "
        "see the configuration; the window stays a quarter of the sequence."
    ),
    claims=(
        Claim(
            name="1 is easiest",
            text="The models usually learn best in setting 1.",
            rule=_loss_rule(
                "With the best optimizer, the mean over seeds and memories of the loss in the last "
                "quarter is smallest for mapping 1.",
                "last quarter",
                ("low_rank",),
                MAPPINGS[1:],
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="4 faster than 2",
            text="Correlated inputs make the model learn 4 faster than 2.",
            rule=_loss_rule(
                "Averaged over positions, seeds and memories, the loss of mapping 4 is below that "
                "of mapping 2.",
                "loss",
                ("attention_inputs",),
                ("mlp",),
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="3 and 5 hardest",
            text="The models do worst in 3 and 5, and better in 3 than in 5.",
            rule=_loss_rule(
                "In the last quarter the loss of 5 is above that of 3, and that of 3 above the "
                "others'.",
                "last quarter",
                ("low_rank", "mlp", "attention_inputs"),
                ("attention",),
                ("sliding",),
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "size": 8, "length": 48, "window": 12, "memories": ["2×1"]}
        | {"lrs": {"SGD": [0.1], "Muon": [0.03]}},
        "small": {"seeds": 3, "size": 64, "length": 1024, "window": 256, "memories": ["2×1", "3×1"]}
        | {"lrs": {"SGD": [0.03, 0.1, 0.3], "Adam": [0.001, 0.003, 0.01]}},
        "paper": {"seeds": 3, "size": 256, "length": 4096, "window": 512}
        | {"memories": ["2×1", "3×1", "2×4", "3×4"]}
        | {
            "lrs": {
                "SGD": [0.01, 0.03, 0.1, 0.3],
                "RMSProp": [1e-4, 3e-4, 1e-3],
                "Adam": [1e-4, 3e-4, 1e-3, 3e-3],
                "Muon": [0.003, 0.01, 0.03],
            }
        },
    },
    cells=lambda config: [
        {"mapping": name, "memory": memory, "optimizer": optimizer}
        for memory in config["memories"]
        for optimizer in config["lrs"]
        for name in MAPPINGS
    ],
    measure=_measure,
    figure=Lines(
        x=_positions,
        y="by position",
        by={"mapping": MAPPINGS},
        panels=("memory", "optimizer"),
        name=lambda cell: TITLES[cell["mapping"]],
        panel_title=_panel_title,
        y_label="relative loss",
        log_y=True,
        x_label="position t",
        title="Learning a map online",
        height=2.2,
    ),
    notes=(
        "Two memories, two optimizers and three rates of each: with all of them mapping 4 is "
        "learned better than mapping 1, whose rank (an eighth of d) the paper leaves open. Late in "
        "the sequence the inputs of 4 are means of many values and hardly move, as the paper "
        "remarks of its own."
    ),
)

EXPERIMENTS = (LEARNABILITY,)
