"""Results of `diagnose`: curves by head, the first fault, and findings in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.recipe.recipe import Recipe
from recollect.report.tables import Column, Table

if TYPE_CHECKING:
    from recollect.report.figures import RenderedFigure

__all__ = ["OVERSHOOT", "SMALLER_STEPS", "Diagnosis", "Fault", "ModelDiagnosis", "short"]

SMALLER_STEPS = (
    "measure them (normalized_steps=True of its algorithm), or take a smaller inner batch or rate"
)
"""What to do about steps of a memory that diverge."""
OVERSHOOT = 2.0
GROWS = 100.0  # times its start: a norm that is on its way out of every range
FADES = 0.05  # of its largest: what was held is all but forgotten


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first value that is not finite.

    Attributes:
        what: which tensor: ``"x"``, ``"q"``, ``"gate lr"``, ``"param ..."``, ``"memory W1"``,
            ``"output"``.
        row, token, head: where; ``None`` where the tensor has no such axis. A memory's token is
            that of the first output that is not finite, or else the last of its inner batch.
        gate: the gate behind it, as far as can be told.
        why: in words.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
        >>> x = torch.randn(1, 6, 8)
        >>> x[0, 3] = torch.nan
        >>> fault = rc.diagnose(layer, x).first
        >>> fault.what, fault.token
        ('x', 3)
    """

    what: str
    row: int | None = None
    token: int | None = None
    head: int | None = None
    gate: str | None = None
    why: str = ""

    def __str__(self) -> str:
        named = (("token", self.token), ("head", self.head), ("row", self.row))
        place = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        gate = f", gate {self.gate!r}" if self.gate else ""
        return f"{self.what} is not finite{' at ' + place if place else ''}{gate}: {self.why}"


