"""Functions after the last map of a chain: `head`, its `backward` pass, and `layer_norm`."""
