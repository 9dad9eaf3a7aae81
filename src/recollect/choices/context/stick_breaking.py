"""Restriction of `KernelWeighted` that breaks a stick from the latest association backwards."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from recollect.choices.context.base import Context
from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.member import member
from recollect.fields import flag

__all__ = ["StickBreaking"]


@member
class StickBreaking(Context):
    """Each association takes a fraction of the weight that later associations leave.

    The logit z_i is the logarithm of the similarity s(k_i, q_t) times the weights of the other
    restrictions. The weight of association i is σ(z_i) Π_(i<j<t) (1 − σ(z_j)). Weights sum to at
    most 1, and later associations come first, so that no positions are necessary. A sum with these
    weights is ``bias.DotProduct()``; ``bias.L2()`` divides it by the sum of the weights.
    Source: Tan et al. 2024 (stick-breaking attention), definition of the weights.

    Args:
        include_current: whether a query sees the association of its own token. Reads of a state see
            all associations.

    Examples:
        >>> context = rc.context.KernelWeighted(restrictions=(rc.context.StickBreaking(),))
        >>> recipe = rc.Recipe(
        ...     memory=rc.memory.LocalConstant(),
        ...     bias=rc.bias.DotProduct(),
        ...     context=context,
        ...     algorithm=rc.algorithm.Analytic(),
        ... )
        >>> q, k, v = torch.randn(3, 1, 5, 1, 4)
        >>> y, _ = rc.recall(recipe, q, k, v)
        >>> y[:, 0].any()  # the first token sees no earlier one
        tensor(False)
        >>> beta = torch.sigmoid(q[0, 1, 0] @ k[0, 0, 0] / 2)
        >>> torch.allclose(y[0, 1, 0], beta * v[0, 0, 0])
        True
    """

    include_current: bool = flag(False)

    is_restriction = True
    reweighs = True

    horizon = None  # type: ignore[assignment]

    factor = "b_i^(t)"  # type: ignore[assignment]

    @property
    def hides_current(self) -> bool:  # type: ignore[override]
        return not self.include_current

    def over(self, visible: VisibleAssociations) -> ContextWeights:
        return ContextWeights(reweigh=_break_stick)

    def notes(self) -> tuple[str, ...]:
        last = "j≤t" if self.include_current else "j<t"
        return (f"b_i^(t) = σ(z_i) Π_(i<{last}) (1 − σ(z_j))",)


def _break_stick(z: Tensor) -> Tensor:
    """Return log σ(z_i) + Σ_(j>i) log(1 − σ(z_j)) for logits ``[..., m]`` in order."""
    remaining = functional.pad(functional.logsigmoid(-z), (0, 1))[..., 1:]
    return functional.logsigmoid(z) + remaining.flip(-1).cumsum(-1).flip(-1)
