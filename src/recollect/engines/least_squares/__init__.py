"""Engine ``least_squares``: exact minimum over all of the past at every token."""
