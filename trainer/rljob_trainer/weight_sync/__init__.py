"""Weight transfer from the policy to the rollout engines: vLLM's weight-transfer interface, with a backend by topology.

| topology      | on GPUs          | on CPUs        | the policy's side |
|---------------|------------------|----------------|-------------------|
| Colocated     | CUDA IPC (`ipc`) | object store   | `send`            |
| Disaggregated | NCCL broadcast   | gloo broadcast | `broadcast`       |

`receive` registers the engine's side (`engine_side`) with vLLM.
"""

from rljob_trainer.weight_sync.send import send_weights

__all__ = ["send_weights"]
