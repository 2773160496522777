"""Processes of the rollout role alone on their GPUs, and with a policy module in each: start, decoding, memory.

    python -m bench.programs.rollout_role [--model 0.6b|8b|70b] [--gpus N] [--device cpu]

Starts one engine over N GPUs in Ray actors, as a job with topology Disaggregated does, without a policy. `70b` is the
shape of Llama 3.3 70B, of which only a description is written: vLLM draws the weights on the GPU. Then a policy module,
sharded over the engine's processes with FSDP2, is created in the same processes, in bfloat16 and in float32, as in
trainers whose rollout workers load the actor.

Records `bench/results/rollout_role.json`, a row for each model and number of GPUs: seconds, milliseconds of a decoding
step, memory of each process and GPU, and the memory that the budget predicts. A module without room is recorded
with its error. `--device cpu`: a tiny model, to try it out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import psutil

from bench.harness.record import RESULTS, record, recorded, require_gpus
from rljob_api.job import RLJobSpec
from rljob_memory.budget import Setup, budget
from rljob_memory.hardware import Hardware
from rljob_memory.plan import first_plan
from rljob_memory.workload import workload_of
from rljob_testing.plan_accuracy.jobs import SHAPES
from rljob_trainer.errors import OutOfMemory
from rljob_trainer.hardware import this_machine, torch_may_compile, torch_version
from rljob_trainer.models import random_model
from rljob_trainer.models.checkpoint import model_dimensions
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.roles.calls import wait_for
from rljob_trainer.roles.engine_processes import EngineProcesses
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.roles.role_processes import RoleResources, RoleSettings, placement_group
from rljob_trainer.roles.rollout_actor import DisaggregatedRolloutActor
from rljob_trainer.roles.warm.start import start_warm
from rljob_trainer.rollout.synced_weights import WeightsNotSynced
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.role_settings import role_settings

NAME = "rollout_role"
MODELS = {
    "0.6b": f"qwen3?{SHAPES['0.6b']}",
    "8b": f"qwen3?{SHAPES['8b']}",
    "70b": "llama?hidden=8192&intermediate=28672&layers=80&heads=64&kvHeads=8&headDim=128&vocabulary=128256&tied=false"
    "&maxPositions=8192&dtype=bfloat16",
    "smoke": f"qwen3?{SHAPES['smoke']}&dtype=bfloat16",
}
SEQUENCES, TOKENS = 32, 64
KV_CACHE = {"cuda": "4Gi", "cpu": "64Mi"}

Row = dict[str, Any]


class EngineWithModule(DisaggregatedRolloutActor):
    """A process of the role that also decodes with weights of its own, and creates a policy module."""

    def refuses(self) -> bool:
        """True if the engine does not generate before the first sync."""
        try:
            self.generate([[5]], 1, [0])
        except WeightsNotSynced:
            return True
        return False

    def decoding_milliseconds(self, rounds: int) -> list[float]:
        """Milliseconds of a decoding step with `SEQUENCES`, in each round, by the random weights of the engine."""
        self._weights.version = 0
        prompts = [[4 + place % 32] + [5] * 15 for place in range(SEQUENCES)]
        found = []
        for number in range(rounds):
            began = time.perf_counter()
            self.generate(prompts, 1, [number * SEQUENCES + place for place in range(SEQUENCES)])
            found.append(round(1e3 * (time.perf_counter() - began) / TOKENS, 2))
        return found

    def memory(self) -> dict[str, int]:
        """Memory of this process, by torch and the kernel, and of its GPU with all processes."""
        import torch

        found = {"rss_bytes": psutil.Process().memory_info().rss}
        if self._config.device == "cpu":
            return found
        free, total = torch.cuda.mem_get_info()
        peak, now = torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved()
        return found | {"gpu_used_bytes": total - free, "peak_reserved_bytes": peak, "reserved_bytes": now}

    def with_module(self, dtype: str) -> Row:
        """Memory with a sharded policy module of `dtype`, or the error of its creation."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        from rljob_trainer.policy.model import build_policy_model, shard

        self._module: Any = None
        gc.collect()
        if self._config.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        kind = getattr(torch, dtype)
        module = build_policy_model(self._config.model_dir, temperature=1.0, chunk_tokens=64, dtype=kind)
        shard(module, init_device_mesh(self._config.device, (self.shard.size,)), torch.bfloat16)
        try:
            self._module = module.to_empty(device=self._config.device)
        except torch.OutOfMemoryError as error:
            return self.memory() | {"error": str(error)[:160]}
        return self.memory()


def main(device: Literal["cpu", "cuda"], model: str, gpus: int, output: Path) -> None:
    visible = dict(os.environ)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's
    if device == "cuda":
        require_gpus(gpus)
    model = model if device == "cuda" else "smoke"
    rows = recorded(NAME, output, gpus)
    with tempfile.TemporaryDirectory() as folder:
        directory = describe(MODELS[model], Path(folder) / "model")
        row = {"model": model, "gpus": gpus} | measured(directory, Path(folder), device, gpus)
    os.environ.clear()
    os.environ.update(visible)  # Ray hides the GPUs from its driver
    rows = [other for other in rows if (other["model"], other["gpus"]) != (model, gpus)]
    note = f"{SEQUENCES} sequences of {TOKENS} tokens, weights in bfloat16, KV cache of {KV_CACHE[device]}"
    print(json.dumps(row, indent=1))
    print(record(NAME, [*rows, row], note, output, gpus))


