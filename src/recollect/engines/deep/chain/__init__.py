"""The chain path: memories of maps in sequence, with the same coefficients for all maps.

What `general` does for any program, written out for W_L σ(… σ(W_1 x)) with scalar decays, momentum
and windows. The keys go from border to border (`forward`); after that no read waits, so
the queries of all inner batches go through together, map by map:

    z_t = a_t A° x_t + m_t S° x_t + Σ_i (C ⊙ (x hᵀ))[t, i] δ_i

`tests/engines/test_deep.py` holds this path to the general one.
"""

from recollect.engines.deep.chain.engine import Chain, run_chain, slope_of

__all__ = ["Chain", "run_chain", "slope_of"]
