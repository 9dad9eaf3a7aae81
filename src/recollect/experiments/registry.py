"""All experiments by name, in the order of the papers."""

from __future__ import annotations

from recollect.experiments.framework.experiment import Experiment
from recollect.experiments.papers import scaling, word_problems
from recollect.experiments.papers.am import curriculum as am_curriculum
from recollect.experiments.papers.am import graphs as am_graphs
from recollect.experiments.papers.am import heads as am_heads
from recollect.experiments.papers.am import in_context as am_icl
from recollect.experiments.papers.am import snr as am_snr
from recollect.experiments.papers.am import state_exchange as am_untrained
from recollect.experiments.papers.am import swaps as am_swaps
from recollect.experiments.papers.atlas import ablations as atlas_ablations
from recollect.experiments.papers.atlas import capacity as atlas_capacity
from recollect.experiments.papers.atlas import learnability as atlas_learning
from recollect.experiments.papers.atlas import mad as atlas_mad
from recollect.experiments.papers.atlas import models as atlas_models
from recollect.experiments.papers.atlas import recall as atlas_recall
from recollect.experiments.papers.miras import ablations as miras_ablations
from recollect.experiments.papers.miras import models as miras_models
from recollect.experiments.papers.reading import babilong, documents, niah
from recollect.experiments.papers.ttr import recall as ttr_recall
from recollect.experiments.papers.ttr import regression as ttr

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for module in (
        ttr,
        ttr_recall,
        am_untrained,
        am_snr,
        am_icl,
        am_swaps,
        am_graphs,
        am_curriculum,
        atlas_capacity,
        atlas_learning,
        atlas_recall,
        atlas_mad,
        word_problems,
        am_heads,
        miras_models,
        miras_ablations,
        atlas_models,
        atlas_ablations,
        scaling,
        niah,
        babilong,
        documents,
    )
    for experiment in module.EXPERIMENTS
}
"""Experiments of `recollect reproduce`.

Examples:
    >>> rc.experiments.EXPERIMENTS["ttr-fig2"].source
    'TTR section 5, figure 2, eq. 55'
"""
