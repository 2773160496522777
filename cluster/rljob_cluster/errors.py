"""What the person who asked for a cluster can act on."""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says what was expected, what was found and what to do."""
