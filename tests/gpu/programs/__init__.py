"""Programs that run out of memory on purpose, one module a class of failure."""
