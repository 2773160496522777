"""Where the seconds of one update go on a GPU: variants of the memory plan side by side, then a profile of kernels.

Synthetic rollouts of bench/h200_step.yaml's shape (128 completions of 512 tokens), one policy rank, no engine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rljob_api.manifest import load_manifest
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.config import MemorySettings, PolicyConfig
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollouts import RolloutBatch

PROMPTS, GROUP, RESPONSE, VOCABULARY = 16, 8, 512, 151936
PLAN = MemorySettings(micro_batch_tokens=16384, logprob_chunk_tokens=384)
VARIANTS = {
    "as planned": PLAN,
    "no empty_cache": replace(PLAN, empty_cache=False),
    "classic segments": replace(PLAN, expandable_segments=False),
    "logprob chunk 1024": replace(PLAN, logprob_chunk_tokens=1024),
    "logprob chunk 4096": replace(PLAN, logprob_chunk_tokens=4096),
    "micro-batch 8192": replace(PLAN, micro_batch_tokens=8192),
    "micro-batch 32768": replace(PLAN, micro_batch_tokens=32768),
}


def main(profile: Path | None, only: list[str]) -> None:
    model = resolve_model(load_manifest(Path(__file__).with_name("h200_step.yaml")).spec.model.uri)
    rank = connected_rank(model, PLAN)
    for name, memory in VARIANTS.items():
        if only and name not in only:
            continue
        rank.config = rank._update.config = replace(rank.config, memory=memory)  # type: ignore[misc]
        rank._model._chunk_tokens = memory.logprob_chunk_tokens
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{memory.expandable_segments}")
        gc.collect()
        torch.cuda.empty_cache()
        seconds, result = [], None
        for step in range(1, 5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            result = rank.update(batch(step))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        assert result is not None
        print(
            f"{name:<20} {statistics.median(seconds[1:]):.3f} s  (first {seconds[0]:.2f})  peak allocated "
            f"{result.memory.peak_allocated / 2**30:.1f} GiB  reserved {result.memory.peak_reserved / 2**30:.1f} GiB",
            flush=True,
        )
    if profile:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
            rank.update(batch(9))
            torch.cuda.synchronize()
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
        profile.write_text(table)
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
        profile.with_suffix(".cpu.txt").write_text(table)


def connected_rank(model: Path, memory: MemorySettings) -> PolicyRank:
    config = PolicyConfig(
        model_dir=model,
        output_dir=Path(tempfile.mkdtemp()),
        device="cuda",
        dtype="bfloat16",
        learning_rate=1e-6,
        memory=memory,
    )
    rank = PolicyRank(0, 1, config)
    rank.connect(*rank.rendezvous())
    rank.load()
    return rank


def batch(step: int) -> RolloutBatch:
    random = np.random.default_rng(step)
    count = PROMPTS * GROUP
    return RolloutBatch(
        step=step,
        group_size=GROUP,
        prompt_ids=[random.integers(0, VOCABULARY, 2, np.int32) for _ in range(PROMPTS)],
        response_ids=[random.integers(0, VOCABULARY, RESPONSE, np.int32) for _ in range(count)],
        rollout_logprobs=[np.full(RESPONSE, -12.0, np.float32) for _ in range(count)],
        finished=np.zeros(count, np.bool_),
        rewards=np.zeros(count, np.float32),
        advantages=random.standard_normal(count).astype(np.float32),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="where a table of kernels goes")
    parser.add_argument("--only", nargs="*", default=[], choices=[*VARIANTS], help="just these variants")
    main(**vars(parser.parse_args()))
