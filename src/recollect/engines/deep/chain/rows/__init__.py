"""Entrywise stretches of an inner batch as one operation each, on a device that has Triton.

Of two maps of the same sizes, the first widening and the second narrowing, `forward` and `backward`
have two stretches between products in which no association waits for another. Row by row, in their
letters and those of `shares` (an error a·prediction − b·value; M̄′ has been through the products
with the border already):

    forward      δ_1 = σ′(z_1) ⊙ u,      1/ρ = a (|h_1|² + ε + |h_0|²|δ_1|² / |δ_2|²),
                 c′_j = ρ c_j,           Q_j = (c′_j h_0, c′_j δ_2)
    backward     π = ⟨δ̄_1, δ_1⟩ + ⟨h̄_1, h_1⟩,          Q̄ = −π / ((|h_1|² + ε)|δ_2|² + |h_0|²|δ_1|²)
                 h̄_0 += Σ_j c′_j Q̄_j0,   δ̄_2 += Σ_j c′_j Q̄_j1
                 h̄_l += 2Q̄|δ_(l+1)|² h_l,    δ̄_1 += 2Q̄|h_0|² δ_1,    δ̄_2 += π(2 / |δ_2|² + …) δ_2
                 ū = σ′ ⊙ δ̄_1,           σ″ ⊙ u ⊙ δ̄_1

with ρ = 1 and no π where steps are plain. Everything else takes the operations of `forward` and
`backward` themselves; `launcher` decides which, and `agree` whether a device is to be believed.
"""

from recollect.engines.deep.chain.rows.launch import LAUNCHERS, Launch, launcher
from recollect.engines.deep.chain.rows.stretches import BackwardRows, ForwardRows
from recollect.engines.deep.chain.rows.trial import agree

__all__ = ["LAUNCHERS", "BackwardRows", "ForwardRows", "Launch", "agree", "launcher"]
