"""The common case without detours: maps one after another, coefficients for all of them."""

from recollect.engines.deep.chain.engine import Chain, run_chain, slope_of

__all__ = ["Chain", "run_chain", "slope_of"]
