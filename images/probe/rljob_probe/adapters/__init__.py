"""Adapters: carry out changes of the memory plan in another trainer's own options, without a change of its script.

The operator sets RLJOB_ADAPTER to the name of an adapter, and RLJOB_ADAPTER_CHANGES to the changes. A trainer without
changes keeps the options that its user wrote.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


ADAPTER = "RLJOB_ADAPTER"
CHANGES = "RLJOB_ADAPTER_CHANGES"


def install() -> None:
    """Wait for the trainer's configuration, if there are changes. Imports nothing of the trainer."""
    name, changes = os.environ.get(ADAPTER, ""), os.environ.get(CHANGES, "")
    if not name or changes in ("", "{}"):
        return
    from rljob_probe.adapters import trl, verl
    from rljob_probe.import_hooks import after_import

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


# Changes of the memory plan since its first generation, which are relative for sizes: the trainer knows its own.


class Changes:
    """Shares and switches. A share of 1 and a switch that is off change nothing."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.micro_batch = _share(given.get("microBatchTokens"))
        """Share of the trainer's own micro-batch."""
        self.kv_cache = _share(given.get("kvCache"))
        """Share of the engine's own part of the GPU."""
        self.sync_bucket = _share(given.get("syncBucketSize"))
        """Share of the trainer's own bucket of weights."""
        self.activation_checkpointing = given.get("activationCheckpointing") is True
        self.optimizer_offload = given.get("optimizerOffload") is True
        self.empty_cache = given.get("emptyCache") is True
        self.rollout_sleep = given.get("rolloutSleep") in ("Level1", "Level2")


def changes_of(text: str) -> Changes:
    """Changes in JSON. Raises ValueError for anything else."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError(f"expected a JSON object, found {text[:80]!r}")
    return Changes(given)


def divisor(number: int, share: float, least: int = 1) -> int:
    """Largest divisor of `number` that is at most `share` of it, or else the smallest that is at least `least`."""
    divisors = [d for d in range(min(least, number), number + 1) if number % d == 0]
    return max([d for d in divisors if d <= number * share + 1e-9], default=divisors[0])


def _share(value: Any) -> float:
    return min(max(float(value), 1e-6), 1.0) if isinstance(value, (int, float)) and value > 0 else 1.0
