"""RMSProp and Adam: elementwise scaled steps."""

from __future__ import annotations

from torch import Tensor

from recollect.choices.algorithm.base import Slots, Step
from recollect.choices.algorithm.descent import Descent, rate_quantity
from recollect.choices.equation_terms import Gradient, Term, Terms, format_number, render_sum
from recollect.choices.member import member
from recollect.fields import integer, number
from recollect.numerics import safe_sqrt

__all__ = ["Adam", "RMSProp"]


@member
class RMSProp(Descent):
    """u_t = ρ u_{t−1} + (1 − ρ) g_t², A_t = α_t A_{t−1} − η_t g_t/(√u_t + ε) (torch's RMSprop).

    Args:
        decay_rate: ρ.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.RMSProp(lr=0.1))
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> {name: tuple(slot[0].shape) for name, slot in state.algorithm_state.items()}
        {'square': (1, 2, 8, 8)}
    """

    batch_size: int = integer(1, at_least=1, size=True)
    lr: float | str = rate_quantity(init=0.01)
    decay_rate: float = number(0.99, at_least=0, below=1)
    eps: float = number(1e-8, above=0)

    slots = ("square",)

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        u = self.decay_rate * slots["square"] + (1 - self.decay_rate) * step.gradient.square()
        return {"square": u}, -step.lr * step.gradient / (safe_sqrt(u) + self.eps)

    def update_equations(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        moment = f"u_t = {_moment(self.decay_rate, 'u', 'g_t²')}"
        step = Term((f"g_t/(√u_t + {format_number(self.eps)})",), -1.0).times(
            self.rate_factor_text()
        )
        return (f"g_t = {render_sum(gradient.compact)}", moment), (step,)


@member
class Adam(Descent):
    """Elementwise Adam with bias correction by the token's index, as torch.optim.Adam.

    Args:
        beta1, beta2: decay rates of the moments.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.Adam(lr=0.1))
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> {name: tuple(slot[0].shape) for name, slot in state.algorithm_state.items()}
        {'mean': (1, 2, 8, 8), 'square': (1, 2, 8, 8)}
    """

    batch_size: int = integer(1, at_least=1, size=True)
    lr: float | str = rate_quantity(init=0.01)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    eps: float = number(1e-8, above=0)

    slots = ("mean", "square")

    def update(self, slots: Slots, step: Step) -> tuple[dict[str, Tensor], Tensor]:
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * step.gradient
        square = self.beta2 * slots["square"] + (1 - self.beta2) * step.gradient.square()
        first = mean / (1 - self.beta1**step.count)
        second = safe_sqrt(square / (1 - self.beta2**step.count))
        return {"mean": mean, "square": square}, -step.lr * first / (second + self.eps)

    def update_equations(self, gradient: Gradient, at: str = "t") -> tuple[tuple[str, ...], Terms]:
        lines = (
            f"g_t = {render_sum(gradient.compact)}",
            f"m_t = {_moment(self.beta1, 'm', 'g_t')}",
            f"u_t = {_moment(self.beta2, 'u', 'g_t²')}",
        )
        return lines, (
            Term((f"m̂_t/(√û_t + {format_number(self.eps)})",), -1.0).times(self.rate_factor_text()),
        )

    def notes(self) -> tuple[str, ...]:
        first, second = format_number(self.beta1), format_number(self.beta2)
        return (f"m̂_t = m_t/(1 − {first}^t), û_t = u_t/(1 − {second}^t)",)


def _moment(rate: float, letter: str, new: str) -> str:
    return render_sum((Term((f"{letter}_(t−1)",), rate), Term((new,), round(1 - rate, 12))))
