"""Language models: one Hugging Face model for every recipe.

Importing this module registers it with `AutoConfig`, `AutoModel`, `AutoModelForCausalLM` and
`AutoModelForSequenceClassification`::

    config = rc.lm.RecollectConfig.from_recipes("gated_delta_net", vocab_size=32000)
    model = rc.lm.RecollectForCausalLM(config)

Examples:
    >>> config = rc.lm.RecollectConfig.from_recipes(
    ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> rc.lm.RecollectForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 32])
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "recollect.lm needs transformers, which is not installed: "
        'pip install -e ".[lm]" in its checkout'
    ) from error

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from recollect.lm.adoption import (
    AdoptedLayerReport,
    AdoptionReport,
    Family,
    MemoryArguments,
    adopt,
    families,
    register_family,
)
from recollect.lm.model.cache import RecollectCache, cache_of
from recollect.lm.model.checkpoint import CheckpointError
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import count_parameters, match_parameters, parameter_count
from recollect.lm.model.model import RecollectForCausalLM, RecollectModel
from recollect.lm.model.paper_sizes import PAPER_SIZES, PaperSize, paper_config
from recollect.lm.model.pretrained import RecollectForSequenceClassification
from recollect.lm.prompt import CachedPrompt
from recollect.lm.replacement.loading import register
from recollect.lm.replacement.mlp import replace_mlp
from recollect.lm.replacement.swap import replace_attention

if TYPE_CHECKING:
    from recollect.lm.conversion.convert import convert, published_config
    from recollect.lm.distillation.distill import distill
    from recollect.lm.distillation.plan import Distilled, DistillPlan, DistillStage
    from recollect.lm.distributed.processes import ProcessEnded
    from recollect.lm.evaluation.evaluate import EvaluationWatcher, evaluate
    from recollect.lm.evaluation.local_tasks import local_tasks
    from recollect.lm.evaluation.results import Evaluation, TaskResult
    from recollect.lm.mup.coordinate_check import Coordinate, Coordinates, check_coordinates
    from recollect.lm.mup.rules import Rule, scale_for_width, width_rules
    from recollect.lm.training.divergence import Diverged
    from recollect.lm.training.plan import TrainPlan, load_plan
    from recollect.lm.training.progress import Progress, Trained, TrainObserver
    from recollect.lm.training.train import train
    from recollect.lm.training.weight_decay import parameter_groups

__all__ = [
    "PAPER_SIZES",
    "AdoptedLayerReport",
    "AdoptionReport",
    "CachedPrompt",
    "CheckpointError",
    "Coordinate",
    "Coordinates",
    "DistillPlan",
    "DistillStage",
    "Distilled",
    "Diverged",
    "Evaluation",
    "EvaluationWatcher",
    "Family",
    "MemoryArguments",
    "PaperSize",
    "ProcessEnded",
    "Progress",
    "RecollectCache",
    "RecollectConfig",
    "RecollectForCausalLM",
    "RecollectForSequenceClassification",
    "RecollectModel",
    "Rule",
    "TaskResult",
    "TrainObserver",
    "TrainPlan",
    "Trained",
    "adopt",
    "cache_of",
    "check_coordinates",
    "convert",
    "count_parameters",
    "distill",
    "evaluate",
    "families",
    "load_plan",
    "local_tasks",
    "match_parameters",
    "paper_config",
    "parameter_count",
    "parameter_groups",
    "published_config",
    "register_family",
    "replace_attention",
    "replace_mlp",
    "scale_for_width",
    "train",
    "width_rules",
]

_SOURCES = {
    name: module
    for module, names in {
        "conversion.convert": ("convert", "published_config"),
        "distillation.distill": ("distill",),
        "distillation.plan": ("DistillPlan", "DistillStage", "Distilled"),
        "distributed.processes": ("ProcessEnded",),
        "evaluation.evaluate": ("EvaluationWatcher", "evaluate"),
        "evaluation.local_tasks": ("local_tasks",),
        "evaluation.results": ("Evaluation", "TaskResult"),
        "mup.coordinate_check": ("Coordinate", "Coordinates", "check_coordinates"),
        "mup.rules": ("Rule", "scale_for_width", "width_rules"),
        "training.divergence": ("Diverged",),
        "training.plan": ("TrainPlan", "load_plan"),
        "training.progress": ("Progress", "TrainObserver", "Trained"),
        "training.train": ("train",),
        "training.weight_decay": ("parameter_groups",),
    }.items()
    for name in names
}
"""Module of each public name that is imported on first use, because it loads the Trainer."""

if not TYPE_CHECKING:  # for type checkers, a module with this function has every name

    def __getattr__(name: str) -> Any:
        if name not in _SOURCES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        value = getattr(importlib.import_module(f"{__name__}.{_SOURCES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


AutoConfig.register(RecollectConfig.model_type, RecollectConfig, exist_ok=True)
AutoModel.register(RecollectConfig, RecollectModel, exist_ok=True)
AutoModelForCausalLM.register(RecollectConfig, RecollectForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    RecollectConfig, RecollectForSequenceClassification, exist_ok=True
)
register()  # decoders whose attention layers were replaced
