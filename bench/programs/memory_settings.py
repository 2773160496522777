"""GPU memory and seconds by memory setting, with a model of Qwen3-0.6B's shape on one GPU. Times are of an H200.

    python -m bench.programs.memory_settings PART... [--device cpu] [--output DIR]

Each part records `memory_PART.json`:
    mitigation_cost  seconds and bytes of a step with each setting changed alone, in one set of processes; 180 s
    cache            memory that the policy's allocator holds over steps of mixed lengths; 130 s
    retained         memory allocated after each micro-batch, with detached metrics and without; 60 s
    small_card       steps completed while another process leaves 1 GiB more than a step needs; 100 s
    controller       memory of GPU 0 that the controller uses, and a program that calls CUDA once; 25 s
    rollout_role     a rollout process awake and asleep, alone and with a policy module in it; 60 s
    telemetry        cost of the memory log, and of a snapshot of a failed request; 60 s

`--device cpu` tries a part out with a tiny model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.harness.memory_roles import (
    GIB,
    ColocatedPair,
    Device,
    MeasuredStep,
    Row,
    arm,
    memory_settings,
    policy_config,
    random_rollouts,
    read_memory_log,
    rollout_config,
    workload_for,
)
from bench.harness.record import RESULTS, record, require_gpus
from bench.harness.samplers import DevicePeak, device_used_bytes
from rljob_memory.allocator import allocator_environment
from rljob_testing.ballast import ballast
from rljob_trainer.hardware import torch_version
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout.config import engine_environment
from rljob_trainer.rollout.topology_engines import ColocatedEngine
from rljob_trainer.telemetry.memory import MemoryLog

Changes = Mapping[str, Any]

WITHOUT_MITIGATIONS = {"empty_cache": False, "expandable_segments": False}
STEPS = 5


def mitigation_cost(device: Device, rows: list[Row]) -> None:
    """No setting changes the time of generation, so it is measured once. The first arm of a process is slower."""
    workload = workload_for(device)
    arms: dict[str, Changes] = {
        "default plan": {},
        "emptyCache: Disabled": {"empty_cache": False},
        "expandableSegments: Disabled": {"expandable_segments": False},
        "rolloutSleep: Disabled": {"sleep": False},
        "weightExport: ReservedBuffer": {"weight_export": "ReservedBuffer"},
        "none of them": WITHOUT_MITIGATIONS | {"sleep": False},
        "default plan, again": {},
        "microBatchTokens: half": {"micro_batch_tokens": workload.micro_batch_tokens // 2},
        "logprobChunkTokens: a quarter": {"logprob_chunk_tokens": workload.logprob_chunk_tokens // 4},
        "optimizerOffload: Enabled": {"optimizer_offload": True},
        "activationCheckpointing: Enabled": {"activation_checkpointing": True},
    }
    tokens = workload.longest // 2
    with ColocatedPair(workload, device, memory_settings(workload), generated_tokens=tokens, cuda_graphs=True) as roles:
        with arm(rows, "generation") as row:
            row["generate_seconds"] = min(roles.generate() for _ in range(2))
        step_of(roles, 1, sleep=True)  # compiles the layers
        for name, changes in arms.items():
            with arm(rows, name) as row:
                sleep = changes.get("sleep", True)
                settings = {setting: value for setting, value in changes.items() if setting != "sleep"}
                roles.change_memory(memory_settings(workload, **settings))
                steps = [step_of(roles, step, sleep) for step in range(1, 5)][1:]
                row |= {key: statistics.median(step[key] for step in steps) for key in steps[0] if "seconds" in key}
                row |= {key: max(step[key] for step in steps) for key in steps[0] if "bytes" in key}


def step_of(roles: ColocatedPair, step: int, sleep: bool) -> Row:
    """A step without its generation."""
    asleep_seconds = roles.sleep() if sleep else 0.0
    result = roles.update(step)
    asleep_seconds += roles.wake_weights() if sleep else 0.0
    sync_seconds = roles.sync()
    asleep_seconds += roles.wake_kv_cache() if sleep else 0.0
    after_sync = roles.policy_memory()[-1]
    return {
        "update_seconds": result.seconds,
        "sync_seconds": sync_seconds,
        "without_generation_seconds": asleep_seconds + result.seconds + sync_seconds,
        "peak_allocated_bytes": result.memory.peak_allocated_bytes,
        "peak_reserved_bytes": result.memory.peak_reserved_bytes,
        "allocated_after_update_bytes": result.memory.allocated_bytes,
        "reserved_after_update_bytes": result.memory.reserved_bytes,
        "allocated_after_sync_bytes": after_sync.get("allocated_bytes", 0),
        "reserved_after_sync_bytes": after_sync.get("reserved_bytes", 0),
        "sync_peak_reserved_bytes": after_sync.get("peak_reserved_bytes", 0),
    }


def cache(device: Device, rows: list[Row]) -> None:
    """In the uneven arms, the token budget differs from step to step, so no two allocate tensors of the same sizes.

    A step: peak allocated, peak reserved, and reserved bytes after the update.
    """
    workload = workload_for(device)
    uneven = (1.0, 0.43, 0.81, 0.29, 0.94, 0.57, 0.72, 0.37, 0.88, 0.5, 0.97, 0.64)
    arms: dict[str, Changes] = {
        "both": {},
        "empty cache": {"expandable_segments": False},
        "expandable segments": {"empty_cache": False},
        "neither": WITHOUT_MITIGATIONS,
        "both, uneven": {},
        "neither, uneven": WITHOUT_MITIGATIONS,
    }
    with ColocatedPair(workload, device, memory_settings(workload)) as roles:
        roles.sleep()
        roles.update(step=len(uneven) + 1)  # compiles the layers
        for name, changes in arms.items():
            with arm(rows, name) as row:
                roles.change_memory(memory_settings(workload, **changes))
                row["steps"] = []
                for step, share in enumerate(uneven, start=1):
                    tokens = int(workload.micro_batch_tokens * (share if "uneven" in name else 1.0))
                    roles.use_budget(max(tokens, workload.longest))
                    memory = roles.update(step).memory
                    peaks = memory.peak_allocated_bytes, memory.peak_reserved_bytes
                    row["steps"].append([*peaks, memory.reserved_bytes])


def retained(device: Device, rows: list[Row]) -> None:
    """One sequence a micro-batch; the arm without detached metrics ends after 256. Growth is counted from the ninth on:
    the first allocates gradients and the libraries' workspaces."""
    workload = workload_for(device)
    workload = replace(workload, uri=workload.uri.replace("layers=28", "layers=4"), longest=min(512, workload.longest))
    warm_up, counts = 8, {"detached": 4096, "not detached": 256} if device == "cuda" else {"detached": 32}
    settings = memory_settings(workload, micro_batch_tokens=workload.longest)
    with policy_rank(workload, device, settings) as rank:
        for step, (name, count) in enumerate(counts.items(), start=2):
            with arm(rows, name) as row:
                rank.change_memory(settings.model_copy(update={"detach_metrics": name == "detached"}))
                rank.update(random_rollouts(workload, 1, 2 * warm_up))  # compiles the layers again
                seconds = rank.update(random_rollouts(workload, step, count)).seconds
                row["milliseconds_per_micro_batch"] = 1000 * seconds / count
                log = [line for line in read_memory_log(rank.config.output_dir) if line["step"] == step]
                allocated = [line.get("allocated_bytes", 0) for line in log if line["micro_batch"] is not None]
                row["micro_batches"] = len(allocated)
                row["growth_bytes"] = allocated[-1] - allocated[warm_up]
                row["growth_bytes_per_micro_batch"] = row["growth_bytes"] / (len(allocated) - warm_up - 1)


