"""The ways in which a policy rank keeps out of its neighbour's memory. Each is a setting of the memory plan.

| setting                    | what it does                                                 | where                   |
|----------------------------|--------------------------------------------------------------|-------------------------|
| `empty_cache`              | cached memory goes back to the device when a phase has ended | `cached_memory`         |
| `expandable_segments`      | sequences of changing lengths leave no unusable slivers      | `expandable_segments`   |
| `weight_export`            | exported weights are packed where the engine may read them   | `weight_export`         |
| `optimizer_offload`        | the optimizer's state is in host memory between updates      | `policy.optimizer`      |
| `detach_metrics`           | nothing of a micro-batch outlives it                         | `policy.update_metrics` |
| `micro_batch_tokens`       | activations of so many tokens exist at once                  | `algorithm.micro_batch` |
| `logprob_chunk_tokens`     | logits of so many tokens exist at once                       | `algorithm.logprobs`    |
| `activation_checkpointing` | of a layer only its input is kept                            | `policy.model`          |
| `sync_bucket_bytes`        | so much of the weights is staged at once                     | `weight_sync.transfer`  |

The engine's settings, `rollout_sleep` and `kv_cache_bytes`, are those of `rollout`.
"""
