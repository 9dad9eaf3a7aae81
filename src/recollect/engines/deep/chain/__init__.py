"""Chain path of engine ``deep`` for memories that are sequences of maps."""

from recollect.engines.deep.chain.chain import Chain, is_supported_activation
from recollect.engines.deep.chain.engine import run_chain

__all__ = ["Chain", "is_supported_activation", "run_chain"]
