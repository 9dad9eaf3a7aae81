"""Attentional bias: the loss of one association.

A bias defines a ``loss`` of the prediction, its gradient ``error``, or both; autograd supplies the
other. Its gates belong to the association and have a trailing axis (1, or V per channel), so that
they broadcast against ``[..., V]``.

Examples:
    >>> error = rc.bias.L2().error(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]), {})
    >>> error
    tensor([1., 0.])
"""

from recollect.choices.bias.base import Bias, Probe
from recollect.choices.bias.losses import L2, DotProduct, Huber, Lp, ValueRobust

__all__ = ["L2", "Bias", "DotProduct", "Huber", "Lp", "Probe", "ValueRobust"]