READING = "norms: first and last; surprise and step: means of the first and last third"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was measured; curves are means over the rows of the batch, on the CPU.

    Attributes:
        recipe: the layer's. engine: what ran it. batch: b, tokens per inner batch.
        places: tokens written when norms were taken ``[P]``: the borders of inner batches.
        memory: norm of the state A by map ``[P, H]``; empty where a memory keeps associations.
        slots: norm of the algorithm's own state (momentum, moments) over all maps ``[P, H]``.
        surprise: loss before the write ``[T, H]``. step: effective step ``[T, H]``, see the module.
            NaN from the first fault on; the step also in an inner batch that is still open.
        saturated: by gate, share of its values within a hundredth of an end of its range, ``[H]``.
            A decay is at an end where it keeps 99 % over the whole sequence, or 1 % per token.
        first: the first value that is not finite, or ``None``.
        share: of the stability limit, that the token's rate is ``[T, H]``, where a layer has such.
        steep: top eigenvalue of rates times the kernel of the tangent features, per inner batch
            ``[batches, H]``, where a deep memory's steps add up linearly: beyond 2 what is written
            again and again diverges.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
        >>> found = rc.diagnose(layer, torch.randn(1, 6, 8))
        >>> found.surprise.shape, found.first
        (torch.Size([6, 2]), None)
    """

    recipe: Recipe
    engine: str
    batch: int
    places: Tensor
    memory: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    surprise: Tensor
    step: Tensor
    saturated: Mapping[str, Tensor] = field(default_factory=dict)
    first: Fault | None = None
    share: Tensor | None = None
    steep: Tensor | None = None

    @property
    def heads(self) -> int:
        """H, number of memories."""
        return self.surprise.shape[1]

    @property
    def findings(self) -> tuple[str, ...]:
        """What should be looked at, worst first; empty when nothing was found."""
        findings = [] if self.first is None else [str(self.first)]
        for head in range(self.heads):
            steps = self.step[:, head]
            steps = steps[steps.isfinite()]
            over = (steps > OVERSHOOT).double().mean().item() if len(steps) else 0.0
            if over:
                findings.append(
                    f"head {head}: {over:.0%} of the writes overshoot, the largest removes "
                    f"{short(steps.max().item())} times the error: smaller steps, or shorter keys"
                )
            elif self.first is None and len(steps) and steps.abs().max() < 1e-3:
                findings.append(f"head {head}: next to nothing is written: larger steps")
            for name, norm in {**self.memory, **self.slots}.items():
                there = norm[:, head].isfinite()
                ends, places = norm[there, head], self.places[there]
                if len(ends) < 2:
                    continue
                if ends[-1] > GROWS * ends[0].clamp_min(1.0):
                    findings.append(
                        f"head {head}: the norm of {name} grows from {short(ends[0].item())} to "
                        f"{short(ends[-1].item())}: faster decays, or a retention that bounds it"
                    )
                elif name in self.memory and ends[-1] < FADES * ends.max():
                    top = int(ends.argmax())
                    findings.append(
                        f"head {head}: the norm of {name} fades from {short(ends[top].item())} to "
                        f"{short(ends[-1].item())} within {places[-1] - places[top]} tokens: "
                        "slower decays, or larger steps"
                    )
        for head, top in enumerate([] if self.steep is None else self.steep.amax(0).tolist()):
            if top > OVERSHOOT:
                findings.append(
                    f"head {head}: the steps of one inner batch move its errors by up to "
                    f"{short(top)} times themselves, and repeated writes diverge beyond 2: smaller "
                    "steps, or normalized_steps=True, whose rate is a share of what is stable"
                )
        for name, share in self.saturated.items():
            for head in (share > 0.5).nonzero().flatten().tolist():
                findings.append(f"head {head}: gate {name!r} is saturated at {share[head]:.0%}")
        return tuple(findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: lists, NaN as null."""
        return {
            "recipe": self.recipe.to_dict(),
            "engine": self.engine,
            "batch": self.batch,
            "places": self.places.tolist(),
            "memory": {name: _listed(x) for name, x in self.memory.items()},
            "slots": {name: _listed(x) for name, x in self.slots.items()},
            "surprise": _listed(self.surprise),
            "step": _listed(self.step),
            "share": None if self.share is None else _listed(self.share),
            "steep": None if self.steep is None else _listed(self.steep),
            "saturated": {name: _listed(x) for name, x in self.saturated.items()},
            "first": None if self.first is None else vars(self.first),
            "findings": list(self.findings),
        }

    def __str__(self) -> str:
        return self._table(READING, *(f"- {line}" for line in self._told())).to_text()

    def _repr_html_(self) -> str:
        return self._table(*self._told(), READING).to_html(notebook=True)

    def _table(self, *notes: str) -> Table:
        columns = self._columns()
        return Table(
            title=self._title(),
            columns=[Column(name=name, align="left") for name in columns],
            rows=list(zip(*columns.values(), strict=True)),
            caption="\n".join(notes),
        )

    def _title(self) -> str:
        sizes = f"{self.heads} heads, {len(self.surprise)} tokens, inner batches of {self.batch}"
        return f"engine {self.engine}, {sizes}"

    def _told(self) -> tuple[str, ...]:
        return self.findings or ("nothing to report: all values are finite",)

    def _columns(self) -> dict[str, list[str]]:
        return {
            "head": [str(h) for h in range(self.heads)],
            **{f"‖{name}‖": self._ends(norm) for name, norm in self.memory.items()},
            **{f"‖{name}‖": self._ends(norm) for name, norm in self.slots.items()},
            "surprise": self._thirds(self.surprise),
            "step": self._thirds(self.step),
            **({} if self.share is None else {"share": self._thirds(self.share)}),
            **({} if self.steep is None else {"top of ηK": self._thirds(self.steep)}),
            **{f"{name} at an end": _shares(x) for name, x in self.saturated.items()},
        }

    def _ends(self, norm: Tensor) -> list[str]:
        return [f"{short(a)} → {short(b)}" for a, b in zip(*norm[[0, -1]].tolist(), strict=True)]

    def _thirds(self, curve: Tensor) -> list[str]:
        third = max(len(curve) // 3, 1)
        ends = [part.nanmean(0).tolist() for part in (curve[:third], curve[-third:])]
        return [f"{short(a)} → {short(b)}" for a, b in zip(*ends, strict=True)]

    def figure(self, title: str = "") -> RenderedFigure:
        """Norms, surprise and steps over the tokens, one line per head.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from recollect.report.figures import Panel, Series, panel_figure

        def lines(x: Tensor, curves: Tensor) -> list[Series]:
            places = x.tolist()
            return [
                Series(name=f"head {h}", x=places, y=curves[:, h].tolist())
                for h in range(self.heads)
            ]

        tokens = torch.arange(1, len(self.surprise) + 1)
        panels = [
            *(
                Panel(y=f"norm of {name}", series=lines(self.places, norm))
                for name, norm in {**self.memory, **self.slots}.items()
            ),
            Panel(y="surprise", series=lines(tokens, _smooth(self.surprise))),
            Panel(
                y="effective step",
                series=lines(tokens, _smooth(self.step)),
                baselines={"error gone": 1.0, "overshoots": OVERSHOOT},
            ),
        ]
        return panel_figure(
            panels, x="tokens", title=title or self.recipe.memory.prediction_text("k_t")
        )


@dataclass(frozen=True, kw_only=True)
class ModelDiagnosis:
    """Diagnoses of the layers of a model.

    Attributes:
        model: name of the model's class.
        layers: diagnoses by the name of the layer in the model, in the order of the model.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> diagnosis = rc.diagnose(rc.lm.RecollectForCausalLM(config), [1, 2, 3])
        >>> list(diagnosis.layers)
        ['model.blocks.0.layer', 'model.blocks.1.layer']
    """

    model: str
    layers: Mapping[str, Diagnosis]

    @property
    def findings(self) -> tuple[str, ...]:
        """Findings of all layers, each with the name of its layer."""
        return tuple(
            f"{name}: {finding}" for name, one in self.layers.items() for finding in one.findings
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        layers = {name: diagnosis.to_dict() for name, diagnosis in self.layers.items()}
        return {"model": self.model, "layers": layers}

    def __str__(self) -> str:
        sections = [f"{name}\n{diagnosis}" for name, diagnosis in self.layers.items()]
        return "\n\n".join([f"{self.model}: {len(self.layers)} memory layers", *sections])


def _listed(x: Tensor) -> Any:
    if x.dim() > 1:
        return [_listed(row) for row in x]
    return [v if math.isfinite(v) else None for v in x.tolist()]


def short(value: float) -> str:
    """Three digits, or a dash where there is nothing."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def _shares(x: Tensor) -> list[str]:
    return [f"{share:.0%}" for share in x.tolist()]


def _smooth(curve: Tensor) -> Tensor:
    """Running means over a fiftieth of the tokens: single tokens would hide the course."""
    width = max(len(curve) // 50, 1)
    padded = torch.nn.functional.pad(curve.T, (width - 1, 0), value=torch.nan)
    return padded.unfold(-1, width, 1).nanmean(-1).T
