"""Predicted memory and seconds of `rljob run` against measured ones, by phase.

    python -m bench.programs.plan_accuracy [ARM...] [--gpus N] [--steps N] [--models DIR] [--output DIR] [--smoke]

Each arm is a short job with random weights of a Qwen3 shape, whose responses all have the maximum length. Arms run at
the same time, each on GPUs of its own. Of every phase, the row compares

    gpu             memory in use on the GPU (NVML, every 20 ms), without other processes
    policy, engine  peak memory that torch reserved in a policy rank, and in an engine
    host            peak resident memory of a policy rank
    seconds         median of the steps after the first

Writes `plan_accuracy.json` to DIR, after each arm, and prints the median and the largest errors. `--smoke`: one tiny
job on any device, whose result is written to a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from bench.harness.record import RESULTS, record, require_gpus
from bench.harness.run_arms import (
    Row,
    complete_lines,
    generating_job,
    ledger_of,
    pinned_to_a_card,
    run_steps,
    write_job,
)
from bench.harness.samplers import Sampler
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import Budget, Phase, Setup, budget
from rljob_memory.budget.gpu import evenly_filled
from rljob_memory.recovery.other_machine import setup_of_facts
from rljob_memory.sizes import GIB
from rljob_trainer.hardware import visible_handles
from rljob_trainer.models.resolve import resolve_model

NAME = "plan_accuracy"
NOTE = "Qwen3 shapes, random weights, responses of the maximum length; predicted and measured peaks by phase"
PHASES: tuple[Phase, ...] = ("rollout", "update", "sync")


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration."""

    model: str
    response_tokens: int = 1024
    prompts: int = 16
    """With 8 responses to each."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the spec, merged over the usual ones."""
    card_gib: int = 0
    """Another process holds all but this much of the GPU. 0: none does."""
    gpus: int = 1


def memory(**settings: Any) -> dict[str, Any]:
    return {"memory": settings}


KL, LORA = {"algorithm": {"klCoefficient": 0.01}}, {"policy": {"lora": {"rank": 16}}}
FP8 = {"rollout": {"quantization": "Fp8PerTensor"}}
BFLOAT16, INT8 = ({"policy": {"optimizer": {"moments": form}}} for form in ("bfloat16", "int8"))
OFFLOAD, CHECKPOINTING = memory(optimizerOffload="Enabled"), memory(activationCheckpointing="Enabled")
ON_GPU = memory(optimizerOffload="Disabled")
TWO = {"policy": {"gpusPerReplica": 2}}

