"""The `rljob` command: checks and diagnoses jobs, reports and fetches runs without torch, vLLM and Ray."""
