"""What a recipe remembers between calls."""
