"""Language models of equal size and tokens: ATLAS tables 2 and 8."""

from recollect.experiments.framework import Claim, below, increasing
from recollect.experiments.papers.language_models import BITS, bits_ranking, language_models

__all__ = ["EXPERIMENTS", "PAPER"]

ATTENTION = "softmax_attention"
DEEP_ATTENTION = ("deep_transformer", "dot")
ATLAS = ("omega_net", "atlas", "atlas_plus_plus", "atlas_mag", "atlas_mal")
BASELINES = ("retnet", "delta_net", "ttt_linear", "gated_delta_net", "samba", "gated_delta_net_h2")
SMALL = (ATTENTION, *DEEP_ATTENTION, "swdt", "gated_delta_net", "dla", "titans", *ATLAS)
MODELS = (ATTENTION, *DEEP_ATTENTION, *BASELINES, "titans", "memora", "swdt", "dla", *ATLAS)

PAPER = {
    "channels": 32,
    "data": {
        "dataset": "HuggingFaceFW/fineweb",
        "name": "sample-100BT",
        "tokenizer": "fla-hub/gla-1.3B-100B",
    },
}
"""Changes for the data of the ATLAS paper."""

TABLE2 = language_models(
    name="atlas-table2",
    title="Language models of equal size",
    source="ATLAS tables 2 and 8",
    protocol=(
        "Transformer++ (softmax attention with rotary positions), DeepTransformers, Dot, SWDT, "
        "DLA, Titans, OmegaNet, Atlas, Atlas++, Atlas as gate (MAG) and as layer (MAL), each with "
        "the options of its preset, at equal parameters and tokens. The paper: 340M to 1.3B "
        "parameters on 15 to 100 · 10⁹ tokens of FineWeb, perplexity of WikiText and LAMBADA, "
        "eight accuracies. Small scale: two layers of width 64 with eight heads of eight channels, "
        "240,000 parameters, 100 steps of 512 bytes of the documentation of Python and torch, "
        "sequences of 128, held-out bits per byte; Gated DeltaNet is the only baseline of "
        "miras-table2. This shows that every model learns and how fast. It does not predict the "
        "order after 10¹⁰ tokens. The paper's scale is the 760M of table 2, with heads of 32 "
        "channels: with polynomials of 96 channels the learned initial memories alone would be "
        "larger than the model."
    ),
    claims=(
        Claim(
            name="below Titans",
            text="Atlas and OmegaNet have lower perplexity than Titans.",
            rule=below(BITS, lower=("atlas", "omega_net"), upper=("titans",)),
            scales=("paper",),
        ),
        Claim(
            name="Transformers",
            text="Dot has lower perplexity than DeepTransformers, and they than Transformer++.",
            rule=increasing(BITS, along="model", order=(*DEEP_ATTENTION[::-1], ATTENTION)),
            scales=("paper",),
        ),
    ),
    smoke={"models": [ATTENTION, "dot", "titans", "atlas", "atlas_mag"]},
    small={"heads": 8, "models": list(SMALL)},
    paper=PAPER | {"models": list(MODELS)},
    figure=bits_ranking(
        "Language models at equal parameters and tokens",
        {"ATLAS": (*DEEP_ATTENTION, "swdt", "dla", *ATLAS)},
    ),
    tables=("atlas_table2", "atlas_table8"),
)

EXPERIMENTS = (TABLE2,)
