"""Code that all engines share: the problem, its coefficients, products and solves."""
