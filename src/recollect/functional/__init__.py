"""The functional interface: `recollect.recall` writes and reads, `recollect.read` only reads."""
