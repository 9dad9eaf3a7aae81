"""Reference engine: the definition, one token at a time; see `engine`."""
