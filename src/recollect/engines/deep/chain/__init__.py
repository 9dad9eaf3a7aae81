"""The chain path of engine ``deep``: memories of maps in sequence; see `engine`."""

from recollect.engines.deep.chain.engine import Chain, run_chain, slope_of

__all__ = ["Chain", "run_chain", "slope_of"]
