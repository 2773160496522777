"""A real Kubernetes on one machine, for tests and for trying things out."""
