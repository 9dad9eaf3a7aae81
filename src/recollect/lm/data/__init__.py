"""Documents as fixed-length rows of tokens, and batches of rows."""
