"""Python runs this as it starts, since its directory is on PYTHONPATH: starts the probe, then hands over to the
sitecustomize that would have run without it. The syntax is Python 2's too: any interpreter may come by."""

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
    """Imports the next sitecustomize on the path in this one's place; its errors are its own, as ever."""
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
