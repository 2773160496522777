"""What is known about memory where vLLM and FSDP share GPUs: the memory plan, and each role's allocator settings."""
