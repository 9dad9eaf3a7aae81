"""Shared by all engines: the problem, its coefficients, products and solves."""
