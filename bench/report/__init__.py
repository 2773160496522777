"""Writes recorded results into the marked blocks of docs/."""
