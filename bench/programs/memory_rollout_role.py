"""GPU memory of a rollout process, awake and asleep, alone and with a policy module and its optimizer in it.

    python -m bench.programs.memory_rollout_role [--shape 0.6b|8b]

Records `bench/results/memory_rollout_role.json`; rows of the other shape that it already has are kept. The trainer's
own engine runs in this process. Then the policy's float32 module and AdamW's moments are created in the same process,
as in trainers whose rollout workers load the actor. 0.6B takes about 60 s on an H200. The last arm of 8B needs about
115 GiB of GPU memory (calculated); on a smaller GPU it is recorded as failed, with its error. The first run writes
the model, which takes 16 GB of disk.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from bench.harness.device_memory import device_used_bytes
from bench.harness.memory_roles import QWEN3_0_6B, QWEN3_8B, TINY, Device, Row, arm, rollout_config
from bench.harness.needs import require_gpus
from bench.harness.record import RESULTS, record, recorded
from rljob_memory.allocator import allocator_environment
from rljob_trainer.hardware import torch_version
from rljob_trainer.rollout.colocated_engine import ColocatedEngine
from rljob_trainer.rollout.config import engine_environment

NAME = "memory_rollout_role"
WORKLOADS = {"0.6b": QWEN3_0_6B, "8b": QWEN3_8B}


def main(device: Device, shape: str, output: Path) -> None:
    if device == "cuda":
        require_gpus(1)
    others = recorded(NAME, output)
    os.environ |= engine_environment(device) | allocator_environment("rollout", torch_version())
    workload = WORKLOADS[shape] if device == "cuda" else TINY
    rows: list[Row] = []
    before = device_used_bytes()
    try:
        engine = ColocatedEngine(0, rollout_config(workload, device, generated_tokens=16, cuda_graphs=False))
        with arm(rows, "engine alone") as row:
            engine.start()
            row |= _awake_and_asleep(engine, before)
        with arm(rows, "engine and policy module without moments") as row:
            module = _policy_module(workload.uri, device)
            row |= _awake_and_asleep(engine, before)
        with arm(rows, "engine and policy module") as row:
            moments = _moments(module)
            row |= _awake_and_asleep(engine, before)
            del moments
    finally:
        note = "Qwen3's shapes in bfloat16, KV cache of 8 GiB, no CUDA graphs, sleep level 2"
        of_shape = [row | {"shape": shape} for row in rows]
        print(record(NAME, merged(others, of_shape), note, output))


def merged(before: list[Row], rows: list[Row]) -> list[Row]:
    """`rows`, all of one shape, in place of those of that shape; the smaller shape first. Old rows are of 0.6B."""
    shapes = {row["shape"] for row in rows}
    kept = [row for row in before if row.get("shape", "0.6b") not in shapes]
    return sorted([*kept, *rows], key=lambda row: row.get("shape", "0.6b") != "0.6b")


def _awake_and_asleep(engine: ColocatedEngine, before: int) -> Row:
    awake = device_used_bytes() - before
    engine.sleep()
    asleep = device_used_bytes() - before
    engine.wake_weights()
    engine.wake_kv_cache()
    return {"awake_bytes": awake, "asleep_bytes": asleep}


def _policy_module(uri: str, device: Device) -> Any:
    """The policy's module in float32, as in a policy rank."""
    from rljob_trainer.models.resolve import resolve_model
    from rljob_trainer.policy.model import read_policy_model

    return read_policy_model(resolve_model(uri), temperature=1.0, chunk_tokens=64).to(device)


def _moments(model: Any) -> list[Any]:
    """AdamW's moments."""
    import torch

    return [torch.zeros_like(parameter) for parameter in model.parameters() for _ in range(2)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--shape", choices=list(WORKLOADS), default="0.6b", help="of Qwen3's models, on a GPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
