"""Benchmarks of flatweights against what its users would do otherwise."""