def describe(query: str, directory: Path) -> Path:
    """Write the model's description, and a file of its weights without their values."""
    model = random_model.parse_query(query)
    directory.mkdir()
    random_model._write_description(model, directory)
    shapes = dict(random_model._weight_shapes(model))
    with (directory / "model.safetensors").open("wb") as stream:
        random_model._write_header(stream, shapes)
        stream.truncate(stream.tell() + sum(2 * rows * columns for rows, columns in map(as_matrix, shapes.values())))
    return directory


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1] if len(shape) > 1 else 1)


def measured(model_dir: Path, folder: Path, device: Literal["cpu", "cuda"], gpus: int) -> Row:
    machine = this_machine(gpus=device == "cuda")
    spec = RLJobSpec.model_validate(job(device, gpus), by_alias=True, by_name=False)
    dimensions = model_dimensions(model_dir)
    sizes = (min(machine.gpu_memory_bytes, default=0), machine.host_memory_bytes)
    hardware = Hardware(device, *sizes, gpu=machine.gpu_name, layers_compiled=device == "cuda")
    setup = Setup(workload_of(spec), dimensions.shape(2, 0), hardware)
    plan = first_plan(spec.memory, setup)
    bundle: dict[str, float] = {"CPU": 2, "GPU": 1} if device == "cuda" else {"CPU": 2}
    hosts = RoleHosts(
        machine=machine,
        engine_machine=machine,
        device=device,
        ranks=1,
        engine_processes=gpus,
        torch_version=torch_version(),
        bundles=(bundle,) * gpus,
        shared_memory_bytes=0,
        may_compile=torch_may_compile(),
    )
    settings = role_settings(
        spec,
        plan,
        model_dir=model_dir,
        output_dir=folder,
        hosts=hosts,
        parameters=dimensions.parameters,
        allocator_environments={},
    )
    predicted = budget(setup, plan)
    row: Row = {
        "predicted": {
            "engine_in_torch_bytes": predicted.in_torch("engine", "rollout"),
            "gpu_bytes": predicted.total("gpu", "rollout", pod="rollout"),
            "host_bytes": predicted.total("host", "rollout", pod="rollout"),
            "bfloat16_module_bytes": 2 * dimensions.parameters // gpus,
            "float32_module_bytes": 4 * dimensions.parameters // gpus,
        }
    }
    clock = PartClock()
    role = started_role(settings, folder, clock)
    try:
        with clock.part("engine"):
            [engine] = role.engines
            wait_for(role.load(engine), "starting the engine")
        row["start_seconds"] = {part: round(seconds, 2) for part, seconds in clock.take().items()}
        row["refuses_before_sync"] = all(role.results("refuses", doing="generating").values())
        row["decoding_ms"] = role.results("decoding_milliseconds", 4, doing="generating")[engine[0]]
        row["alone"] = role.results("memory", doing="measuring")
        for dtype in ("bfloat16", "float32"):
            print(json.dumps(row), flush=True)
            row[f"with_{dtype}_module"] = role.results("with_module", dtype, doing="creating the policy's module")
    except OutOfMemory as failure:
        row["failed"] = str(failure)[:500]
    finally:
        for log in sorted((folder / "logs").glob("*.log")):
            print(log.read_text(errors="replace")[-1500:], file=sys.stderr)
        role.end()
    return row


def started_role(settings: RoleSettings, folder: Path, clock: PartClock) -> EngineProcesses:
    """The processes of one engine, whose objects are constructed."""
    gpus = settings.engine_processes
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    start_warm(("rollout",), settings.policy.device)
    with clock.part("ray"):
        on_gpus = gpus if settings.gpus_per_process else 0
        start_local_ray(cpus=2 * gpus, gpus=on_gpus, object_store_bytes=1 << 27)
        group = placement_group(settings.bundles)
    resources = RoleResources(group, settings.bundles, settings.gpus_per_process)
    role = EngineProcesses(f"{__spec__.name}:EngineWithModule", gpus, resources, folder / "logs", gpus)
    role.configure(settings.rollout_environment, settings.rollout, folder)
    with clock.part("processes"):
        wait_for(role.start(), "starting")
    return role


def job(device: str, gpus: int) -> dict[str, Any]:
    """The spec of a job whose engine has `gpus` GPUs. Only its rollout role runs."""
    return {
        "model": {"uri": "random://llama", "dtype": "Auto"},
        "topology": "Disaggregated",
        "task": {"name": "digits", "reward": "spread_rewards:spread"},
        "policy": {"gpusPerReplica": 8 if device == "cuda" else 0},
        "rollout": {"tensorParallelSize": gpus, "gpusPerReplica": gpus if device == "cuda" else 0},
        "algorithm": {
            "steps": 1,
            "promptsPerStep": SEQUENCES // 8,
            "groupSize": 8,
            "maxPromptTokens": 32,
            "maxResponseTokens": TOKENS,
            "ignoreEndOfSequence": True,
        },
        "memory": {"kvCache": KV_CACHE[device]},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: a tiny model")
    parser.add_argument("--model", choices=[name for name in MODELS if name != "smoke"], default="0.6b")
    parser.add_argument("--gpus", type=int, default=1, help="of the engine; on a CPU, its processes")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
