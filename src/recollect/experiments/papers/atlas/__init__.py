"""ATLAS: capacity, learnability, recall and MAD."""
