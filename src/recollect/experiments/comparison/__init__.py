"""`compare`: models of one size trained on the same tokens, and their tables."""
