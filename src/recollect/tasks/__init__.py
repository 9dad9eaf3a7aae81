"""What a model is trained and tested on: pure functions of a configuration and a generator.

A task over tokens gives pairs ``(inputs, labels)`` of int64 tensors ``[B, T]`` in which
``labels[b, t]`` is the token that the model's output at position ``t`` should name: labels are
already shifted. A label of :data:`IGNORE` asks for nothing at that position. A task over vectors
gives a frozen dataclass of tensors.
"""

from recollect.tasks.cues import CueConfig, cues
from recollect.tasks.exchange import Exchange, exchange, spread_keys
from recollect.tasks.mqar import IGNORE, MqarConfig, mqar
from recollect.tasks.reach import Reach, ReachConfig, reach
from recollect.tasks.swaps import SwapConfig, swaps
from recollect.tasks.switching import Switching, SwitchingConfig, switching
from recollect.tasks.text import (
    TextCorpus,
    batches,
    bigram_bits_per_byte,
    heldout_windows,
    load_text,
)
from recollect.tasks.word_problem import WordConfig, word_problem, words

__all__ = [
    "IGNORE",
    "CueConfig",
    "Exchange",
    "MqarConfig",
    "Reach",
    "ReachConfig",
    "SwapConfig",
    "Switching",
    "SwitchingConfig",
    "TextCorpus",
    "WordConfig",
    "batches",
    "bigram_bits_per_byte",
    "cues",
    "exchange",
    "heldout_windows",
    "load_text",
    "mqar",
    "reach",
    "spread_keys",
    "swaps",
    "switching",
    "word_problem",
    "words",
]