ARMS: dict[str, Arm] = {
    "8b": Arm("8b"),
    "4b-kl": Arm("4b", 512, changes=KL),
    "1.7b-4k": Arm("1.7b", 4096, prompts=4),
    "0.6b-2k": Arm("0.6b", 2048),
    "8b-lora": Arm("8b", changes=LORA),
    "4b-offload": Arm("4b", changes=OFFLOAD),
    "1.7b-8k-checkpointing": Arm("1.7b", 8192, prompts=2, changes=CHECKPOINTING),
    "0.6b-small-batches": Arm("0.6b", 512, changes=memory(microBatchTokens=2112, logprobChunkTokens=512)),
    "8b-80gib": Arm("8b", card_gib=79),
    "4b-fp8": Arm("4b", changes=FP8),
    "1.7b-40gib": Arm("1.7b", card_gib=40),
    "0.6b-8k": Arm("0.6b", 8192, prompts=2),
    "8b-bfloat16": Arm("8b", changes=BFLOAT16),
    "4b-lora": Arm("4b", changes=LORA),
    "1.7b-level1": Arm("1.7b", changes=memory(rolloutSleep="Level1")),
    "0.6b-awake": Arm("0.6b", 512, changes=memory(rolloutSleep="Disabled")),
    "4b-2gpus": Arm("4b", changes=TWO, gpus=2),
    "8b-2gpus-tp2": Arm("8b", changes=TWO | {"rollout": {"tensorParallelSize": 2}}, gpus=2),
    "8b-checkpointing": Arm("8b", changes=CHECKPOINTING),
    "8b-int8": Arm("8b", changes=INT8),
    "4b-40gib": Arm("4b", 512, card_gib=40),
    "1.7b-kl": Arm("1.7b", changes=KL),
    "0.6b-kl": Arm("0.6b", 512, changes=KL),
    "4b-8k": Arm("4b", 8192, prompts=2),
    "8b-fp8": Arm("8b", changes=FP8),
    "8b-lora-40gib": Arm("8b", 512, prompts=8, changes=LORA, card_gib=40),
    "0.6b-lora": Arm("0.6b", 512, changes=LORA),
    "1.7b-offload": Arm("1.7b", changes=OFFLOAD),
    "0.6b-2gpus": Arm("0.6b", 512, changes=TWO, gpus=2),
    "8b-2gpus": Arm("8b", changes=TWO, gpus=2),
    "4b": Arm("4b"),
    "8b-4k": Arm("8b", 4096, prompts=4),
    "1.7b": Arm("1.7b"),
    "0.6b": Arm("0.6b", 512),
    "8b-kl": Arm("8b", 512, changes=KL),
    "4b-checkpointing": Arm("4b", changes=CHECKPOINTING),
    "4b-80gib": Arm("4b", card_gib=79),
    "0.6b-offload": Arm("0.6b", 512, changes=OFFLOAD),
    "0.6b-int8": Arm("0.6b", 512, changes=INT8),
    "0.6b-checkpointing": Arm("0.6b", 512, changes=CHECKPOINTING),
}
"""The most different ones first, for runs with little time."""

SMOKE = Arm("smoke", 16)


def spec_of(arm: Arm, steps: int, *, smoke: bool) -> dict[str, Any]:
    spec = generating_job(arm.model, steps, arm.prompts, arm.response_tokens, smoke=smoke)
    for section, values in arm.changes.items():
        spec[section] = spec.get(section, {}) | values
    return spec


# --- GPUs, shared by the arms ---


class GpuPool:
    """The GPUs that no arm uses."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[int]]:
        """Within, `count` GPUs are the caller's; waits for them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            mine = [self._free.pop(0) for _ in range(count)]
        try:
            yield mine
        finally:
            with self._changed:
                self._free.extend(mine)
                self._changed.notify_all()


class DeviceUse(Sampler):
    """Memory in use on one GPU over time, without what was in use before."""

    seconds_between_samples = 0.02

    def __init__(self, gpu: Any | None) -> None:
        super().__init__()
        self._gpu = gpu
        self._before = self._used()
        self.samples: list[tuple[float, int]] = []
        """Seconds since the epoch, and bytes."""

    def _used(self) -> int:
        return 0 if self._gpu is None else int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used)

    def sample(self) -> None:
        if self._gpu is not None:
            self.samples.append((time.time(), self._used() - self._before))

    def peak(self, spans: Sequence[tuple[float, float]]) -> int:
        """The most bytes within any of the spans; 0 without a sample in them."""
        inside = (used for when, used in self.samples if any(begun <= when <= ended for begun, ended in spans))
        return max(inside, default=0)


def wait_until_free(gpu: Any) -> None:
    """Wait until the processes of an earlier arm are gone, for at most a minute."""
    deadline = time.monotonic() + 60
    while int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) > 2 * GIB and time.monotonic() < deadline:
        time.sleep(0.5)


