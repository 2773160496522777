"""The `rljob` command: checks, diagnoses, plots and fetches runs without torch, vLLM and Ray."""
