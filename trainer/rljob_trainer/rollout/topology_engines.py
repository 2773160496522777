"""Engines that share GPU and memory with a policy rank, and engines that receive its weights by broadcast."""

from __future__ import annotations

from rljob_api.memory_failure import Activity
from rljob_client.errors import RunError
from rljob_trainer.activities import activity
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout.engine import RolloutEngine, registered_backend
from rljob_trainer.rollout.requests import Requests


class ColocatedEngine(RolloutEngine):
    """An engine that sleeps. Sleep has no effect on the CPU and at level 0."""

    def __init__(self, rank: int, config: RolloutConfig) -> None:
        super().__init__(rank, config)
        self._asleep: set[str] = set()

    def start(self, store_port: int = 0) -> None:
        super().start(store_port)
        self.forget_policy()

    def forget_policy(self) -> None:
        """Close the memory of the policy that this process has opened: it would outlive the policy's process."""
        self._llm.init_weight_transfer_engine({"init_info": {}})

    def _weight_transfer_backend(self) -> str:
        if self._config.device == "cuda":
            return registered_backend("rljob_cuda_ipc", "CudaIpcWeightTransferEngine")
        return registered_backend("rljob_object_store", "ObjectStoreWeightTransferEngine")

    def _ready_requests(self) -> Requests:
        if self._asleep and self._weights.version is not None:
            raise RunError(
                "expected the rollout engine to be awake, found it asleep; wake its weights and its KV cache first"
            )
        return super()._ready_requests()

    def start_weight_update(self) -> None:
        """Begin to receive weights. Raises `RunError` if the engine's weights are asleep."""
        if "weights" in self._asleep:
            raise RunError("expected the rollout engine's weights to be awake, found them asleep; wake them first")
        super().start_weight_update()

    def sleep(self) -> None:
        """Free the GPU memory of the KV cache and the weights."""
        if self._config.device == "cpu" or self._config.sleep_level == 0 or self._asleep:
            return
        self.abandon_groups()
        if self._config.sleep_level == 2:
            self._weights.drop()
        with activity(Activity.SLEEP):
            self._llm.sleep(level=self._config.sleep_level)
        self._asleep = {"weights", "kv_cache"}

    def wake_weights(self) -> None:
        """Allocate GPU memory for the weights. After sleep level 2 they are undefined until the next weight sync."""
        self._wake("weights")

    def wake_kv_cache(self) -> None:
        """Allocate GPU memory for the KV cache."""
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            with activity(Activity.WAKE):
                self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)


class DisaggregatedEngine(RolloutEngine):
    """An engine that never sleeps, and shares no memory with a policy."""

    def _weight_transfer_backend(self) -> str:
        return registered_backend("rljob_broadcast", "BroadcastWeightTransferEngine")

    def join_policy(self, host: str, port: int, rank: int, size: int) -> None:
        """Join the group in which the policy broadcasts its weights, instead of any earlier one.

        `host`, `port`: those of the policy's store. `rank`: that of this engine in the group of `size`; the policy's is
        0.
        """
        self._llm.init_weight_transfer_engine({"init_info": {"host": host, "port": port, "rank": rank, "size": size}})
