"""How the policy's weights reach the rollout engines: vLLM's weight-transfer interface, one backend a device.

`send` is the policy's side, `receive` the engine's; `object_store` (CPU) and `ipc` (GPU) are the backends.
"""

from rljob_trainer.weight_sync.send import send_weights

__all__ = ["send_weights"]
