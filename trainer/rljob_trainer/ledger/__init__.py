"""The files of a run, which stay consistent at whatever moment the run stops."""
