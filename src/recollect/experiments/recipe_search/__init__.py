"""`search`: recipes near a start, trained by successive halving, and their Pareto front."""
