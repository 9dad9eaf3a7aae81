"""Results of `diagnose`: curves by head, the first fault, and findings as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.recipe.recipe import Recipe
from recollect.report.tables import Column, Table

if TYPE_CHECKING:
    from recollect.report.figures import RenderedFigure

__all__ = [
    "ADVICE_SMALLER_STEPS",
    "OVERSHOOT_LIMIT",
    "Diagnosis",
    "Fault",
    "ModelDiagnosis",
    "curves_to_json",
    "format_change",
    "format_number",
    "text_table",
]

ADVICE_SMALLER_STEPS = (
    "measure them (normalized_steps=True of its algorithm), or take a smaller inner batch or rate"
)
OVERSHOOT_LIMIT = 2.0
NORM_GROWTH_LIMIT = 100.0  # final norm over initial norm
NORM_DECAY_LIMIT = 0.05  # final norm over largest norm
CURVE_LEGEND = "norms and ranks: first and last; loss and step: means of the first and last third"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first value that is not finite.

    Attributes:
        quantity: name of the tensor: ``"x"``, ``"q"``, ``"gate lr"``, ``"param ..."``,
            ``"memory W1"``, ``"output"``.
        row, token, head: position in the tensor; ``None`` for axes that it lacks. For a memory,
            the token of the first output that is not finite, or the last token of the inner batch.
        gate: name of the gate that caused it, if known.
        cause: description of the cause.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
        >>> x = torch.randn(1, 6, 8)
        >>> x[0, 3] = torch.nan
        >>> fault = rc.diagnose(layer, x).first_fault
        >>> fault.quantity, fault.token
        ('x', 3)
    """

    quantity: str
    row: int | None = None
    token: int | None = None
    head: int | None = None
    gate: str | None = None
    cause: str = ""

    def __str__(self) -> str:
        indices = (("token", self.token), ("head", self.head), ("row", self.row))
        position = ", ".join(f"{name} {index}" for name, index in indices if index is not None)
        position = f" at {position}" if position else ""
        gate = f", gate {self.gate!r}" if self.gate else ""
        return f"{self.quantity} is not finite{position}{gate}: {self.cause}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Measurements of a memory; curves are means over the batch, on the CPU.

    Attributes:
        recipe: recipe of the layer.
        engine: name of the engine that ran it.
        batch: b, number of tokens per inner batch.
        positions: numbers of tokens after which norms were measured ``[P]``: the boundaries of
            inner batches.
        memory: norms of the state A by map ``[P, H]``; empty if the memory stores associations.
        rank: effective rank of each map ``[P, H]``: exp(−Σ p_i log p_i) with p_i = σ_i / Σ σ_j and
            the singular values σ. It is 0 for a map of zeros, at most the smaller size of the map,
            and missing for vectors. It is computed at no more than 257 boundaries; other boundaries
            repeat the last rank.
        max_rank: the smaller size of each map.
        half_life: tokens after which decays alone halve a memory, −log 2 / log α ``[T, H]``, of the
            geometric mean over channels; infinite if nothing decays, and missing without decays.
        error: surprise, the norm of ∂ℓ/∂prediction ``[T, H]``; NaN after the first fault.
        slots: norms of the state of the algorithm (momentum, moments) over all maps ``[P, H]``.
        loss: loss of the prediction before the write ``[T, H]``; NaN after the first fault.
        step: effective step ``[T, H]``, see `diagnose`; NaN after the first fault, and in an inner
            batch without its last token.
        saturated: by gate, fraction of its values within a hundredth of the ends of its range
            ``[H]``. A decay is saturated if it keeps 99 % over the sequence, or 1 % per token.
        first_fault: the first value that is not finite, or ``None``.
        limit_multiple: step size of each token in multiples of the stability limit ``[T, H]``, if
            the layer has a limit.
        curvature: largest eigenvalue of step sizes times the tangent kernel, per inner batch
            ``[batches, H]``, if the steps of a deep memory add up linearly. Repeated writes diverge
            above 2.

    Examples:
        >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
        >>> diagnosis = rc.diagnose(layer, torch.randn(1, 6, 8))
        >>> diagnosis.loss.shape, diagnosis.first_fault
        (torch.Size([6, 2]), None)
    """

    recipe: Recipe
    engine: str
    batch: int
    positions: Tensor
    memory: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    loss: Tensor
    step: Tensor
    limit_multiple: Tensor | None = None
    curvature: Tensor | None = None
    rank: Mapping[str, Tensor] = field(default_factory=dict)
    max_rank: Mapping[str, int] = field(default_factory=dict)
    half_life: Tensor | None = None
    error: Tensor | None = None
    saturated: Mapping[str, Tensor] = field(default_factory=dict)
    first_fault: Fault | None = None

    @property
    def heads(self) -> int:
        """H, number of memories."""
        return self.loss.shape[1]

    @property
    def findings(self) -> tuple[str, ...]:
        """Findings with advice, the worst first; empty if there are none."""
        return tuple(self._findings())

    def _findings(self) -> Iterator[str]:
        if self.first_fault is not None:
            yield str(self.first_fault)
        for head in range(self.heads):
            yield from (f"head {head}: {text}" for text in self._step_findings(head))
            yield from (f"head {head}: {text}" for text in self._norm_findings(head))
        tops = [] if self.curvature is None else self.curvature.amax(0).tolist()
        for head, top in enumerate(tops):
            if top > OVERSHOOT_LIMIT:
                yield (
                    f"head {head}: the steps of one inner batch move its errors by up to "
                    f"{format_number(top)} times themselves, and repeated writes diverge beyond 2: "
                    "smaller steps, or normalized_steps=True, whose rate is a multiple of the "
                    "stability limit"
                )
        for name, fractions in self.saturated.items():
            for head, fraction in enumerate(fractions.tolist()):
                if fraction > 0.5:
                    yield f"head {head}: gate {name!r} is saturated at {fraction:.0%}"

    def _step_findings(self, head: int) -> Iterator[str]:
        steps = self.step[:, head]
        steps = steps[steps.isfinite()]
        overshoots = (steps > OVERSHOOT_LIMIT).double().mean().item() if len(steps) else 0.0
        if overshoots:
            yield (
                f"{overshoots:.0%} of the writes overshoot, the largest removes "
                f"{format_number(steps.max().item())} times the error: smaller steps, or shorter "
                "keys"
            )
        elif self.first_fault is None and len(steps) and steps.abs().max() < 1e-3:
            yield "next to nothing is written: larger steps"

    def _norm_findings(self, head: int) -> Iterator[str]:
        for name, norms in {**self.memory, **self.slots}.items():
            is_finite = norms[:, head].isfinite()
            norm, positions = norms[is_finite, head], self.positions[is_finite]
            if len(norm) < 2:
                continue
            last, top = format_number(norm[-1].item()), int(norm.argmax())
            if norm[-1] > NORM_GROWTH_LIMIT * norm[0].clamp_min(1.0):
                yield (
                    f"the norm of {name} grows from {format_number(norm[0].item())} to {last}: "
                    "faster decays, or a retention that bounds it"
                )
            elif name in self.memory and norm[-1] < NORM_DECAY_LIMIT * norm.max():
                yield (
                    f"the norm of {name} decays from {format_number(norm[top].item())} to {last} "
                    f"within {positions[-1] - positions[top]} tokens: slower decays, or larger "
                    "steps"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as data for JSON: tensors as lists, NaN as null."""
        fields = {name: curves_to_json(value) for name, value in vars(self).items()}
        fault = None if self.first_fault is None else vars(self.first_fault)
        return {**fields, "first_fault": fault, "findings": list(self.findings)}

    def __str__(self) -> str:
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html(notebook=True)

    def _table(self) -> Table:
        columns = {
            "head": [str(head) for head in range(self.heads)],
            **{
                f"‖{name}‖": format_change(*norm[[0, -1]])
                for name, norm in {**self.memory, **self.slots}.items()
            },
            **{
                f"rank of {name} (of {self.max_rank[name]})": format_change(*rank[[0, -1]])
                for name, rank in self.rank.items()
            },
            "loss": _mean_by_third(self.loss),
            "step": _mean_by_third(self.step),
        }
        if self.limit_multiple is not None:
            columns["of limit"] = _mean_by_third(self.limit_multiple)
        if self.curvature is not None:
            columns["top of ηK"] = _mean_by_third(self.curvature)
        for name, fractions in self.saturated.items():
            columns[f"{name} at an end"] = [f"{fraction:.0%}" for fraction in fractions.tolist()]
        findings = self.findings or ("nothing to report: all values are finite",)
        sizes = f"{self.heads} heads, {len(self.loss)} tokens, inner batches of {self.batch}"
        notes = [CURVE_LEGEND, *(f"- {finding}" for finding in findings)]
        return text_table(f"engine {self.engine}, {sizes}", columns, notes)

    def plot(self, title: str = "") -> RenderedFigure:
        """Plot norms, ranks, losses and steps over the tokens, one line per head.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from recollect.report.figures import Panel, Series, panel_figure

        def lines(x: Tensor, curves: Tensor) -> list[Series]:
            return [
                Series(name=f"head {head}", x=x.tolist(), y=curves[:, head].tolist())
                for head in range(self.heads)
            ]

        tokens = torch.arange(1, len(self.loss) + 1)
        panels = [
            *(
                Panel(y=f"norm of {name}", series=lines(self.positions, norm))
                for name, norm in {**self.memory, **self.slots}.items()
            ),
            *(
                Panel(
                    y=f"effective rank of {name}",
                    series=lines(self.positions, rank),
                    baselines={"capacity": float(self.max_rank[name])},
                )
                for name, rank in self.rank.items()
            ),
            Panel(y="loss", series=lines(tokens, _running_mean(self.loss))),
            Panel(
                y="effective step",
                series=lines(tokens, _running_mean(self.step)),
                baselines={"error gone": 1.0, "overshoots": OVERSHOOT_LIMIT},
            ),
        ]
        title = title or self.recipe.memory.prediction_text("k_t")
        return panel_figure(panels, x="tokens", title=title)


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
            f"{name}: {finding}"
            for name, diagnosis in self.layers.items()
            for finding in diagnosis.findings
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all diagnoses as data for JSON."""
        layers = {name: diagnosis.to_dict() for name, diagnosis in self.layers.items()}
        return {"model": self.model, "layers": layers}

    def __str__(self) -> str:
        sections = [f"{name}\n{diagnosis}" for name, diagnosis in self.layers.items()]
        return "\n\n".join([f"{self.model}: {len(self.layers)} memory layers", *sections])


