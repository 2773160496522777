"""Helpers that the tests and the benchmarks of RLJob share. Never shipped."""
