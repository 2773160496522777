"""Adapters: carry out changes of the memory plan in another trainer's own options, without a change of its script.

The operator sets RLJOB_ADAPTER to the name of an adapter, and RLJOB_ADAPTER_CHANGES to the changes. A trainer without
changes keeps the options that its user wrote.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

ADAPTER = "RLJOB_ADAPTER"
CHANGES = "RLJOB_ADAPTER_CHANGES"


def install() -> None:
    """Wait for the trainer's configuration, if there are changes. Imports nothing of the trainer."""
    name, changes = os.environ.get(ADAPTER, ""), os.environ.get(CHANGES, "")
    if not name or changes in ("", "{}"):
        return
    from rljob_probe.adapters import trl, verl
    from rljob_probe.adapters.changes import changes_of
    from rljob_probe.patching import after_import

    adapters = {"TRL": (trl.MODULE, trl.patch), "Verl": (verl.MODULE, verl.patch)}
    if name not in adapters:
        say("expected RLJOB_ADAPTER to be one of {}, found {}".format(", ".join(adapters), name))
        return
    module, patch = adapters[name]
    wanted = changes_of(changes)
    after_import(module, guarded(name, lambda found: patch(found, wanted)))


def guarded(name: str, patch: Callable[[object], None]) -> Callable[[object], None]:
    """`patch`, reporting an error instead of raising it: the program then runs with its own options."""

    def run(module: object) -> None:
        try:
            patch(module)
        except Exception as error:
            say(f"the adapter {name} does not fit this version: {error!r}; the memory plan changes no option")

    return run


def say(text: str) -> None:
    """One line in the log of the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"rljob: {text}", file=sys.stderr, flush=True)
