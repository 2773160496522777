"""The operator as a process with a real API server: a proxy for faults, and pods that tests move."""
