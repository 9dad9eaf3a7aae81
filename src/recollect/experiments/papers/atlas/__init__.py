"""ATLAS: capacity, learnability, recall, MAD, and language models."""
