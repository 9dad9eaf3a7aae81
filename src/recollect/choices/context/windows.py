"""Contexts of the newest association, a sliding window, or all of the past."""

from __future__ import annotations

from recollect.choices.context.base import Context
from recollect.choices.member import member
from recollect.fields import Gate, Range, flag, integer, quantity

__all__ = ["Online", "Prefix", "Window"]


@member
class Online(Context):
    """Only the current association: γ = 1 for i = t.

    Examples:
        >>> print(rc.explain(rc.Recipe(context=rc.context.Online())).problem)
        ½‖W k_t − v_t‖²
    """


@member
class Window(Context):
    """The last c associations: Σ_{i=t−c+1..t} γ_i^(t) ℓ_i, the Omega rule (ATLAS 8–10).

    With n associations per token (`algorithm.GradientDescent`), the window holds c tokens. Sub-step
    j of token t takes the gradient of their associations number j, Σ_{i=t−c+1..t} γ_i^(t) ℓ_ij, and
    all sub-steps share the weights of the token (trapezoidal MIMO of Mamba-3: c = 2).

    Args:
        size: c ≥ 1. The window reaches across inner batches; documents start with an empty one.
        gated: γ comes from the gate ``"window" [B, T, H, c]`` of the *current* token (entry m
            weighs association t − m); otherwise γ = 1.

    Examples:
        >>> context = rc.context.Window(size=4)
        >>> context.total("ℓ_i")
        'Σ_(i>t−4) γ_i^(t) ℓ_i'
        >>> [(gate.name, gate.axes) for gate in context.gates()]
        [('window', ('c',))]
    """

    size: int = integer(at_least=1, size=True)
    gated: bool = flag(True)

    @property
    def is_restriction(self) -> bool:  # type: ignore[override]
        return not self.gated

    @property
    def horizon(self) -> int:
        return self.size

    def gates(self) -> tuple[Gate, ...]:
        if not self.gated:
            return ()
        return (
            Gate(
                name="window",
                owner=self.title,
                axes=("c",),
                range=Range(low=0.0),
                init=1.0 / self.size,
                role="rate",
            ),
        )


@member
class Prefix(Context):
    """All past associations, Σ_{i≤t} γ^(t−i) w_i ℓ_i, geometrically weighted (TTR 14).

    Args:
        decay: γ in (0, 1]: a constant, the gate ``"log_decay"``, or a param.
        weight: w_i ≥ 0: a constant or the gate ``"weight"`` of the association.

    Examples:
        >>> context = rc.context.Prefix(decay="input")
        >>> context.total("ℓ_i"), [gate.name for gate in context.gates()]
        ('Σ_(i≤t) γ_i^(t) ℓ_i', ['log_decay'])
    """

    decay: float | str = quantity(
        1.0, above=0, at_most=1, init=0.98, log=True, letter="γ", role="decay"
    )
    weight: float | str = quantity(
        1.0,
        at_least=0,
        init=1.0,
        per_association=True,
        sources=("input",),
        letter="w",
        role="weight",
    )

    is_restriction = True

    horizon = None  # type: ignore[assignment]
