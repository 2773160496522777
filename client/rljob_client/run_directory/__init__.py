"""The files of a run, which stay consistent if the run stops at any moment."""
