"""The arithmetic of GRPO as pure functions: advantages, batching, log-probabilities, loss."""
