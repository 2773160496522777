"""Memory that the policy's allocator holds over steps of mixed lengths, beside a sleeping engine, by memory setting.

    python -m bench.programs.memory_cache

Records `bench/results/memory_cache.json`: for each step of each arm, peak bytes allocated and reserved during the
update, bytes reserved after it, and bytes free on the device then. Takes about 130 s on an H200, including the start of
both roles.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.harness.memory_roles import Device, Roles, Row, arm, memory_settings, workload_for
from bench.harness.record import RESULTS, record


@dataclass(frozen=True, slots=True)
class Arm:
    """One combination of settings."""

    changes: Row
    """Memory settings that differ from the default plan."""
    even: bool = True
    """True: micro-batches have the same token budget in all steps, as in the trainer. False: the budget differs, so no
    two steps allocate tensors of the same sizes."""


OFF = {"empty_cache": False, "expandable_segments": False}
# The last one is what the others are measured against, and the one that may not live to the end.
ARMS = {
    "both": Arm({}),
    "empty cache": Arm({"expandable_segments": False}),
    "expandable segments": Arm({"empty_cache": False}),
    "neither": Arm(OFF),
    "both, uneven": Arm({}, even=False),
    "neither, uneven": Arm(OFF, even=False),
}
UNEVEN = (1.0, 0.43, 0.81, 0.29, 0.94, 0.57, 0.72, 0.37, 0.88, 0.5, 0.97, 0.64)
"""Shares of the token budget, step by step."""


def main(device: Device, steps: int, output: Path) -> None:
    workload = workload_for(device)
    rows: list[Row] = []
    try:
        with Roles(workload, device, memory_settings(workload)) as roles:
            roles.sleep()
            roles.update(step=steps + 1)  # compiles the layers
            for name, chosen in ARMS.items():
                with arm(rows, name) as row:
                    row["steps"] = []
                    roles.change_memory(memory_settings(workload, **chosen.changes))
                    for step in range(1, steps + 1):
                        share = 1.0 if chosen.even else UNEVEN[(step - 1) % len(UNEVEN)]
                        roles.use_budget(max(int(workload.micro_batch_tokens * share), workload.longest))
                        row["steps"].append(_step(roles, step))
                    row |= _summary(row["steps"])
    finally:
        lengths = f"{workload.longest // 16} to {workload.longest} tokens"
        sequences = workload.prompts * workload.group_size
        note = f"Qwen3-0.6B shape, {sequences} sequences of {lengths} a step, the engine asleep at level 2"
        print(record("memory_cache", rows, note, output))


def _step(roles: Roles, step: int) -> Row:
    result = roles.update(step)
    memory = result.memory
    return {
        "seconds": result.seconds,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "reserved_after_bytes": memory.reserved_bytes,
        "device_free_after_bytes": memory.device_free_bytes,
    }


def _summary(steps: list[Row]) -> Row:
    most = {name: max(step[name] for step in steps) for name in steps[0]}
    return {
        "peak_allocated_bytes": most["peak_allocated_bytes"],
        "peak_reserved_bytes": most["peak_reserved_bytes"],
        "reserved_by_allocated": most["peak_reserved_bytes"] / max(most["peak_allocated_bytes"], 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
