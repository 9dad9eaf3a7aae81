"""Plan and report of a distillation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recollect.lm.model.config import RecipeLike, resolve_recipe
from recollect.report.tables import Table

__all__ = ["DistillPlan", "DistillStage", "Distilled"]

STAGES = ("match_layers", "match_logits", "fine_tune")
"""Names of the steps that train, in order."""

DEFAULT_STEPS = 100
DEFAULT_LR: Mapping[str, float] = {"match_layers": 4e-3, "match_logits": 2e-3, "fine_tune": 2e-3}
DEFAULT_HELDOUT_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class DistillPlan:
    """Plan of `distill`.

    Attributes:
        teacher: folder or hub name of a decoder with attention.
        recipe: recipe of the new layers: a zoo name, a preset, a recipe, or a recipe with its
            options.
        out: folder of all results; the final model is in ``out/model``.
        data: keys of ``[data]`` in the file of a run, without ``tokenizer``. A tenth of the rows is
            held out by default.
        layers: indices of the layers to replace, negative ones from the end; all by default.
        keep_attention: number of these layers that keep their attention: those whose replacement
            alone raises the held-out loss most.
        calibrate: whether gates are initialized from the attention that they replace.
        steps: numbers of optimizer steps of ``"match_layers"``, ``"match_logits"`` and
            ``"fine_tune"``, 100 each by default; 0 leaves a step out.
        lr: their peak learning rates, by default 4e-3, 2e-3 and 2e-3.
        optimizer: keys of ``[optimizer]`` for all of them, such as ``batch``.
        run: keys of ``[run]`` for all of them, such as ``save_every``, ``seed`` and ``device``.

    Raises:
        ValueError: a step or key that does not exist, or a number that is negative.

    Examples:
        >>> plan = rc.lm.DistillPlan(
        ...     teacher="llama", recipe="gated_delta_net", out="runs/swapped",
        ...     data={"train": "text.txt", "context": 64}, steps={"fine_tune": 0},
        ... )
        >>> plan.num_steps
        {'match_layers': 100, 'match_logits': 100, 'fine_tune': 0}
    """

    teacher: str
    recipe: RecipeLike
    out: str
    data: Mapping[str, Any]
    layers: tuple[int, ...] | None = None
    keep_attention: int = 0
    calibrate: bool = True
    steps: Mapping[str, int] = field(default_factory=dict)
    lr: Mapping[str, float] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (("steps", self.steps), ("lr", self.lr)):
            for stage in values:
                if stage not in STAGES:
                    raise ValueError(
                        f"{name} has no step {stage!r}: the steps are {', '.join(STAGES)}"
                    )
        for stage, count in self.steps.items():
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"steps[{stage!r}] must be an integer of at least 0, not {count}")
        if self.keep_attention < 0:
            raise ValueError(f"keep_attention must be at least 0, not {self.keep_attention}")
        owners = {
            "data": (("tokenizer",), "the teacher brings its tokenizer"),
            "optimizer": (("steps", "tokens", "lr"), "use steps and lr of the plan itself"),
            "run": (("out",), "use out of the plan itself"),
        }
        for name, (keys, reason) in owners.items():
            for key in keys:
                if key in getattr(self, name):
                    raise ValueError(f"{name} has the key {key!r}, and {reason}: leave it out")

    @property
    def num_steps(self) -> dict[str, int]:
        """Number of optimizer steps by the name of the step, in order."""
        return {stage: self.steps.get(stage, DEFAULT_STEPS) for stage in STAGES}

    def train_tables(self, stage: str, *, start: Path) -> dict[str, Any]:
        """Return the tables of the `TrainPlan` of a step.

        Args:
            stage: name of the step.
            start: folder of the model that it starts from.
        """
        data = dict(self.data)
        if not {"heldout", "heldout_share", "heldout_split"} & set(data):
            data["heldout_share"] = DEFAULT_HELDOUT_SHARE
        return {
            "model": {"start": str(start)},
            "data": data,
            "optimizer": {
                **self.optimizer,
                "steps": max(self.num_steps[stage], 1),
                "lr": self.lr.get(stage, DEFAULT_LR[stage]),
            },
            "run": {**self.run, "out": str(Path(self.out) / stage)},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the recipe and its options in full."""
        recipe, options = resolve_recipe(self.recipe)
        data = {
            "teacher": self.teacher,
            "recipe": recipe.to_dict(),
            "options": options.to_dict(),
            "data": dict(self.data),
            "layers": None if self.layers is None else list(self.layers),
            "keep_attention": self.keep_attention,
            "calibrate": self.calibrate,
            "steps": self.num_steps,
            "lr": {**DEFAULT_LR, **self.lr},
            "optimizer": dict(self.optimizer),
            "run": {k: x for k, x in self.run.items() if k in ("seed", "bf16")},
        }
        return json.loads(json.dumps(data))


