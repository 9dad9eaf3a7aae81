"""A run on paper: its operations, its memory, and the devices that hold it."""
