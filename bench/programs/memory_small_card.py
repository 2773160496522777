"""Steps that policy and engine complete with little GPU memory, with the mitigations and without.

    python -m bench.programs.memory_small_card

Records `bench/results/memory_small_card.json`. The first arm uses the whole GPU and measures the memory of a step with
the mitigations. Then a second process ("ballast") takes all but that memory and a margin. The other arms run in the
rest: both weight exports, and last no mitigations, until it fails. A step generates, sleeps, updates on drawn rollouts,
wakes the weights, syncs, and wakes the KV cache. Takes about 100 s on an H200.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from bench.harness.device_memory import DevicePeak, device_used_bytes
from bench.harness.memory_roles import (
    GIB,
    Device,
    Roles,
    Row,
    arm,
    memory_settings,
    workload_for,
)
from bench.harness.record import RESULTS, record
from rljob_testing.ballast import ballast

ROOM_BYTES = GIB
"""Margin beyond the peak memory of a step with the mitigations."""

# The last one leaves a failed engine or a failed policy behind.
ARMS: dict[str, dict[str, Any]] = {
    "switch segments": {"weight_export": "SwitchSegments"},
    "reserved buffer": {"weight_export": "ReservedBuffer"},
    "without mitigations": {"empty_cache": False, "expandable_segments": False, "weight_export": "SwitchSegments"},
}


def main(device: Device, steps: int, output: Path) -> None:
    workload = workload_for(device)
    rows: list[Row] = []
    try:
        with Roles(workload, device, memory_settings(workload)) as roles:
            with arm(rows, "whole card") as whole, DevicePeak() as peak:
                _run(roles, whole, steps)
            with _small_card(device, peak.peak_bytes):
                for name, changes in ARMS.items():
                    with arm(rows, name) as row:
                        row["card_bytes"] = peak.peak_bytes + ROOM_BYTES
                        roles.change_memory(memory_settings(workload, **changes))
                        _run(roles, row, steps)
    finally:
        note = f"Qwen3-0.6B shape, up to {steps} steps an arm; ballast leaves what the whole-card arm used and 1 GiB"
        print(record("memory_small_card", rows, note, output))


def _run(roles: Roles, row: Row, steps: int) -> None:
    """Run up to `steps` steps. The row has those that completed, even if a later one fails."""
    row |= {"steps_survived": 0, "steps": []}
    for step in range(1, steps + 1):
        generate_seconds = roles.generate()
        roles.sleep()
        memory = roles.update(step).memory
        roles.wake_weights()
        sync_seconds = roles.sync()
        roles.wake_kv_cache()
        after_sync = roles.policy_memory()[-1]
        row["steps"].append(
            {
                "generate_seconds": generate_seconds,
                "sync_seconds": sync_seconds,
                "peak_allocated_bytes": memory.peak_allocated_bytes,
                "peak_reserved_bytes": memory.peak_reserved_bytes,
                "cached_after_update_bytes": memory.reserved_bytes - memory.allocated_bytes,
                "cached_after_sync_bytes": after_sync.get("reserved_bytes", 0) - after_sync.get("allocated_bytes", 0),
                "reserved_after_sync_bytes": after_sync.get("reserved_bytes", 0),
                "sync_peak_reserved_bytes": after_sync.get("peak_reserved_bytes", 0),
                "device_used_bytes": device_used_bytes(),
            }
        )
        row["steps_survived"] = step
        row["sync_seconds_median"] = statistics.median(each["sync_seconds"] for each in row["steps"])


def _small_card(device: Device, peak_bytes: int) -> AbstractContextManager[None]:
    """Ballast that leaves the peak memory of a step, and a margin."""
    if device == "cpu":
        return nullcontext()
    return ballast(leave_bytes=peak_bytes - device_used_bytes() + ROOM_BYTES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
