"""Measurements and simulations, one script a figure: ``python -m benchmarks NAME --json FILE``."""
