"""State of an engine's weights: none, incomplete, or one complete version from the policy."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_client.errors import RunError


class WeightsNotSynced(RunError):
    """An engine was asked to generate without a complete version of the policy's weights."""


class SyncedWeights:
    """Tracks the weight syncs of one engine."""

    def __init__(self, expected: Iterable[str]) -> None:
        """`expected`: checkpoint names of the weights of a complete version."""
        self._expected = frozenset(expected)
        self._missing = set(self._expected)
        self._reason = "it has never received weights"
        self.version: int | None = None
        """The complete version. None before the first sync, during a sync, and after the weights were dropped."""
        self.interrupted = False
        """True if the last sync started and did not complete."""

    def begin(self) -> None:
        self._missing = set(self._expected)
        self._reason = "its last weight sync did not complete"
        self.version = None
        self.interrupted = True

    def receive(self, names: Iterable[str]) -> None:
        self._missing.difference_update(names)

    def complete(self, version: int) -> None:
        """Mark the sync as complete. Raises `WeightsNotSynced` if weights are missing."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise WeightsNotSynced(
                f"expected a complete weight sync {version}, found {len(self._missing)} of {len(self._expected)} "
                f"weights missing ({some}, …): the engine's model differs from the policy's"
            )
        self.version = version
        self.interrupted = False

    def drop(self) -> None:
        self._reason = "its weights were dropped when it went to sleep"
        self.version = None

    def require(self) -> int:
        """The complete version. Raises `WeightsNotSynced` if there is none."""
        if self.version is None:
            raise WeightsNotSynced(f"the rollout engine cannot generate: {self._reason}; send all weights to it first")
        return self.version
