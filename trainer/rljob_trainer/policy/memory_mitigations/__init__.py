"""The memory mitigations of a policy rank. Each is a setting of the memory plan.

| setting                    | effect                                                       | module                  |
|----------------------------|--------------------------------------------------------------|-------------------------|
| `empty_cache`              | releases cached GPU memory at the end of a phase             | `caching_allocator`     |
| `expandable_segments`      | prevents fragmentation by sequences of changing lengths      | `caching_allocator`     |
| `weight_export`            | packs exported weights in memory that the engine can open    | `policy.exporting_rank` |
| `optimizer_offload`        | keeps the optimizer state in host memory between updates     | `policy.optimizer`      |
| `policy_offload`           | keeps the weights in host memory while the engine generates  | `policy_offload`        |
| `detach_metrics`           | frees the graph of each micro-batch                          | `policy.update`         |
| `micro_batch_tokens`       | limits the tokens whose activations exist at once            | `algorithm.micro_batch` |
| `logprob_chunk_tokens`     | limits the tokens whose logits exist at once                 | `algorithm.logprobs`    |
| `activation_checkpointing` | keeps only the input of each layer for backward              | `policy.model`          |
| `sync_bucket_bytes`        | limits the weights that are staged at once                   | `weight_sync.transfer`  |

`rollout` implements the settings of the engine, `rollout_sleep` and `kv_cache_bytes`.
"""
