"""An experiment: a grid of cells, how one is measured, the paper's claims and the rules on them.

A verdict rule is a pure function of the measured results. It is written, and committed, before the
experiment is run, and it contains no expected value that was measured here. Where one was changed
after a run had been seen, `Claim.changed` says so wherever its verdict is shown.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from recollect.experiments.framework.records import Cell, Missing, Results, Values
from recollect.report.figures import RenderedFigure

__all__ = [
    "SCALES",
    "Claim",
    "Experiment",
    "Planned",
    "Scale",
    "Verdict",
    "Work",
    "does_not_hold",
    "holds",
    "judged",
    "not_testable",
]

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")
Status = Literal["holds", "does not hold", "not testable at this scale"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the measured results say of a claim.

    Attributes:
        because: the numbers it rests on, in a sentence.

    Examples:
        >>> verdict = rc.experiments.Verdict(status="holds", because="0.91 against 0.42")
        >>> verdict.status
        'holds'
    """

    status: Status
    because: str


def holds(because: str) -> Verdict:
    """The claim holds."""
    return Verdict(status="holds", because=because)


def does_not_hold(because: str) -> Verdict:
    """The claim does not hold."""
    return Verdict(status="does not hold", because=because)


def not_testable(because: str) -> Verdict:
    """These results cannot tell."""
    return Verdict(status="not testable at this scale", because=because)


def judged(condition: bool, because: str) -> Verdict:
    """`holds` or `does_not_hold`."""
    return holds(because) if condition else does_not_hold(because)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of a paper that a run can contradict.

    Attributes:
        name: a word or two.
        text: what the paper says.
        rule: when the claim counts as holding, in words.
        changed: what the rule was before, and why it was changed, where that was after a run.
        judge: the rule.
        scales: at which it can be tested; elsewhere the verdict says so.

    Examples:
        >>> def judge(results):
        ...     recall = results.mean("recall", momentum=True)
        ...     status = "holds" if recall > 0.5 else "does not hold"
        ...     return rc.experiments.Verdict(status=status, because=f"recall of {recall}")
        >>> claim = rc.experiments.Claim(
        ...     name="momentum", text="Momentum recalls.", rule="recall above 0.5", judge=judge
        ... )
        >>> measured = [({"momentum": True}, 0, {"recall": 0.9})]
        >>> claim.judge(rc.experiments.Results.of(measured)).because
        'recall of 0.9'
    """

    name: str
    text: str
    rule: str
    judge: Callable[[Results], Verdict]
    scales: tuple[Scale, ...] = SCALES
    changed: str = ""

    def verdict(self, results: Results) -> Verdict:
        """The rule's verdict; what was not measured, or cannot be at this scale, is not judged."""
        if results.scale not in self.scales:
            return not_testable(
                f"{results.scale} scale shows that it runs; models learn little there"
            )
        try:
            return self.judge(results)
        except Missing as missing:
            return not_testable(f"{missing}.")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one cell costs, estimated before it is run.

    Attributes:
        flops: of matrix products, backward passes included.
        memory: bytes that must be held at once.
    """

    flops: float
    memory: float


Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure, table or theorem of a paper as a command.

    Attributes:
        name: as on the command line.
        title: what it shows. source: paper and place.
        protocol: how it is done, and where that differs from the paper, in sentences.
        claims: what is judged.
        configs: JSON-ready numbers by scale; ``seeds`` in each is how many are run.
        cells: the grid of a configuration.
        measure: measures one cell with one seed; a pure function of its arguments.
        draw: the figure.
        work: the price of one cell.
        tried: what was tried where a claim fails.
        tables: names of published tables (`framework.published`) shown beside the run.

    Examples:
        >>> experiment = rc.experiments.EXPERIMENTS["ttr-fig2"]
        >>> experiment.source, sorted(experiment.configs)
        ('TTR section 5, figure 2, eq. 55', ['paper', 'small', 'smoke'])
        >>> config = experiment.configs["smoke"]
        >>> experiment.cells(config)[0]
        {'layer': 'linear attention'}
    """

    name: str
    title: str
    source: str
    protocol: str
    claims: tuple[Claim, ...]
    configs: Mapping[Scale, Config]
    cells: Callable[[Config], Sequence[Cell]]
    measure: Callable[[Config, Cell, int, torch.device], Values]
    draw: Callable[[Results], RenderedFigure]
    work: Callable[[Config, Cell], Work]
    tried: str = ""
    tables: tuple[str, ...] = ()

    def config(self, scale: Scale, *, seeds: int | None = None) -> dict[str, Any]:
        """The configuration of a scale, with another number of seeds if one is given.

        Args:
            scale: ``"smoke"``, ``"small"`` or ``"paper"``.
            seeds: in place of the configuration's number, ≥ 1.

        Raises:
            ValueError: fewer than one seed.
        """
        config = dict(self.configs[scale])
        if seeds is not None:
            if seeds < 1:
                raise ValueError(f"--seeds must be at least 1, not {seeds}")
            # Where nothing is drawn at random, one seed says all.
            config["seeds"] = seeds if self.random else 1
        return config

    @property
    def random(self) -> bool:
        """Whether seeds matter."""
        return any(config["seeds"] > 1 for config in self.configs.values())

    @property
    def rules(self) -> str:
        """A digest of the claims and of the source of their rules."""
        parts = [(c.name, c.text, c.rule, inspect.getsource(c.judge)) for c in self.claims]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def verdicts(self, results: Results) -> list[tuple[Claim, Verdict]]:
        """Every claim with what the results say of it."""
        return [(claim, claim.verdict(results)) for claim in self.claims]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """An experiment that `--list` names and nobody can run yet."""

    name: str
    title: str
    source: str
    claim: str
    needs: str = field(default="language models")
