"""Time and memory of each memory setting, changed alone from the default plan, in one set of processes.

    python -m bench.programs.memory_mitigation_cost

Records `bench/results/memory_mitigation_cost.json`: for each arm, median seconds of an update and of a sync, peak bytes
allocated and reserved in an update, and bytes reserved afterwards. No arm changes the time of generation, so it is
measured once. Takes about 180 s on an H200, half of them for the start of an engine with CUDA graphs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from bench.harness.memory_roles import Device, Roles, Row, Workload, arm, memory_settings, workload_for
from bench.harness.record import RESULTS, record

WARM_UP_STEPS = 1
DEFAULT = "default plan"


def arms(workload: Workload) -> dict[str, dict[str, Any]]:
    """Changes of the default settings, by name. `sleep` is the engine's.

    The cost of detached metrics is measured by `memory_retained`: to keep graphs, layers must be compiled differently.
    """
    without = {"empty_cache": False, "expandable_segments": False, "sleep": False}
    return {
        DEFAULT: {},
        "emptyCache: Disabled": {"empty_cache": False},
        "expandableSegments: Disabled": {"expandable_segments": False},
        "rolloutSleep: Disabled": {"sleep": False},
        "weightExport: ReservedBuffer": {"weight_export": "ReservedBuffer"},
        "none of them": without,
        f"{DEFAULT}, again": {},
        "microBatchTokens: half": {"micro_batch_tokens": workload.micro_batch_tokens // 2},
        "logprobChunkTokens: a quarter": {"logprob_chunk_tokens": workload.logprob_chunk_tokens // 4},
        "optimizerOffload: Enabled": {"optimizer_offload": True},
        "activationCheckpointing: Enabled": {"activation_checkpointing": True},
    }


def main(device: Device, repeats: int, output: Path) -> None:
    workload = workload_for(device)
    rows: list[Row] = []
    try:
        with Roles(
            workload, device, memory_settings(workload), generated_tokens=workload.longest // 2, cuda_graphs=True
        ) as roles:
            with arm(rows, "generation") as row:
                row["generate_seconds"] = min(roles.generate() for _ in range(2))
            roles.sleep()
            roles.update(1)  # compiles the layers
            roles.wake_weights()
            roles.sync()
            roles.wake_kv_cache()
            for name, changes in arms(workload).items():
                with arm(rows, name) as row:
                    row |= _measure(roles, workload, repeats, **changes)
    finally:
        note = (
            f"Qwen3-0.6B shape, {workload.prompts * workload.group_size} sequences of up to {workload.longest} tokens; "
            f"medians of {repeats} steps after {WARM_UP_STEPS}, the same rollouts in every arm"
        )
        print(record("memory_mitigation_cost", rows, note, output))


def _measure(roles: Roles, workload: Workload, repeats: int, *, sleep: bool = True, **changes: Any) -> Row:
    roles.change_memory(memory_settings(workload, **changes))
    steps = [_step(roles, step, sleep) for step in range(1, WARM_UP_STEPS + repeats + 1)][WARM_UP_STEPS:]
    medians = {name: statistics.median(step[name] for step in steps) for name in steps[0] if name.endswith("seconds")}
    most = {name: max(step[name] for step in steps) for name in steps[0] if name.endswith("bytes")}
    return medians | most


def _step(roles: Roles, step: int, sleep: bool) -> Row:
    asleep_seconds = roles.sleep() if sleep else 0.0
    result = roles.update(step)
    if sleep:
        asleep_seconds += roles.wake_weights()
    sync_seconds = roles.sync()
    if sleep:
        asleep_seconds += roles.wake_kv_cache()
    after_sync = roles.policy_memory()[-1]
    return {
        "sleep_and_wake_seconds": asleep_seconds,
        "update_seconds": result.seconds,
        "sync_seconds": sync_seconds,
        "without_generation_seconds": asleep_seconds + result.seconds + sync_seconds,
        "peak_allocated_bytes": result.memory.peak_allocated_bytes,
        "peak_reserved_bytes": result.memory.peak_reserved_bytes,
        "reserved_after_update_bytes": result.memory.reserved_bytes,
        "reserved_after_sync_bytes": after_sync.get("reserved_bytes", 0),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
