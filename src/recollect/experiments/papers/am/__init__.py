"""Associative memory: the figures of the AM paper."""
