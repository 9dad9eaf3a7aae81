"""All experiments by name, in the order of the papers."""

from __future__ import annotations

from recollect.experiments.framework.experiment import Experiment
from recollect.experiments.papers import reduction, scaling, word_problems
from recollect.experiments.papers.am.curriculum import FIG6 as AM_FIG6
from recollect.experiments.papers.am.graphs import FIG7 as AM_FIG7
from recollect.experiments.papers.am.heads import FIG2 as AM_FIG2
from recollect.experiments.papers.am.in_context import ICL
from recollect.experiments.papers.am.snr import SNR
from recollect.experiments.papers.am.state_exchange import EXCHANGE
from recollect.experiments.papers.am.superposition import FIG5 as AM_FIG5
from recollect.experiments.papers.am.swaps import FIG4 as AM_FIG4
from recollect.experiments.papers.am.swaps import FIG8 as AM_FIG8
from recollect.experiments.papers.atlas import ablations as atlas_ablations
from recollect.experiments.papers.atlas import capacity, learnability, mad
from recollect.experiments.papers.atlas import models as atlas_models
from recollect.experiments.papers.atlas import recall as atlas_recall
from recollect.experiments.papers.miras import ablations as miras_ablations
from recollect.experiments.papers.miras import models as miras_models
from recollect.experiments.papers.reading import babilong, documents, niah
from recollect.experiments.papers.ttr.forecasting import FIG2 as TTR_FIG2
from recollect.experiments.papers.ttr.recall import FIG3 as TTR_FIG3
from recollect.experiments.papers.ttr.stability import STABILITY

__all__ = ["EXPERIMENTS"]

_ALL: tuple[Experiment, ...] = (
    *(TTR_FIG2, STABILITY, TTR_FIG3),
    *(EXCHANGE, SNR, ICL, AM_FIG4, AM_FIG8, AM_FIG5, AM_FIG7, AM_FIG6),
    *(capacity.EXPERIMENTS + learnability.EXPERIMENTS + atlas_recall.EXPERIMENTS),
    *(mad.EXPERIMENTS + word_problems.EXPERIMENTS + (AM_FIG2,)),
    *(miras_models.EXPERIMENTS + miras_ablations.EXPERIMENTS),
    *(atlas_models.EXPERIMENTS + atlas_ablations.EXPERIMENTS + scaling.EXPERIMENTS),
    *reduction.EXPERIMENTS,
    *(niah.EXPERIMENTS + babilong.EXPERIMENTS + documents.EXPERIMENTS),
)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
"""Experiments of `recollect reproduce`.

Examples:
    >>> rc.experiments.EXPERIMENTS["ttr-fig2"].source
    'TTR section 5, figure 2, eq. 55'
"""
