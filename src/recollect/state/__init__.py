"""The state of a recipe between calls."""
