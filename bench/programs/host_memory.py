"""Host memory of `rljob run` on CPUs by kind of process, compared with the prediction.

    python -m bench.programs.host_memory [--output DIR]

Records `bench/results/host_memory.json` for `examples/digits.yaml` (10 steps) and `examples/smollm2-chain-sum.yaml` (2
steps, with a checkpoint after each): peak proportional set sizes (PSS) by kind of process and together, resident memory
of the roles from their logs, the checkpoint, and the prediction. Needs the model of `make model`. Takes 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.harness.record import RESULTS, record
from bench.harness.samplers import Sampler
from rljob_api.manifest import load_manifest
from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import Role
from rljob_memory.budget import Copies, Owner, Setup, budget
from rljob_memory.budget.host import checkpoint_bytes, controller_host_memory
from rljob_memory.hardware import ASSUMED
from rljob_memory.model_shape import compute_bytes
from rljob_memory.workload import workload_of
from rljob_testing.repository import EXAMPLES
from rljob_testing.runs import FinishedRun, rljob_run
from rljob_trainer.models.checkpoint import model_dimensions
from rljob_trainer.models.resolve import resolve_model

_JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("digits.yaml", {"algorithm": {"steps": 10}, "checkpoint": {"everySteps": 5}}),
    "SmolLM2-135M": ("smollm2-chain-sum.yaml", {"algorithm": {"steps": 2}, "checkpoint": {"everySteps": 1}}),
}
"""The example of each row, and the changes of its spec."""
_LOGGED: tuple[Role, ...] = ("policy", "rollout")


class PeakWatch(Sampler):
    """Peaks of the PSS of this process's descendants, by kind."""

    seconds_between_samples = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, int] = defaultdict(int)

    def sample(self) -> None:
        now: dict[str, int] = defaultdict(int)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, OSError, ValueError):
                now[_kind(process)] += _pss_bytes(process.pid)
        now["all"] = sum(now.values())
        for kind, size in now.items():
            self.peaks[kind] = max(self.peaks[kind], size)


def main(output: Path) -> None:
    rows = []
    for name, (example, changes) in _JOBS.items():
        with tempfile.TemporaryDirectory() as directory:
            rows.append({"job": name, **_measured(Path(directory), example, changes)})
            print(json.dumps(rows[-1]), flush=True)
    print(record("host_memory", rows, "rljob run on CPUs, one rank; PSS every 0.3 s", output))


def _measured(directory: Path, example: str, changes: dict[str, Any]) -> dict[str, Any]:
    manifest = yaml.safe_load((EXAMPLES / example).read_text())
    for section, values in changes.items():
        manifest["spec"][section] = manifest["spec"].get(section, {}) | values
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(manifest))
    began = time.monotonic()
    with PeakWatch() as watch:
        run = rljob_run(path, directory / "run")
    if run.exit_code:
        raise SystemExit(run.printed)
    return {
        "peak_pss_bytes": dict(watch.peaks),
        "peak_rss_bytes": {role: _peak_rss_bytes(run.output / "memory" / f"{role}-0.jsonl") for role in _LOGGED},
        "checkpoint_bytes": max(_size(each) for each in (run.output / "checkpoints").iterdir() if each.is_dir()),
        "predicted": _predicted(path, run),
        "seconds": round(time.monotonic() - began),
    }


def _predicted(manifest: Path, run: FinishedRun) -> dict[str, Any]:
    spec = load_manifest(manifest).spec
    shape = model_dimensions(resolve_model(spec.model.uri)).shape(compute_bytes(spec, "cpu"))
    plan = MemoryPlan.model_validate(run.attempts[-1]["plan"])
    work = workload_of(spec)
    predicted = budget(Setup(work, shape, ASSUMED["cpu"]), plan, Copies())
    owners: dict[Role, Owner] = {"policy": "policy", "rollout": "engine"}
    return {
        "all": predicted.peak("host") + controller_host_memory(0)[0].bytes,
        **{role: predicted.of("host", owner=owners[role]).peak("host") for role in _LOGGED},
        "checkpoint_bytes": checkpoint_bytes(work, shape),
        "uses": [
            {"role": line.owner, "use": line.use, "bytes": line.bytes} for line in predicted.uses("host", "update")
        ],
    }


def _kind(process: psutil.Process) -> str:
    """The kind by the process's title, which Ray sets for its actors."""
    command = " ".join(process.cmdline()).lower()
    if "ray::roleactor" in command:
        return "roles"
    if "warm.server" in command:
        return "warm"
    return "ray" if "ray" in command else "controller"


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _peak_rss_bytes(log: Path) -> int:
    return max(int(json.loads(line).get("peak_rss_bytes", 0)) for line in log.read_text().splitlines())


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    main(parser.parse_args().output)
