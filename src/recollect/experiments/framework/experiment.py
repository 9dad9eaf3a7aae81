"""An experiment: a grid of cells, a measurement of one cell, the paper's claims and their rules.

A rule is a pure function of the measured results. It is written, and committed, before the
experiment is run, and it contains no value that was measured here. If one was changed after a run,
`Claim.rule_history` describes the change, and every page that shows its verdict prints it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from recollect.experiments.framework.records import Cell, NotMeasured, Results, Values
from recollect.experiments.framework.rules import Rule, Verdict, not_testable
from recollect.report.figures import RenderedFigure

__all__ = ["SCALES", "Claim", "Config", "Experiment", "Scale"]

Scale = Literal["smoke", "small", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "small", "paper")

DIGEST_VERSION = 2
"""Form of `Experiment.rules_digest`. Version 1 hashed the source of the outermost functions."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of a paper that a run can contradict.

    Attributes:
        name: a word or two.
        text: the sentence.
        rule: the condition under which the claim holds, see `recollect.experiments.rules`.
        scales: those at which the claim can be tested. At others it is not testable.
        rule_history: an earlier rule, and the reason for changing it after a run.

    Examples:
        >>> from recollect.experiments import rules
        >>> claim = rc.experiments.Claim(
        ...     name="momentum",
        ...     text="Momentum recalls.",
        ...     rule=rules.at_least("recall", 0.5, momentum=True),
        ... )
        >>> claim.rule.text
        'The mean recall with momentum True is at least 0.5.'
        >>> measured = [({"momentum": True}, 0, {"recall": 0.9})]
        >>> claim.verdict(rc.experiments.Results.from_rows(measured)).evidence
        'Mean recall with momentum True is 0.9.'
    """

    name: str
    text: str
    rule: Rule
    scales: tuple[Scale, ...] = SCALES
    rule_history: str = ""

    def verdict(self, results: Results) -> Verdict:
        """Return the rule's verdict. A claim whose cells were not measured is not testable."""
        if results.scale not in self.scales:
            return not_testable(
                f"{results.scale} scale shows that it runs; models learn little there"
            )
        try:
            return self.rule.judge(results)
        except NotMeasured as error:
            return not_testable(f"{error}.")

    def to_dict(self, verdict: Verdict) -> dict[str, str]:
        """Return JSON-ready data of the claim and its verdict."""
        data = {
            "name": self.name,
            "claim": self.text,
            "rule": self.rule.text,
            "verdict": verdict.status,
            "evidence": verdict.evidence,
        }
        return data | ({"rule_history": self.rule_history} if self.rule_history else {})


Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure, table or theorem of a paper as a command.

    Attributes:
        name: as on the command line.
        title: of figure and report.
        source: paper and place.
        protocol: the procedure, and how it differs from the paper's, in sentences.
        claims: sentences of the paper with their rules.
        configs: JSON-ready numbers by scale; ``seeds`` in each is the number of seeds.
        cells: returns the grid of a configuration.
        measure: measures one cell with one seed; a pure function of its arguments.
        figure: draws the results.
        notes: results of other configurations, if a claim does not hold.
        tables: names of published tables (`framework.published`) that the report shows.

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
    figure: Callable[[Results], RenderedFigure]
    notes: str = ""
    tables: tuple[str, ...] = ()

    def config(self, scale: Scale, *, seeds: int | None = None) -> dict[str, Any]:
        """Return the configuration of a scale.

        Args:
            scale: ``"smoke"``, ``"small"`` or ``"paper"``.
            seeds: replaces the configuration's number of seeds; at least 1.

        Raises:
            ValueError: if ``seeds`` is below 1.
        """
        config = dict(self.configs[scale])
        if seeds is not None:
            if seeds < 1:
                raise ValueError(f"--seeds must be at least 1, not {seeds}")
            config["seeds"] = seeds if self.is_stochastic else 1
        return config

    @property
    def is_stochastic(self) -> bool:
        """Whether results depend on the seed."""
        return any(config["seeds"] > 1 for config in self.configs.values())

    @property
    def rules_digest(self) -> str:
        """A hash of the claims and their rules, after the version of its form."""
        parts = [(c.name, c.text, c.rule.to_dict()) for c in self.claims]
        text = json.dumps(parts, sort_keys=True)
        return f"{DIGEST_VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def verdicts(self, results: Results) -> list[tuple[Claim, Verdict]]:
        """Return every claim with its verdict on the results."""
        return [(claim, claim.verdict(results)) for claim in self.claims]
