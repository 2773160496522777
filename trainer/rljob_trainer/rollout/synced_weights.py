"""Which weights an engine holds: none, some, or all of the ones the policy sent as one version."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_trainer.errors import TrainerError


class WeightsNotSynced(TrainerError):
    """An engine was asked to generate without one whole version of the policy's weights."""


class SyncedWeights:
    """Follows the weight syncs of one engine. `expected`: checkpoint names of the weights that make a whole version.

    `version` is what the engine may generate with; None before the first sync, from the start of a sync until its
    completion, and after the weights were dropped. `interrupted`: the last sync began and did not complete.
    """

    def __init__(self, expected: Iterable[str]) -> None:
        self._expected = frozenset(expected)
        self._missing = set(self._expected)
        self._reason = "no weights were ever sent to it"
        self.version: int | None = None
        self.interrupted = False

    def begin(self) -> None:
        self._missing = set(self._expected)
        self._reason = "its last weight sync did not complete"
        self.version = None
        self.interrupted = True

    def receive(self, names: Iterable[str]) -> None:
        self._missing.difference_update(names)

    def complete(self, version: int) -> None:
        """Raises `WeightsNotSynced` where weights are missing; the engine then refuses to generate."""
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise WeightsNotSynced(
                f"weight sync {version} ended with {len(self._missing)} of {len(self._expected)} weights missing "
                f"({some}, …): the engine's model is not the policy's"
            )
        self.version = version
        self.interrupted = False

    def drop(self) -> None:
        self._reason = "its weights were dropped when it went to sleep"
        self.version = None

    def require(self) -> int:
        """The version to generate with; raises `WeightsNotSynced` where there is none."""
        if self.version is None:
            raise WeightsNotSynced(f"the rollout engine refuses to generate: {self._reason}; send it all weights first")
        return self.version
