"""Rollout engines: vLLM, with the weights that the policy sent last."""
