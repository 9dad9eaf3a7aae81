"""The chain path of engine ``deep``: memories of maps in sequence; see `engine`."""

from recollect.engines.deep.chain.chain import Chain, slope_of
from recollect.engines.deep.chain.engine import run_chain

__all__ = ["Chain", "run_chain", "slope_of"]
