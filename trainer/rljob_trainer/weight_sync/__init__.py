"""Weight transfer from the policy to the rollout engines: vLLM's weight-transfer interface, with a backend by topology.

| topology      | on GPUs             | on CPUs                                  | the policy's side |
|---------------|---------------------|------------------------------------------|-------------------|
| Colocated     | CUDA IPC (`ipc`)    | object store (`object_store_engine`)     | `send`            |
| Disaggregated | NCCL broadcast      | gloo broadcast (both `broadcast_engine`) | `broadcast`       |

`receive` registers the engine's side with vLLM.
"""

from rljob_trainer.weight_sync.send import send_weights

__all__ = ["send_weights"]
