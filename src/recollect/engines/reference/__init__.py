"""The reference engine: the definition, one token at a time.

This file is the judge of every other engine. It follows `docs/design/meaning.md` literally, takes
the inner gradient by autograd, imports nothing fast, and runs in any dtype. The letters are those
of the equations::

    g_t = Σ_m γ_(t,m) ∇_W ℓ(M(W°; φ(k_(t−m))), v_(t−m))
    S_t, step_t = algorithm(S_(t−1), g_t)
    A_t = retention.advance(A_(t−1), step_t)          α_t A_(t−1) + step_t unless rebuilt from W
    W_t = link(A_t),    y_t = M(W_t; φ(q_t))

Rows of a batch differ in position (padding, packing), so everything that depends on the place in
the
inner batch is selected per row by ``torch.where``.
"""

from recollect.engines.reference.cost import flops
from recollect.engines.reference.engine import read, run

__all__ = ["flops", "read", "run"]
