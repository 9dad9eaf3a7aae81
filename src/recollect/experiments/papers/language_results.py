"""What rules and figures ask of the papers' language models: bits by cell, rankings and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recollect.experiments.framework.records import NotMeasured, Results
from recollect.experiments.papers.language import BIGRAM, BITS
from recollect.report.figures import RenderedFigure, Series, ranking_figure

__all__ = ["beside_bigram", "bits", "curves_by", "learned", "ranked_models", "told"]


def bits(results: Results, **cell: Any) -> float:
    """The mean bits per byte over seeds; a model that diverged with one is worse than any.

    Args:
        results: of an experiment.
        **cell: what the grid varies, by name.

    Raises:
        NotMeasured: it was not measured.
    """
    found = results.mean(BITS, **cell)
    return math.inf if math.isnan(found) else found


def learned(results: Results, *, models: Sequence[str] | None = None, **cell: Any) -> None:
    """That there is something to judge: the best of some models knows more than a byte bigram.

    Args:
        results: of an experiment; where no bigram stands beside the models, all is judged.
        models: those that a claim names; all if omitted.
        **cell: what the grid varies, by name.

    Raises:
        NotMeasured: none does, or none was measured.
    """
    found = [
        record.values
        for record in results.select(**cell)
        if BITS in record.values and (models is None or record.cell["model"] in models)
    ]
    if not found:
        raise NotMeasured(f"{BITS} were not measured")
    numbers = [(float(one[BITS]), float(one.get(BIGRAM, math.inf))) for one in found]  # type: ignore[arg-type]
    if not any(own < bigram for own, bigram in numbers):
        best, bigram = min(own for own, _ in numbers), numbers[0][1]
        raise NotMeasured(
            f"no model here knows more than a byte bigram: {best:.3f} bits per byte at best, and "
            f"{bigram:.3f} of the bigram"
        )


def told(found: Mapping[str, float]) -> str:
    """Names and bits in a sentence, the least first.

    Args:
        found: bits by name.
    """
    return ", ".join(
        f"{name} {value:.3f}" if math.isfinite(value) else f"{name} diverged"
        for name, value in sorted(found.items(), key=lambda item: item[1])
    )


def ranked_models(
    results: Results, *, axis: str, title: str, marked: Mapping[str, Sequence[str]]
) -> RenderedFigure:
    """Models by their bits per byte, one row each.

    Args:
        results: of an experiment.
        axis: of the grid that names models.
        title: of the figure.
        marked: what models of a kind are, and their names.
    """
    return ranking_figure(
        {str(name): results.values(BITS, **{axis: name}) for name in results.axis_values(axis)},
        x="held-out bits per byte",
        title=title,
        groups=marked,
        baselines=beside_bigram(results),
    )


def beside_bigram(results: Results) -> dict[str, float]:
    """The byte bigram as a figure's baseline, where one was measured.

    Args:
        results: of an experiment.
    """
    found = [record.values[BIGRAM] for record in results if BIGRAM in record.values]
    return {BIGRAM: float(found[0])} if found else {}  # type: ignore[arg-type]


def curves_by(results: Results, *, line: str, along: str, **cell: Any) -> list[Series]:
    """Bits per byte along one axis of a grid, a line for each place on another.

    Args:
        results: of an experiment.
        line: axis whose places are lines.
        along: axis of numbers.
        **cell: what the grid varies besides, by name.

    Raises:
        NotMeasured: it was not measured.
    """
    series = []
    for name in results.axis_values(line, **cell):
        here = {**cell, line: name}
        places = sorted(results.axis_values(along, **here))
        each = [results.values(BITS, **here, **{along: place}) for place in places]
        series.append(
            Series(
                name=str(name),
                x=places,
                y=[sum(some) / len(some) for some in each],
                low=[min(some) for some in each],
                high=[max(some) for some in each],
            )
        )
    return series
