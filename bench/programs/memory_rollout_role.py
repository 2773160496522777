"""GPU memory of a rollout process, awake and asleep, alone and with a policy module and its optimizer in it.

    python -m bench.programs.memory_rollout_role

Records `bench/results/memory_rollout_role.json`. The trainer's own engine runs in this process. Then the policy's
module in float32 and AdamW's moments are created beside it, as in trainers whose rollout workers load the actor. Takes
about 60 s on an H200.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.harness.device_memory import device_used_bytes
from bench.harness.memory_roles import Device, Row, arm, rollout_config, workload_for
from bench.harness.record import RESULTS, record
from rljob_memory.allocator import allocator_environment
from rljob_trainer.hardware import torch_version
from rljob_trainer.rollout.colocated_engine import ColocatedEngine
from rljob_trainer.rollout.config import engine_environment


def main(device: Device, output: Path) -> None:
    os.environ |= engine_environment(device) | allocator_environment("rollout", torch_version())
    workload = workload_for(device)
    rows: list[Row] = []
    before = device_used_bytes()
    try:
        engine = ColocatedEngine(0, rollout_config(workload, device, generated_tokens=16, cuda_graphs=False))
        with arm(rows, "engine alone") as row:
            engine.start()
            row |= _awake_and_asleep(engine, before)
        with arm(rows, "engine and policy module") as row:
            beside = _policy_module(workload.uri, device)
            row |= _awake_and_asleep(engine, before)
            del beside
    finally:
        kv_cache = f"KV cache of {workload.kv_cache_bytes >> 20} MiB"
        note = f"Qwen3-0.6B shape in bfloat16, {kv_cache}, no CUDA graphs, sleep level 2"
        print(record("memory_rollout_role", rows, note, output))


def _awake_and_asleep(engine: ColocatedEngine, before: int) -> Row:
    awake = device_used_bytes() - before
    engine.sleep()
    asleep = device_used_bytes() - before
    engine.wake_weights()
    engine.wake_kv_cache()
    return {"awake_bytes": awake, "asleep_bytes": asleep}


def _policy_module(uri: str, device: Device) -> object:
    """The policy's module and AdamW with its moments, as in a policy rank."""
    import torch

    from rljob_trainer.models.resolve import resolve_model
    from rljob_trainer.policy.model import read_policy_model

    model = read_policy_model(resolve_model(uri), temperature=1.0, chunk_tokens=64).to(device)
    moments = [torch.zeros_like(parameter) for parameter in model.parameters() for _ in range(2)]
    return model, moments


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
