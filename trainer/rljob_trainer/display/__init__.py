"""The output of a run on the terminal: progress, the summary, and the redirection of library logs."""
