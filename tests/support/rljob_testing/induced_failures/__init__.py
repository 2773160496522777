"""Programs that run out of memory on purpose, and their diagnosis."""
