"""The classes of the trackers by name, and the checks of `spec.tracking` that need the libraries."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from rljob_api.manifest.yaml_document import Path as FieldPath
from rljob_api.tracking import TRACKERS, TrackerSpec
from rljob_client.errors import BadInput
from rljob_trainer.trackers.tracker import Tracker


def tracker_class(name: str) -> type[Tracker]:
    found: type[Tracker] = getattr(import_module(f"rljob_trainer.trackers.{name}_tracker"), f"{name.title()}Tracker")
    return found


def is_installed(spec: TrackerSpec) -> bool:
    package = TRACKERS[spec.name].package
    return not package or find_spec(package) is not None


def not_installed_message(spec: TrackerSpec) -> str:
    return (
        f"expected the package {TRACKERS[spec.name].package}, found none; install rljob-trainer[trackers], or remove "
        f"{spec.name} from tracking"
    )


def require_trackers(trackers: Sequence[TrackerSpec]) -> None:
    """Raise `BadInput` if the library of a tracker is not installed. Imports none."""
    for spec in trackers:
        if not is_installed(spec):
            raise BadInput(not_installed_message(spec))


def unknown_args(trackers: Sequence[TrackerSpec]) -> dict[FieldPath, str]:
    """Messages about arguments that the libraries' functions do not have, by path in the manifest. Imports the
    libraries of trackers with arguments."""
    found: dict[FieldPath, str] = {}
    for index, spec in enumerate(trackers):
        if not spec.args or not is_installed(spec):
            continue
        tracker, known = TRACKERS[spec.name], set(TRACKERS[spec.name].further_args)
        if tracker.function:
            module, _, name = tracker.function.partition(":")
            known |= inspect.signature(getattr(import_module(module), name)).parameters.keys()
        place = tracker.function.replace(":", ".") or spec.name
        for argument in sorted(spec.args.keys() - known):
            close = difflib.get_close_matches(argument, sorted(known), n=1)
            advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known - {'self'}))}"
            found["spec", "tracking", index, "args", argument] = f"{place} has no such argument; {advice}"
    return found
