"""Cases that the suites of `recollect bench` time."""
