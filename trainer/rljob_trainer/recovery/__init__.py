"""Recovery from out-of-memory failures: evidence, a changed memory plan, and a retry of the failed phase."""
