"""The environment variables of a process that holds a rollout engine."""

from __future__ import annotations


def engine_environment(device: str) -> dict[str, str]:
    """What must be set before vLLM is imported on `device` ("cpu" or "cuda"), but for the number of threads."""
    common = {
        # The engine runs in the actor's own process: one process less, and weights arrive without another copy.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cuda":
        return common
    return common | {
        # enforce_eager alone still compiles a few functions with a C++ compiler on the first request.
        "TORCH_COMPILE_DISABLE": "1",
        # Policy and engine take turns on the same cores; threads pinned to some would stand in each other's way.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
