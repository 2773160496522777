"""Configurations of jobs, the accuracy of their predictions, and the page that shows it."""
