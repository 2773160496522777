"""The error that is printed as one line instead of a traceback."""


class ClusterError(Exception):
    """An error of a cluster. Its message states what was expected, what was found and what to do."""