@contextmanager
def policy_rank(workload: MeasuredStep, device: Device, settings: Any) -> Iterator[PolicyRank]:
    """A policy rank in this process."""
    with tempfile.TemporaryDirectory() as directory:
        rank = PolicyRank(0, 1, policy_config(workload, device, settings, Path(directory)))
        rank.connect(*rank.rendezvous())
        rank.load()
        try:
            yield rank
        finally:
            dist.destroy_process_group()


def small_card(device: Device, rows: list[Row]) -> None:
    """The first arm has the whole GPU and measures a step. The last leaves a failed engine or policy behind."""
    workload = workload_for(device)
    arms: dict[str, Changes] = {
        "switch segments": {"weight_export": "SwitchSegments"},
        "reserved buffer": {"weight_export": "ReservedBuffer"},
        "without mitigations": WITHOUT_MITIGATIONS | {"weight_export": "SwitchSegments"},
    }

    def run(row: Row) -> None:
        row["steps"] = []
        for step in range(1, STEPS + 1):
            roles.generate()
            row["steps"].append(step_of(roles, step, sleep=True))

    with ColocatedPair(workload, device, memory_settings(workload)) as roles:
        with arm(rows, "whole card") as row, DevicePeak() as peak:
            run(row)
        card_bytes = peak.peak_bytes + GIB
        with ballast(leave_bytes=card_bytes - device_used_bytes()) if device == "cuda" else nullcontext():
            for name, changes in arms.items():
                with arm(rows, name) as row:
                    row["card_bytes"] = card_bytes
                    roles.change_memory(memory_settings(workload, **changes))
                    run(row)


