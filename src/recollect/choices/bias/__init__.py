"""Attentional bias: what counts as an error on one association.

A bias states a ``loss`` of the prediction, or its gradient ``error``, or both; autograd supplies
what is not stated. Its gates travel with the association, and arrive with a trailing axis (1, or V
per channel) so that they broadcast against ``[..., V]``.

Examples:
    >>> error = rc.bias.L2().error(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]), {})
    >>> error
    tensor([1., 0.])
"""

from typing import TYPE_CHECKING

from recollect.choices.bias.base import Bias, Probe
from recollect.choices.bias.losses import L2, DotProduct, Huber, Lp, ValueRobust
from recollect.wording import suggests

__all__ = ["L2", "Bias", "DotProduct", "Huber", "Lp", "Probe", "ValueRobust"]

if not TYPE_CHECKING:
    __getattr__ = suggests(__name__, __all__)
