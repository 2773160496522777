"""Measurements of RLJob; README.md is the index."""
