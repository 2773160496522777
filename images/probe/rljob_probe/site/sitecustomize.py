"""Starts the probe, then imports the sitecustomize that would have run without it.

Python runs this module at startup because its directory is on PYTHONPATH. Its syntax is also valid in Python 2, since
any interpreter may load it."""

import os
import sys

_HERE = os.path.dirname(__file__)


def _start_the_probe():
    # type: () -> None
    if sys.version_info < (3, 8) or os.environ.get("RLJOB_PROBE") == "0":
        return
    root = os.path.dirname(os.path.dirname(_HERE))
    sys.path.insert(0, root)
    try:
        from rljob_probe.start import start

        start()
    except Exception:
        pass  # a program without evidence is better than a program that does not start
    finally:
        sys.path.remove(root)


def _hand_over():
    # type: () -> None
    """Import the next sitecustomize on the path instead of this one. Its errors propagate as usual."""
    own_entries = [(place, entry) for place, entry in enumerate(sys.path) if entry == _HERE]
    this = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this
    finally:
        for place, entry in own_entries:
            sys.path.insert(place, entry)


_start_the_probe()
_hand_over()
