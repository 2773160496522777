"""The error that is printed as one line instead of a traceback."""


class ImageBuildError(Exception):
    """An error of a build. Its message states what was expected, what was found and what to do."""
