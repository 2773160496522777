"""GPU memory of RLJob's controller, and of programs that call CUDA once.

    python -m bench.programs.memory_controller

Records `bench/results/memory_controller.json`: the bytes of GPU 0 in use while each program runs, and the number of
processes that the driver reports there. The first program does what the controller does before and between the work of
the roles: it counts the GPUs, reads the manifest, creates the task, and starts Ray, without access to a GPU from then
on. Takes about 25 s on an H200.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.harness.device_memory import device_processes, device_used_bytes
from bench.harness.memory_roles import Row, arm
from bench.harness.record import RESULTS, record

MANIFEST = Path(__file__).parent / "h200_step.yaml"

CONTROLLER = f"""
import os
from pathlib import Path
from rljob_api.manifest import load_manifest
from rljob_trainer.hardware import this_machine
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.models.checkpoint import load_tokenizer
from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.tasks.build import build_task

job = load_manifest(Path({str(MANIFEST)!r}))
gpus = len(this_machine().gpu_memory_bytes)
task = build_task(job.spec.task, load_tokenizer(resolve_model(job.spec.model.uri)), 16, Path("."), 0)
task.prompts(1, 16)
start_local_ray(cpus=2, gpus=gpus, object_store_bytes=object_store_bytes(1 << 28, "cuda" if gpus else "cpu"))
assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "the controller must not see the GPUs"
"""
SYNCHRONIZE = "import torch\ntorch.cuda.synchronize()\n"
MATMUL = SYNCHRONIZE + "a = torch.ones(1024, 1024, device='cuda'); a @ a; torch.cuda.synchronize()\n"

ARMS = {"controller": CONTROLLER, "synchronize": SYNCHRONIZE, "matmul": MATMUL}
READY = "ready"


def main(output: Path) -> None:
    rows: list[Row] = []
    for name, program in ARMS.items():
        with arm(rows, name) as row:
            row |= _bytes_taken_by(program)
    print(record("memory_controller", rows, "one process at a time on GPU 0; bytes by NVML", output))


def _bytes_taken_by(program: str) -> Row:
    """GPU memory in use when `program` has done its work, before it ends."""
    wait = f"\nprint({READY!r}, flush=True)\ninput()\n"
    before = device_used_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", program + wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if not any(line.strip() == READY for line in process.stdout):
                raise RuntimeError("the program ended before it was ready; its error is above")
            return {"device_bytes": device_used_bytes() - before, "device_processes": device_processes()}
        finally:
            process.communicate(input="\n", timeout=60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
