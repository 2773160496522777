"""Experiment trackers and samples of responses: a view of the run for people, while it runs."""
