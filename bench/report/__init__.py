"""Writes recorded results into the pages of docs/."""
