"""A job in pods on one machine's GPU that runs out of memory and recovers: cluster, operator, record."""
