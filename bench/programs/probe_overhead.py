"""Overhead of the probe in another program: start of a process, import of torch, a step of a training loop.

    python -m bench.programs.probe_overhead [--rounds 7]
    python -m bench.programs.probe_overhead --device cuda

Runs with and without the probe take turns. Times are processor time, and of the starts and the steps of a run the
fastest count, because other load disturbs these least. A step is about 0.5 ms of AdamW on a small MLP on the CPU, far
shorter than real steps, so that a cost per step would show. Also counts calls into the probe's code during steps.
Records `bench/results/probe_overhead.json`. Python keeps the compiled files of the probe, except for
`start_in_pods_seconds`: there the probe's directory is read-only and has none, so that every process compiles it.

With `--device cuda`, a process under the probe trains a transformer on the GPU and times the probe's samples and hooks
(`bench.harness.probed_training`). Records `bench/results/probe_overhead_gpu.json`. Takes under a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.harness.needs import require_gpus
from bench.harness.record import RESULTS, record
from rljob_testing.repository import ROOT

PROBE = ROOT / "probe" / "rljob_probe"
SITE = PROBE / "site"
STARTS = 10

LOOP = """
import json, sys, time
begun = time.process_time()
import torch
import_seconds = time.process_time() - begun
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(16, 64)

def step():
    begun = time.process_time()
    (model(data) - data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - begun

step_seconds = min(step() for _ in range(5000))
probe_calls = 0

def count(frame, event, argument):
    global probe_calls
    probe_calls += event == "call" and "rljob_probe" in frame.f_code.co_filename

sys.setprofile(count)
for _ in range(50):
    step()
sys.setprofile(None)
result = {"import_seconds": import_seconds, "step_seconds": step_seconds, "probe_calls_in_50_steps": probe_calls}
print(json.dumps(result))
"""


def main(device: str, rounds: int, output: Path) -> None:
    if device == "cuda":
        on_gpu(output)
    else:
        on_cpu(rounds, output)


def on_gpu(output: Path) -> None:
    require_gpus(1)
    with tempfile.TemporaryDirectory() as directory:
        variables = environment("with", Path(directory))
        # The probe's directory comes first, but the present path may contain torch's packages.
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], *filter(None, sys.path)])
        training = subprocess.run(
            [sys.executable, "-m", "bench.harness.probed_training"],
            cwd=ROOT,
            env=variables,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    row = json.loads(training.stdout.splitlines()[-1])
    note = "AdamW on a Qwen3 of 0.47 billion parameters in bfloat16, 8 micro-batches of 8 × 1,024 tokens per step"
    print(json.dumps(row, indent=2))
    print(record("probe_overhead_gpu", [row], note, output))


def on_cpu(rounds: int, output: Path) -> None:
    arms: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    in_pods: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(
            shutil.copytree(PROBE, Path(directory, "rljob_probe"), ignore=shutil.ignore_patterns("__pycache__"))
        )
        uncompiled = environment("with", Path(directory)) | {
            "PYTHONPATH": str(copy / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for _ in range(rounds):
            for arm, results in arms.items():
                results.append(measured(environment(arm, Path(directory))))
            in_pods.append(start_seconds(uncompiled))
    rows: list[dict[str, Any]] = [
        {"arm": arm, **{name: statistics.median(r[name] for r in results) for name in results[0]}}
        for arm, results in arms.items()
    ]
    fastest = {arm: min(r["step_seconds"] for r in results) for arm, results in arms.items()}
    step_percent = 100 * (fastest["with"] / fastest["without"] - 1)
    rows.append({"arm": "added", **{name: rows[1][name] - rows[0][name] for name in arms["with"][0]}})
    rows[-1]["step_percent"] = step_percent
    rows[-1]["start_in_pods_seconds"] = statistics.median(in_pods) - rows[0]["start_seconds"]
    note = f"AdamW on a small MLP, 5,000 steps, {rounds} rounds of both arms in turn"
    path = record("probe_overhead", rows, note, output)
    for row in rows:
        times = (f"{name} {1e3 * value:.3f} ms" for name, value in row.items() if name.endswith("seconds"))
        print(f"{row['arm']:<8}", *times, f"probe calls {row['probe_calls_in_50_steps']:.0f}", sep="  ")
    print(f"the fastest step takes {step_percent:+.3f} %")
    print(path)


def environment(arm: str, directory: Path) -> dict[str, str]:
    dropped = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    if arm == "without":
        return inherited
    return inherited | {
        "PYTHONPATH": str(SITE),
        "RLJOB_TERMINATION_LOG": str(directory / "termination-log"),
        "RLJOB_PROBE_NOTES": str(directory / "notes"),
    }


def measured(variables: dict[str, str]) -> dict[str, float]:
    start = start_seconds(variables)
    loop = subprocess.run([sys.executable, "-c", LOOP], env=variables, check=True, capture_output=True, text=True)
    return {"start_seconds": start, **json.loads(loop.stdout)}


def start_seconds(variables: dict[str, str]) -> float:
    """Least processor time of some processes that do nothing."""
    least = float("inf")
    for _ in range(STARTS):
        before = children_seconds()
        subprocess.run([sys.executable, "-c", "pass"], env=variables, check=True)
        least = min(least, children_seconds() - before)
    return least


def children_seconds() -> float:
    """Processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="on the CPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the record")
    main(**vars(parser.parse_args()))
