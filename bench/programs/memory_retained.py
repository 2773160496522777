"""Memory allocated after each micro-batch of one policy update, with detached metrics and without.

    python -m bench.programs.memory_retained

Records `bench/results/memory_retained.json`: growth per micro-batch and in all. One rank runs the trainer's own update
on a model with 4 layers and the layer and vocabulary sizes of Qwen3-0.6B; a micro-batch is one sequence of 512 tokens.
The arm without detached metrics ends after 256 micro-batches. Takes about 60 s on an H200.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.harness.memory_roles import (
    QWEN3_0_6B,
    TINY,
    Device,
    Row,
    Workload,
    arm,
    memory_settings,
    normal_scores,
    policy_config,
    read_memory_log,
)
from bench.harness.record import RESULTS, record
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import RolloutBatch

SEQUENCE_TOKENS = 512
WARM_UP = 8
"""Micro-batches before growth is counted: the first one allocates gradients and the libraries' workspaces."""


def main(device: Device, micro_batches: int, output: Path) -> None:
    workload = replace(QWEN3_0_6B, uri=QWEN3_0_6B.uri.replace("layers=28", "layers=4")) if device == "cuda" else TINY
    workload = replace(workload, longest=min(SEQUENCE_TOKENS, workload.longest))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        settings = memory_settings(workload, micro_batch_tokens=workload.longest)
        config = policy_config(workload, device, settings, Path(directory))
        rank = PolicyRank(0, 1, config)
        rank.connect(*rank.rendezvous())
        rank.load()
        for step, (name, detached, count) in enumerate(
            [("detached", True, micro_batches), ("not detached", False, min(256, micro_batches))], start=2
        ):
            with arm(rows, name) as row:
                rank.change_memory(settings.model_copy(update={"detach_metrics": detached}))
                rank.update(same_length_rollouts(workload, 1, 2 * WARM_UP))  # compiles the layers again
                result = rank.update(same_length_rollouts(workload, step, count))
                row |= growth(read_memory_log(config.output_dir), step)
                row["milliseconds_per_micro_batch"] = 1000 * result.seconds / count
    note = f"one sequence of {workload.longest} tokens a micro-batch; growth counted from micro-batch {WARM_UP} on"
    print(record("memory_retained", rows, note, output))


def same_length_rollouts(workload: Workload, step: int, sequences: int) -> RolloutBatch:
    """Rollouts of the longest length, so that each is a micro-batch and all are alike."""
    draw = np.random.default_rng(step)
    response_tokens = workload.longest - workload.prompt_tokens
    tokens = draw.integers(3, workload.vocabulary, (sequences, workload.longest)).astype(np.int32)
    return RolloutBatch(
        step=step,
        group_size=1,
        prompt_ids=list(tokens[:, : workload.prompt_tokens]),
        response_ids=list(tokens[:, workload.prompt_tokens :]),
        rollout_logprobs=list(np.full((sequences, response_tokens), -np.log(workload.vocabulary), np.float32)),
        finished=np.ones(sequences, np.bool_),
    ).scored(*normal_scores(draw, sequences))


def growth(log: list[Row], step: int) -> Row:
    """Growth of allocated memory over the micro-batches of `step`, from its memory log."""
    allocated = [line["allocated_bytes"] for line in log if line["step"] == step and line["micro_batch"] is not None]
    counted = allocated[WARM_UP:]
    return {
        "micro_batches": len(allocated),
        "growth_bytes": counted[-1] - counted[0],
        "growth_bytes_per_micro_batch": (counted[-1] - counted[0]) / (len(counted) - 1),
        "allocated_bytes": allocated[:: max(len(allocated) // 64, 1)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--micro-batches", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
