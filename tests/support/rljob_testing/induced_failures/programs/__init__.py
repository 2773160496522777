"""Programs that run out of memory on purpose, at least two for each failure class."""
