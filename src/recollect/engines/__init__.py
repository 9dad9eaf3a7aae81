"""Engines that run a recipe: the reference, fast engines, and their selection."""
