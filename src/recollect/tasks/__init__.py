"""What a model is trained and tested on: pure functions of a configuration and a generator.

A task over tokens gives pairs ``(inputs, labels)`` of int64 tensors ``[B, T]`` in which
``labels[b, t]`` is the token that the model's output at position ``t`` should name: labels are
already shifted. A label of :data:`IGNORE` asks for nothing at that position. A task over vectors
gives a frozen dataclass of tensors.

Examples:
    >>> config = rc.tasks.MqarConfig(vocab=64, pairs=4, length=32)
    >>> inputs, labels = rc.tasks.mqar(config, 2, torch.Generator().manual_seed(0))
    >>> inputs.shape, int((labels != rc.tasks.IGNORE).sum())
    (torch.Size([2, 32]), 8)
"""

from recollect.tasks.cues import CueConfig, cues
from recollect.tasks.exchange import Exchange, exchange, spread_keys
from recollect.tasks.extraction import Extraction, ExtractionConfig, extractions
from recollect.tasks.learnability import Mapping, MappingConfig, mapping
from recollect.tasks.mad import (
    MadCompression,
    MadConfig,
    MadCopying,
    MadFuzzy,
    MadMemorization,
    MadRecall,
    MadSetting,
    mad,
    mad_settings,
)
from recollect.tasks.mqar import IGNORE, MqarConfig, MqarMix, mqar, mqar_mix
from recollect.tasks.needles import NeedleConfig, needle_prompts, needles
from recollect.tasks.prompts import Prompt, sentences
from recollect.tasks.reach import Reach, ReachConfig, reach
from recollect.tasks.stories import Story, StoryConfig, stories, story_bytes, story_prompts
from recollect.tasks.swaps import SwapConfig, swaps
from recollect.tasks.switching import Switching, SwitchingConfig, switching
from recollect.tasks.text import (
    TextCorpus,
    batches,
    bigram_bits_per_byte,
    heldout_windows,
    load_text,
)
from recollect.tasks.tracking import (
    CommonWordsConfig,
    FrequentWordsConfig,
    VariableConfig,
    common_words,
    frequent_words,
    variable_prompts,
)
from recollect.tasks.word_problem import WordConfig, word_problem, words

__all__ = [
    "IGNORE",
    "CommonWordsConfig",
    "CueConfig",
    "Exchange",
    "Extraction",
    "ExtractionConfig",
    "FrequentWordsConfig",
    "MadCompression",
    "MadConfig",
    "MadCopying",
    "MadFuzzy",
    "MadMemorization",
    "MadRecall",
    "MadSetting",
    "Mapping",
    "MappingConfig",
    "MqarConfig",
    "MqarMix",
    "NeedleConfig",
    "Prompt",
    "Reach",
    "ReachConfig",
    "Story",
    "StoryConfig",
    "SwapConfig",
    "Switching",
    "SwitchingConfig",
    "TextCorpus",
    "VariableConfig",
    "WordConfig",
    "batches",
    "bigram_bits_per_byte",
    "common_words",
    "cues",
    "exchange",
    "extractions",
    "frequent_words",
    "heldout_windows",
    "load_text",
    "mad",
    "mad_settings",
    "mapping",
    "mqar",
    "mqar_mix",
    "needle_prompts",
    "needles",
    "reach",
    "sentences",
    "spread_keys",
    "stories",
    "story_bytes",
    "story_prompts",
    "swaps",
    "switching",
    "variable_prompts",
    "word_problem",
    "words",
]
