"""Decisions about a job, from an observation. Pure: no clock, no I/O."""
