"""An engine with GPUs of its own: it receives the weights by broadcast, from a policy on another GPU or machine."""

from __future__ import annotations

from rljob_trainer.rollout.engine import RolloutEngine


class DisaggregatedEngine(RolloutEngine):
    """An engine that never sleeps, and shares no memory with a policy."""

    def _weight_transfer_backend(self) -> str:
        from rljob_trainer.weight_sync.receive import broadcast_backend

        return broadcast_backend()

    def join_policy(self, host: str, port: int, rank: int, size: int) -> None:
        """Join the group in which the policy broadcasts its weights, instead of any earlier one.

        `host`, `port`: of the policy's store. `rank`: of this engine in the group of `size`; the policy's is 0.
        """
        self._llm.init_weight_transfer_engine({"init_info": {"host": host, "port": port, "rank": rank, "size": size}})
