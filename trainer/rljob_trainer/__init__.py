"""The RLJob trainer: GRPO with vLLM and FSDP2 on the same GPUs, driven by one controller without a GPU."""