@contextmanager
def ballast(gpu: str, leave_bytes: int) -> Iterator[None]:
    """Within, another process holds all but `leave_bytes` of the GPU. None is started for 0."""
    if not leave_bytes:
        yield
        return
    command = [sys.executable, "-m", "rljob_testing.ballast", "--leave", str(leave_bytes)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        try:
            if holder.stdout.readline().strip() != "ready":
                raise RuntimeError(f"the ballast could not hold all but {leave_bytes} bytes of GPU {gpu}")
            yield
        finally:
            holder.kill()


# --- one arm ---


def model_directory(arm: Arm, models: Path | None) -> Path:
    """The arm's model: prepared in `models`, or written by this program."""
    prepared = models / arm.model if models else None
    if prepared and prepared.is_dir():
        return prepared.absolute()
    return resolve_model(spec_of(arm, 1, smoke=arm is SMOKE)["model"]["uri"])


def row_of(
    name: str, arm: Arm, steps: int, output: Path, gpus: Sequence[Any], models: Path | None, *, smoke: bool
) -> Row:
    """Run the arm on these GPUs (handles of NVML; none in a smoke run), and compare."""
    shutil.rmtree(output, ignore_errors=True)
    # A job that is measured is killed before its last step, which would write a checkpoint and the model.
    spec = spec_of(arm, steps if smoke else steps + 1, smoke=smoke)
    spec["model"]["uri"] = f"file://{model_directory(arm, models)}"
    if arm.card_gib:
        spec["memory"] = pinned_to_a_card(spec, arm.card_gib * GIB)
    path = write_job(output.parent, name, spec)
    numbers = [pynvml.nvmlDeviceGetIndex(gpu) for gpu in gpus]
    environment = dict(os.environ)
    if numbers:  # ports of their own, for arms that run at the same time
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers)), "MASTER_PORT": str(29_500 + numbers[0])}
    command = [sys.executable, "-m", "rljob_client", "run", str(path), "--output", str(output)]
    for gpu in gpus:
        wait_until_free(gpu)
    with (
        ballast(str(numbers[0]) if numbers else "", arm.card_gib * GIB),
        DeviceUse(gpus[0] if gpus else None) as use,
        (output.parent / f"{name}.log").open("w", encoding="utf-8") as log,
    ):
        exit_code = run_steps(command, output, steps, environment, to_the_end=smoke, log=log)
    return {"arm": name, "exit_code": exit_code} | compared(output, use)


def compared(output: Path, use: DeviceUse) -> Row:
    """Plan, predicted and measured values of each phase; only the reason if the run has none."""
    lines = ledger_of(output)
    attempts = [line for line in lines if line["kind"] == "attempt"]
    steps = [line for line in lines if line["kind"] == "step"]
    setup = setup_of_facts(attempts[-1]["plan_facts"]) if attempts else None
    if setup is None or not steps:
        return {"reason": "no step was committed"}
    plan = MemoryPlan.model_validate(attempts[-1]["plan"])
    predicted, counted = budget(setup, evenly_filled(setup.work, plan)), steps[1:] or steps
    logs = {log.stem: complete_lines(log) for log in sorted((output / "memory").glob("*-*.jsonl"))}
    return {
        "plan": attempts[-1]["plan"],
        "facts": attempts[-1]["plan_facts"],
        "plan_changes": sum(line["kind"] == "plan_change" for line in lines),
        "missing_bytes": setup.missing_bytes(predicted),
        "step_seconds": _pair(predicted.seconds(), statistics.median(step["total_seconds"] for step in counted)),
        "phases": {phase: _of_phase(phase, setup, predicted, counted, logs, use) for phase in PHASES},
    }


