"""Rules for width: learning rates and initial scales that hold at every width (muP)."""

from recollect.lm.mup.rules import BASE_WIDTH, Rule, scale_for_width, width_rules

__all__ = ["BASE_WIDTH", "Rule", "scale_for_width", "width_rules"]
