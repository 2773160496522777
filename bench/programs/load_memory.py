"""Host memory and seconds of policy ranks while they load a model: whole, or by the slices of their shards.

    python -m bench.programs.load_memory [--layers N] [--output DIR]

Records `bench/results/load_memory.json`. For 1, 2 and 4 ranks on a CPU: the growth of each rank's peak resident set
while it loads, and the seconds and processor seconds of the slowest. The model has random weights in bfloat16 (168M
parameters by default, 336 MB of files); the ranks keep float32 shards. `whole`: each rank reads the whole model with
`from_pretrained` and shards it then, as RLJob did before it read slices. Fails unless both give the same shards, bit
for bit. Takes one minute on two cores, and 5 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from bench.harness.peak_memory import reset_peak, status_bytes
from bench.harness.record import RESULTS, record
from rljob_trainer.models.checkpoint import model_dimensions
from rljob_trainer.models.resolve import resolve_model

Arm = Literal["whole", "slices"]
ARMS: tuple[Arm, ...] = ("whole", "slices")
RANKS = (1, 2, 4)

_processes = get_context("forkserver")
_processes.set_forkserver_preload(["rljob_trainer.policy.model", "transformers.models.qwen3.modeling_qwen3"])


@dataclass(frozen=True, slots=True)
class Loaded:
    """Measurements of one rank."""

    shard_bytes: int
    peak_rss_bytes: int
    """Growth of the peak resident set while loading, with mapped pages of files."""
    seconds: float
    processor_seconds: float
    """Of all threads."""
    digest: str
    """SHA-256 of the rank's shards."""


def main(layers: int, output: Path) -> None:
    uri = (
        f"random://qwen3?hidden=1024&intermediate=3072&layers={layers}&heads=16&kvHeads=8&headDim=64"
        "&vocabulary=32768&dtype=bfloat16"
    )
    with tempfile.TemporaryDirectory() as cache:
        model_dir = resolve_model(uri, Path(cache))
        parameters = model_dimensions(model_dir).parameters
        rows: list[dict[str, Any]] = []
        for ranks in RANKS:
            of_arm = {arm: _load(arm, ranks, model_dir) for arm in ARMS}
            if len({tuple(each.digest for each in loaded) for loaded in of_arm.values()}) != 1:
                raise SystemExit(f"expected the same shards from {' and '.join(ARMS)} on {ranks} ranks, found others")
            rows += [{"arm": arm, "ranks": ranks, **_summary(loaded)} for arm, loaded in of_arm.items()]
            print(*rows[-2:], sep="\n", flush=True)
    print(record("load_memory", rows, f"{parameters:,} parameters in bfloat16 files, float32 shards", output))


def _summary(loaded: list[Loaded]) -> dict[str, Any]:
    return {
        "parameter_bytes": sum(each.shard_bytes for each in loaded),
        "peak_rss_bytes": max(each.peak_rss_bytes for each in loaded),
        "peak_rss_bytes_of_all": sum(each.peak_rss_bytes for each in loaded),
        "seconds": round(max(each.seconds for each in loaded), 2),
        "processor_seconds": round(max(each.processor_seconds for each in loaded), 2),
    }


def _load(arm: Arm, ranks: int, model_dir: Path) -> list[Loaded]:
    with tempfile.TemporaryDirectory() as directory:
        pipes, workers, store = [], [], f"{directory}/store"
        for rank in range(ranks):
            here, there = _processes.Pipe()
            workers.append(_processes.Process(target=_rank, args=(there, arm, rank, ranks, model_dir, store)))
            workers[-1].start()
            there.close()
            pipes.append(here)
        loaded = [Loaded(**pipe.recv()) for pipe in pipes]
        for worker in workers:
            worker.join()
    return loaded


def _rank(pipe: Connection, arm: Arm, rank: int, ranks: int, model_dir: Path, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    from rljob_trainer.policy.gradients import local
    from rljob_trainer.policy.model import build_policy_model, sent_name, shard
    from rljob_trainer.policy.weight_loading import load_weights

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    dist.barrier()
    before, began, worked = reset_peak(), time.monotonic(), time.process_time()
    if arm == "whole":
        model = _whole_model(model_dir)
        shard(model, mesh, torch.float32)
    else:
        model = build_policy_model(model_dir, temperature=1.0, chunk_tokens=64)
        shard(model, mesh, torch.float32)
        load_weights(model, model_dir, "cpu", sent_name)
    seconds, processor_seconds = time.monotonic() - began, time.process_time() - worked
    peak = status_bytes("VmHWM") - before
    digest, size = hashlib.sha256(), 0
    for name, parameter in model.named_parameters():
        values = local(parameter).contiguous().numpy()
        digest.update(name.encode() + values.tobytes())
        size += values.nbytes
    pipe.send(asdict(Loaded(size, peak, seconds, processor_seconds, digest.hexdigest())))
    dist.barrier()
    dist.destroy_process_group()


def _whole_model(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from rljob_trainer.policy.model import PolicyModel

    causal_lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return PolicyModel(causal_lm, temperature=1.0, chunk_tokens=64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    main(arguments.layers, arguments.output)
