"""A policy rank as a role: it can also send its weights to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.weight_sync import send_weights


class PolicyActor(PolicyRank):
    """What a policy process holds: the rank, and the sending side of the weight sync."""

    def __init__(self, rank: int, world_size: int, config: PolicyConfig, sync_bucket_bytes: int) -> None:
        super().__init__(rank, world_size, config)
        self._sync_bucket_bytes = sync_bucket_bytes

    def sync(self, engines: Sequence[Any], version: int) -> None:
        """Send every parameter to every engine, as `version`. All ranks call it, since gathering one is collective."""
        with self.weights_for_export() as parameters:
            send_weights(parameters, engines, version, self._sync_bucket_bytes, self.rank)
