"""Recipes in words and equations, and their diagnosis; see `recollect.explain`."""
