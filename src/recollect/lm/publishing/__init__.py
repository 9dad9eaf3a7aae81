"""Files beside a saved model that explain and load it: its model card, its remote code."""