def _of_phase(
    phase: Phase,
    setup: Setup,
    predicted: Budget,
    steps: Sequence[Row],
    logs: Mapping[str, Sequence[Row]],
    use: DeviceUse,
) -> Row:
    role = "rollout" if phase == "rollout" else "policy"
    samples = [
        line
        for actor, lines in logs.items()
        for line in lines
        if actor.startswith(role) and line["phase"] == phase and line["step"] >= steps[0]["step"]
    ]
    spans = [(line["began"], line["time"]) for line in samples if line.get("began")]
    values = {
        "gpu": (predicted.peak("gpu", phase), use.peak(spans)),
        "seconds": (predicted.seconds(phase), statistics.median(step["seconds"].get(phase, 0.0) for step in steps)),
    }
    reserved, resident = (_most(samples, name) for name in ("peak_reserved_bytes", "peak_rss_bytes"))
    if role == "rollout":
        values["engine"] = (predicted.in_torch("engine", phase), reserved)
    else:
        parts: list[Phase] = ["update", "optimizer"] if phase == "update" else [phase]
        values["policy"] = (max(predicted.in_torch("policy", part) for part in parts), reserved)
        in_policy = predicted.of("host", owner="policy").uses("host", phase)
        on_host = sum(line.bytes for line in in_policy if "checkpoint" not in line.use)  # none is written
        values["host"] = (on_host // setup.work.ranks_per_pod, resident)
    return {name: _pair(*pair) for name, pair in values.items() if pair[1]}


def _most(lines: Sequence[Row], name: str) -> int:
    return max((line.get(name, 0) for line in lines), default=0)


def _pair(predicted: float, measured: float) -> Row:
    """`ratio` above 1: predicted too much."""
    return {"predicted": predicted, "measured": measured, "ratio": round(predicted / measured, 4) if measured else None}


# --- all arms ---


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The errors over all rows: medians, and the arms that are predicted worst."""
    ratios: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        for phase, values in row.get("phases", {}).items():
            for name, pair in values.items():
                ratios[f"{name}, {phase}"].append((pair["ratio"], row["arm"]))
    for name, found in sorted(ratios.items()):
        error = statistics.median(abs(ratio - 1) for ratio, _ in found)
        (least, low), (most, high) = min(found), max(found)
        yield (
            f"{name:<18}{len(found):>3} rows, median error {error:.1%}, "
            f"ratios {least:.2f} ({low}) to {most:.2f} ({high})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*ARMS, []], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--gpus", type=int, help="GPUs to use; default: all that are visible")
    parser.add_argument("--steps", type=int, default=3, help="steps of each arm; the first is not counted")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further arm after this time")
    parser.add_argument("--models", type=Path, help="directory of prepared models, by size: 0.6b, 1.7b, 4b, 8b")
    parser.add_argument("--runs", type=Path, default=Path("runs") / NAME, help="directory of the runs (replaced)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="a tiny job on any device; records nothing in the results")
    given = parser.parse_args()
    if given.smoke:
        with tempfile.TemporaryDirectory() as folder:
            row = row_of("smoke", SMOKE, 2, Path(folder) / "smoke", [], None, smoke=True)
            print(json.dumps(row, indent=2))
            assert row["exit_code"] == 0, "the job failed"
            assert row["phases"]["update"]["host"]["measured"] > 0
            print("\n".join(summary([row])))
        return
    require_gpus(given.gpus or 1)
    pynvml.nvmlInit()
    handles = visible_handles()[: given.gpus]
    names = [name for name in given.arms or ARMS if ARMS[name].gpus <= len(handles)]
    for name in names:  # one after the other: arms share the files of a model
        model_directory(ARMS[name], given.models)
    pool, began, lock, rows = GpuPool(len(handles)), time.monotonic(), threading.Lock(), list[Row]()

    def run(name: str) -> None:
        with pool.taken(ARMS[name].gpus) as mine:
            if time.monotonic() - began > given.seconds:
                return
            gpus = [handles[index] for index in mine]
            try:
                row = row_of(name, ARMS[name], given.steps, given.runs / name / "run", gpus, given.models, smoke=False)
            except Exception as error:  # the other arms still run
                row = {"arm": name, "exit_code": None, "reason": repr(error)}
        with lock:
            rows.append(row)
            shown = {phase: {n: pair["ratio"] for n, pair in v.items()} for phase, v in row.get("phases", {}).items()}
            print(name, row["exit_code"], row.get("reason", ""), json.dumps(shown), flush=True)
            record(NAME, sorted(rows, key=lambda each: list(ARMS).index(each["arm"])), NOTE, given.output)

    with ThreadPoolExecutor(max_workers=len(handles)) as workers:
        list(workers.map(run, names))
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
