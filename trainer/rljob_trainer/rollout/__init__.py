"""Rollout engines: vLLM, generating with the weights that the policy last sent."""
