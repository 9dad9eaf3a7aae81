"""Moved to `recollect.lm.data.tokenizers`."""

from recollect.moved import alias

alias(__name__, "recollect.lm.data.tokenizers")
