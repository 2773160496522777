"""Memory of vLLM and FSDP on shared GPUs: planning, diagnosis, forecast and recovery."""