CONTROLLER_PROGRAMS = {
    "controller": f"""
import os
from pathlib import Path
from rljob_api.manifest import load_manifest
from rljob_memory.budget.host import object_store_bytes
from rljob_trainer.hardware import this_machine
from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.tasks.build import build_task

job = load_manifest(Path({str(Path(__file__).with_name("h200_step.yaml"))!r}))
gpus = len(this_machine().gpu_memory_bytes)
task = build_task(job.spec.task, load_tokenizer(resolve_model(job.spec.model.uri)), 16, Path("."), 0)
task.prompts(1, 16)
start_local_ray(cpus=2, gpus=gpus, object_store_bytes=object_store_bytes(1 << 28, "cuda" if gpus else "cpu"))
assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "the controller must not see the GPUs"
""",
    "synchronize": "import torch; torch.cuda.synchronize()\n",
}
"""`controller` does what the controller does before and between the work of the roles."""


def controller(device: Device, rows: list[Row]) -> None:
    for name, program in CONTROLLER_PROGRAMS.items() if device == "cuda" else [("controller", "")]:
        with arm(rows, name) as row:
            before = device_used_bytes()
            command = [sys.executable, "-c", f"{program}\nprint('ready', flush=True)\ninput()\n"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                if not any(line.strip() == "ready" for line in process.stdout):
                    raise RuntimeError("the program ended before it was ready; its error is above")
                row["device_bytes"] = device_used_bytes() - before
                process.communicate(input="\n", timeout=60)


def rollout_role(device: Device, rows: list[Row]) -> None:
    """Measure trainers whose rollout workers load the actor."""
    os.environ |= engine_environment(device) | allocator_environment("rollout", torch_version())
    workload = workload_for(device)
    before = device_used_bytes()
    engine = ColocatedEngine(0, rollout_config(workload, device, generated_tokens=16, cuda_graphs=False))

    def awake_and_asleep() -> Row:
        awake = device_used_bytes() - before
        engine.sleep()
        asleep = device_used_bytes() - before
        engine.wake_weights()
        engine.wake_kv_cache()
        return {"awake_bytes": awake, "asleep_bytes": asleep}

    with arm(rows, "engine alone") as row:
        engine.start()
        row |= awake_and_asleep()
    with arm(rows, "engine and policy module without moments") as row:
        from rljob_testing.policy_models import read_policy_model

        module = read_policy_model(resolve_model(workload.uri), temperature=1.0, chunk_tokens=64).to(device)
        row |= awake_and_asleep()
    with arm(rows, "engine and policy module") as row:
        import torch

        moments = [torch.zeros_like(parameter) for parameter in module.parameters() for _ in range(2)]
        row |= awake_and_asleep()
        del moments


def telemetry(device: Device, rows: list[Row]) -> None:
    """About 30 micro-batches per update. Samples are timed alone: updates with and without the log differ by noise."""
    workload = workload_for(device)
    tokens = 2_560 if device == "cuda" else workload.longest
    with policy_rank(workload, device, memory_settings(workload, micro_batch_tokens=tokens)) as rank:
        directory, batch = rank.config.output_dir, random_rollouts(workload, 1)
        with arm(rows, "samples alone") as row:
            update_seconds = statistics.median([rank.update(batch).seconds for _ in range(6)][2:])
            micro_batches = max(line["micro_batch"] or 0 for line in read_memory_log(directory)) + 1
            log = MemoryLog(directory / "timed" / "policy-0.jsonl", device)
            log.begin_phase(1, "update")
            sample_us = microseconds(lambda: log.record(1, "update", 0))
            phase_us = microseconds(lambda: whole_phase(log))
            row |= {
                "micro_batches": micro_batches,
                "micro_batch_microseconds": sample_us,
                "phase_microseconds": phase_us,
                # update, sync, and at times a checkpoint
                "share_percent": 1e-4 * (micro_batches * sample_us + 3 * phase_us) / update_seconds,
            }
        if device == "cuda":
            with arm(rows, "snapshot of a failed request") as row:
                # Only the first failure of a phase leaves a snapshot.
                row["milliseconds_with"], row["milliseconds_without"] = (failed_request() for _ in range(2))
                row["json_bytes"] = sum(path.stat().st_size for path in (directory / "oom").glob("*.json"))


def whole_phase(log: MemoryLog) -> None:
    log.begin_phase(1, "update")
    log.record(1, "update")


def microseconds(call: Callable[[], object], times: int = 200) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return 1e6 * (time.perf_counter() - begun) / times


def failed_request() -> float:
    """Milliseconds of a request of twice the GPU's memory."""
    import torch

    begun = time.perf_counter()
    with suppress(torch.OutOfMemoryError):
        torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
    return 1e3 * (time.perf_counter() - begun)


PARTS = {
    each.__name__: each for each in (mitigation_cost, cache, retained, small_card, controller, rollout_role, telemetry)
}


def main(parts: list[str], device: Device, output: Path) -> None:
    if device == "cuda":
        require_gpus(1)
    for name in parts:
        rows: list[Row] = []
        try:
            PARTS[name](device, rows)
        finally:
            note = "Qwen3-0.6B's shape; 128 sequences of up to 1,024 tokens a step"
            print(record(f"memory_{name}", rows, note, output))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model, to try it out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
