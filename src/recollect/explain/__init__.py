"""A recipe in words and equations: what it solves, how it moves, which engine runs it and why.

Every line is made of what the members say about themselves (signed terms, see
`recollect.choices.equation_terms`), so a member of one's own explains itself like any other::

    >>> print(rc.explain("gated_delta_net"))
    gated_delta_net
    problem  min  ½‖W k_t − v_t‖²
    write    W_t = α_t W_(t−1) − η_t (α_t W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ
    read     y_t = W_t q_t
    engine   linear (triangular solve)
    ...
"""

from recollect.explain.explain import Explanation, explain
from recollect.explain.naming import PROPERTIES, Named, fingerprint, named, properties

__all__ = ["PROPERTIES", "Explanation", "Named", "explain", "fingerprint", "named", "properties"]
