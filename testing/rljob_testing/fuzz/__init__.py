"""Fuzz targets: every parser that reads what others write."""
