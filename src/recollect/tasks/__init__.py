"""Training and test data of models: pure functions of a configuration and a generator.

A task over tokens returns ``(inputs, labels)``, int64 tensors ``[B, T]``. ``labels[b, t]`` is the
token to predict at position ``t``: labels are shifted. Positions with the label :data:`IGNORE` do
not count. A task over vectors returns a frozen dataclass of tensors. Functions that draw a batch
take the batch size B (0 gives empty tensors) and a generator, the only source of randomness.

Examples:
    >>> config = rc.tasks.MqarConfig(vocab=64, pairs=4, length=32)
    >>> inputs, labels = rc.tasks.mqar(config, 2, torch.Generator().manual_seed(0))
    >>> inputs.shape, int((labels != rc.tasks.IGNORE).sum())
    (torch.Size([2, 32]), 8)
"""

from recollect.tasks.cues import CueConfig, cues
from recollect.tasks.exchange import Exchange, low_coherence_keys, swap_stream
from recollect.tasks.extraction import Extraction, ExtractionConfig, extractions
from recollect.tasks.learnability import MappingBatch, MappingConfig, draw_mapping
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
from recollect.tasks.mqar import IGNORE, MqarConfig, MqarMixture, mqar, mqar_mix
from recollect.tasks.needles import NeedleConfig, needle_prompts, needles
from recollect.tasks.prompts import Prompt, sentences
from recollect.tasks.reach import ReachabilityBatch, ReachConfig, reachability
from recollect.tasks.stories import Story, StoryConfig, stories, story_bytes, story_prompts
from recollect.tasks.swaps import SwapConfig, swap_batch
from recollect.tasks.switching import SwitchingBatch, SwitchingConfig, switching
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
from recollect.tasks.word_problem import WordConfig, word_batch, word_config

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
    "MappingBatch",
    "MappingConfig",
    "MqarConfig",
    "MqarMixture",
    "NeedleConfig",
    "Prompt",
    "ReachConfig",
    "ReachabilityBatch",
    "Story",
    "StoryConfig",
    "SwapConfig",
    "SwitchingBatch",
    "SwitchingConfig",
    "TextCorpus",
    "VariableConfig",
    "WordConfig",
    "batches",
    "bigram_bits_per_byte",
    "common_words",
    "cues",
    "draw_mapping",
    "extractions",
    "frequent_words",
    "heldout_windows",
    "load_text",
    "low_coherence_keys",
    "mad",
    "mad_settings",
    "mqar",
    "mqar_mix",
    "needle_prompts",
    "needles",
    "reachability",
    "sentences",
    "stories",
    "story_bytes",
    "story_prompts",
    "swap_batch",
    "swap_stream",
    "switching",
    "variable_prompts",
    "word_batch",
    "word_config",
]
