"""Load the model in this folder through recollect, by ``trust_remote_code=True`` of transformers.

The file defines nothing: the classes are those of the installed package.
"""

try:
    from recollect.lm import (
        RecollectConfig,
        RecollectForCausalLM,
        RecollectForSequenceClassification,
        RecollectModel,
    )
    from recollect.lm.replacement.loading import SwappedConfig
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "recollect":
        raise
    raise ImportError(
        'this model needs recollect, which is not installed: pip install "recollect-layers[lm]"'
    ) from None

__all__ = [
    "RecollectConfig",
    "RecollectForCausalLM",
    "RecollectForSequenceClassification",
    "RecollectModel",
    "SwappedConfig",
]
