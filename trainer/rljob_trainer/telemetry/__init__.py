"""Memory of a process: how it is measured, logged and recorded at a failure."""