@dataclass(frozen=True, kw_only=True)
class DistillStage:
    """A step of a distillation.

    Attributes:
        name: ``"swap"``, ``"calibrate"``, ``"match_layers"``, ``"match_logits"``, ``"fine_tune"``.
        steps: number of optimizer steps.
        loss: held-out loss before and after it, in nats per token.
        agreement: mean fraction of a greedy continuation of half a document before the first token
            that differs from the teacher's, before and after it.

    Examples:
        >>> stage = rc.lm.DistillStage(
        ...     name="swap", steps=0, loss=(2.0, 3.5), agreement=(1.0, 0.1)
        ... )
        >>> stage.loss[1] - stage.loss[0]
        1.5
    """

    name: str
    steps: int
    loss: tuple[float, float]
    agreement: tuple[float, float]

    def __str__(self) -> str:
        loss = " → ".join(f"{x:.3f}" for x in self.loss)
        agreement = " → ".join(f"{x:.0%}" for x in self.agreement)
        return f"{self.name}: {self.steps:,} steps, loss {loss}, continuations {agreement}"


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """Result of `distill`, also in ``distill.json`` of its folder.

    Attributes:
        model: the final model.
        folder: folder of the final model and its tokenizer.
        layers: indices of the replaced layers.
        damage: rise of the held-out loss if one layer alone is replaced, by its index; empty
            without ``keep_attention``.
        stages: the steps, in order.

    Examples:
        >>> from dataclasses import fields  # of rc.lm.distill(plan)
        >>> [field.name for field in fields(rc.lm.Distilled)][:3]
        ['model', 'folder', 'layers']
    """

    model: Any
    folder: Path
    layers: tuple[int, ...]
    damage: Mapping[int, float]
    stages: tuple[DistillStage, ...]

    @property
    def recovered(self) -> float:
        """Fraction of the lost loss that the later steps recovered; NaN if none was lost."""
        teacher, swapped = self.stages[0].loss
        if swapped == teacher:
            return math.nan
        return (swapped - self.stages[-1].loss[1]) / (swapped - teacher)

    def __str__(self) -> str:
        rows: list[list[str]] = []
        for stage in self.stages:
            loss, agreement = stage.loss, stage.agreement
            pair = f"{agreement[0]:.0%} → {agreement[1]:.0%}"
            rows.append([stage.name, f"{stage.steps:,}", f"{loss[0]:.3f} → {loss[1]:.3f}", pair])
        layers = ", ".join(map(str, self.layers))
        recovered = "no loss was lost"
        if not math.isnan(self.recovered):
            recovered = f"{self.recovered:.0%} of the lost loss recovered"
        return Table(
            title=f"replaced layers {layers}: {recovered}",
            columns=["step", "optimizer steps", "held-out loss", "continuations"],
            rows=rows,
            caption="continuations: mean fraction before the first token that is not the teacher's",
        ).to_text()
