"""A job in pods on one machine's GPU, through a failure for want of memory: the cluster, the operator, the record."""