def curves_to_json(value: Any) -> Any:
    """Return tensors as lists with ``None`` in place of NaN and infinities, and other data."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [curves_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: curves_to_json(item) for key, item in value.items()}
    return value.to_dict() if isinstance(value, Recipe) else value


def text_table(title: str, columns: Mapping[str, list[str]], notes: list[str]) -> Table:
    """Return a table of text columns, with notes below it."""
    return Table(
        title=title,
        columns=[Column(name=name, align="left") for name in columns],
        rows=[*zip(*columns.values(), strict=True)],
        caption="\n".join(notes),
    )


def format_number(value: float) -> str:
    """Return three digits, or a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def format_change(first: Tensor, last: Tensor) -> list[str]:
    """Return texts such as ``1.5 → 0.2`` for two vectors."""
    pairs = zip(first.tolist(), last.tolist(), strict=True)
    return [f"{format_number(a)} → {format_number(b)}" for a, b in pairs]


def _mean_by_third(curve: Tensor) -> list[str]:
    third = max(len(curve) // 3, 1)
    return format_change(curve[:third].nanmean(0), curve[-third:].nanmean(0))


def _running_mean(curve: Tensor) -> Tensor:
    """Return means over a fiftieth of the tokens."""
    width = max(len(curve) // 50, 1)
    padded = torch.nn.functional.pad(curve.T, (width - 1, 0), value=torch.nan)
    return padded.unfold(-1, width, 1).nanmean(-1).T
