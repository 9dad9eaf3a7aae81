"""Attentional bias: what counts as an error on one association."""

from recollect.choices.bias.losses import L2, Bias, DotProduct, Huber, Lp, Probe, ValueRobust

__all__ = ["L2", "Bias", "DotProduct", "Huber", "Lp", "Probe", "ValueRobust"]
