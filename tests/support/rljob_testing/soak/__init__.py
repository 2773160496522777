"""Random faults over several jobs on this machine's cluster, and a search for leaks."""
