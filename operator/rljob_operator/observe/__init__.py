"""Caches of the state of the cluster, filled by watches. Read-only."""
