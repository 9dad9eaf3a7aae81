"""How a recipe is run: the reference, fast engines, and the selector between them."""
