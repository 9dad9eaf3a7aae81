"""Language models of equal size and tokens: MIRAS table 2."""

from recollect.experiments.framework import Claim, below
from recollect.experiments.papers.language_models import BITS, bits_ranking, language_models

__all__ = ["EXPERIMENTS"]

MIRAS = ("moneta", "yaad", "memora")
RECURRENT = ("retnet", "gla", "mamba2", "delta_net", "ttt_linear", "gated_delta_net")
HYBRIDS = ("samba", "gated_delta_net_h2")
MIRAS_HYBRIDS = ("moneta_h", "yaad_h", "memora_h")
MODELS = ("softmax_attention", *RECURRENT, *MIRAS, *HYBRIDS, *MIRAS_HYBRIDS)

TABLE2 = language_models(
    name="miras-table2",
    title="Language models of equal size",
    source="MIRAS table 2",
    protocol=(
        "Transformer++ (softmax attention with rotary positions), six recurrent models, the three "
        "models of MIRAS, and hybrids of a memory and sliding-window attention, each with the "
        "options of its preset, at equal parameters and tokens. The paper: 340M to 1.3B parameters "
        "on 15 to 100 · 10⁹ tokens of FineWeb-Edu, perplexity of WikiText and LAMBADA and eight "
        "accuracies. Small scale: two layers of width 64, 240,000 parameters, 100 steps of 512 "
        "bytes of the documentation of Python and torch, sequences of 128, held-out bits per byte, "
        "without Gated DeltaNet-H2, whose pattern has three layers. This shows that every model "
        "learns and how fast. It does not predict the order after 10¹⁰ tokens. The table of three "
        "million parameters after 10⁶ bytes (results/language_models) has other settings. The "
        "paper's scale is the 760M of the table, with Mamba-2 instead of Mamba at 340M."
    ),
    claims=(
        Claim(
            name="below all recurrent baselines",
            text="MONETA, YAAD and MEMORA have lower perplexity than every recurrent baseline.",
            rule=below(BITS, lower=MIRAS, upper=RECURRENT),
            scales=("paper",),
        ),
        Claim(
            name="below the Transformer",
            text="MONETA, YAAD and MEMORA have lower perplexity than Transformer++.",
            rule=below(BITS, lower=MIRAS, upper=("softmax_attention",)),
            scales=("paper",),
        ),
        Claim(
            name="hybrids",
            text="MIRAS's hybrids have lower perplexity than Samba and Gated DeltaNet-H2.",
            rule=below(BITS, lower=MIRAS_HYBRIDS, upper=HYBRIDS),
            scales=("paper",),
        ),
    ),
    smoke={"models": ["softmax_attention", "gated_delta_net", "yaad", "samba"]},
    small={"models": [name for name in MODELS if name != "gated_delta_net_h2"]},
    paper={"models": list(MODELS)},
    figure=bits_ranking(
        "Language models at equal parameters and tokens",
        {"MIRAS": MIRAS, "MIRAS, hybrid": MIRAS_HYBRIDS, "hybrid": HYBRIDS},
    ),
    tables=("miras_table2",),
)

EXPERIMENTS = (TABLE2,)
