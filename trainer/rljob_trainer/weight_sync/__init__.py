"""Weight transfer from the policy to the rollout engines: vLLM's weight-transfer interface, with a backend by topology.

| topology      | on GPUs               | on CPUs        | the policy's side |
|---------------|-----------------------|----------------|-------------------|
| Colocated     | CUDA IPC (`cuda_ipc`) | object store   | `colocated`       |
| Disaggregated | NCCL broadcast        | gloo broadcast | `broadcast`       |

`engine_side` is the engine's side.
"""
