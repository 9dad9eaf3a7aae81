"""Engine ``linear``: a matrix (or vector) memory, exact at every token and parallel in chunks."""
