"""Weight transfer from the policy to the rollout engines: vLLM's weight-transfer interface, one backend per device.

`send` is the policy's side, with `ipc` for GPUs. `receive` is the engine's, with `object_store_engine` for CPUs.
"""

from rljob_trainer.weight_sync.send import send_weights

__all__ = ["send_weights"]
