"""The model: Llama's backbone with memory layers."""

from recollect.lm.model.model import RecollectForCausalLM, RecollectModel

__all__ = ["RecollectForCausalLM", "RecollectModel"]
