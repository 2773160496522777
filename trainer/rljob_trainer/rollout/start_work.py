"""Work of vLLM in the start of an engine: left out if the job has no use for it, or kept for the next engine."""

from __future__ import annotations

import os
from typing import Any


def spare_start_work(sampling: Any) -> None:
    """Shorten the start of the engine of this process on a GPU. To be called before it starts.

    `sampling`: the SamplingParams of the job's responses.
    """
    from vllm import SamplingParams

    _skip_kernels_of_other_models()
    keep_kernels_for_the_next_engine()
    # vLLM's own use each feature of its sampler, of which most jobs need none: top-k and top-p alone take Triton 12 s
    # to compile (two cores; a vocabulary of 151,936).
    SamplingParams.for_sampler_warmup = staticmethod(lambda: sampling)


def _skip_kernels_of_other_models() -> None:
    """Let vLLM 0.26 start without the kernels that route tokens in some mixtures of experts.

    It compiles them in every start, for any model, and keeps them in no cache: 12 s of 76 (H200, eleven processes that
    started side by side). Later versions look at the model first.
    """
    from vllm.model_executor.warmup import kernel_warmup

    if hasattr(kernel_warmup, "_LL_BF16_WARMUP_MODEL_SHAPES"):
        kernel_warmup._warmup_ll_bf16_router_gemm = lambda: None


def keep_kernels_for_the_next_engine() -> None:
    """Let all engines keep the sampler's kernels in one directory.

    vLLM moves inductor's cache to a directory for the engine's settings, and inductor moves Triton's there, too, but
    only if it compiles. So each change of the settings, and the second start with the same ones, compiled the
    sampler's kernels again: 20 s (H200).
    """
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache"))  # Triton's default
