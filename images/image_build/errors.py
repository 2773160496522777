"""The error that is shown as one sentence instead of a traceback."""


class ImageBuildError(Exception):
    """What was expected, what was found, and what to do."""
