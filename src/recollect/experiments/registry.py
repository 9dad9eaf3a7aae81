"""Every experiment by name, in the order of the papers, and those that are planned."""

from __future__ import annotations

from recollect.experiments.framework.experiment import Experiment, Planned
from recollect.experiments.papers import word_problems
from recollect.experiments.papers.am import curriculum as am_curriculum
from recollect.experiments.papers.am import graphs as am_graphs
from recollect.experiments.papers.am import in_context as am_icl
from recollect.experiments.papers.am import snr as am_snr
from recollect.experiments.papers.am import state_exchange as am_untrained
from recollect.experiments.papers.am import swaps as am_swaps
from recollect.experiments.papers.atlas import capacity as atlas_capacity
from recollect.experiments.papers.atlas import learnability as atlas_learning
from recollect.experiments.papers.atlas import mad as atlas_mad
from recollect.experiments.papers.atlas import recall as atlas_recall
from recollect.experiments.papers.reading import babilong, documents, niah
from recollect.experiments.papers.ttr import recall as ttr_recall
from recollect.experiments.papers.ttr import regression as ttr

__all__ = ["EXPERIMENTS", "PLANNED"]

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
        niah,
        babilong,
        documents,
    )
    for experiment in module.EXPERIMENTS
}
"""What `recollect reproduce` can run."""

PLANNED: tuple[Planned, ...] = (
    Planned(
        name="am-fig2",
        title="Heads of linear and softmax attention",
        source="AM 3.1, figure 2",
        claim="fewer heads help the linear kernel and hurt the exponential one",
    ),
    Planned(
        name="miras-table2",
        title="Language models of equal size",
        source="MIRAS table 2",
        claim="MONETA, YAAD and MEMORA have lower perplexity than every recurrent baseline",
    ),
    Planned(
        name="miras-pq",
        title="Powers of bias and retention",
        source="MIRAS figure 4",
        claim="p = 3 is best and 4 worst; q, not p, changes how perplexity scales with length",
    ),
    Planned(
        name="miras-ablation",
        title="YAAD without its parts",
        source="MIRAS table 4",
        claim="each part helps",
    ),
    Planned(
        name="atlas-table2",
        title="Language models of equal size",
        source="ATLAS tables 2 and 8",
        claim="Atlas and OmegaNet below Titans; Dot below DeepTransformers below Transformer++",
    ),
    Planned(
        name="atlas-window",
        title="OmegaNet's window by context length",
        source="ATLAS figure 5",
        claim="a larger window helps",
    ),
    Planned(
        name="atlas-ablation",
        title="Atlas without its parts",
        source="ATLAS table 6",
        claim="polynomial features and a deep memory matter most",
    ),
    Planned(
        name="scaling",
        title="Perplexity against FLOPs and context length",
        source="MIRAS figure 3, ATLAS figure 8",
        claim="deep memories gain more from length",
    ),
)
"""What needs language models, and cannot be run yet."""
