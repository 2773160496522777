"""Predicted memory and seconds of `rljob run` against measured ones, by phase.

    python -m bench.programs.plan_accuracy [ARM...] [--draw N --seed SEED --predictor COMMIT] [--seconds N] [--estimate]

Each arm is a short job with random weights of a Qwen3 shape, whose responses all have the maximum length: an arm of the
table in `bench/harness/configurations.py`, or one of N that are drawn by a seed. Draw only after the predictor is
final, and name its commit. Arms run at the same time, each on GPUs of its own, the widest and longest first; models are
written meanwhile. Of every phase, a row compares

    gpu             memory in use on the GPU (NVML, every 20 ms), without other processes
    policy, engine  peak memory that torch reserved in a policy rank, and in an engine
    host            peak resident memory of an engine (rollout) or of a policy rank (update, sync)
    seconds         median of the steps after the first

Adds the rows to `plan_accuracy.json` in DIR, each when it is there, and prints the statistics. Arms that the result
already has are left out unless they are named. `--page`: write the sections of docs/sizing.md and
docs/other-trainers.md. `--smoke`: one tiny job on any device, which records nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from bench.harness.record import RESULTS, record, recorded, require_gpus
from bench.harness.run_arms import complete_lines, ledger_of, pinned_to_a_card, run_steps, write_job
from bench.harness.samplers import DeviceUse
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import setup_of_facts
from rljob_memory.hardware import type_of_product
from rljob_memory.sizes import GIB
from rljob_testing.ballast import ballast
from rljob_testing.plan_accuracy import page
from rljob_testing.plan_accuracy.configurations import ARMS, IN_SAMPLE, SMOKE, Arm, described, drawn, planned, spec_of
from rljob_testing.plan_accuracy.errors import PHASES, Row, compared, compared_again, statistics_of, summary
from rljob_testing.plan_accuracy.schedule import GpuJob, run_jobs
from rljob_trainer.hardware import visible_gpus, visible_handles
from rljob_trainer.models.resolve import resolve_model

NAME = "plan_accuracy"
NOTE = "Qwen3 shapes, random weights, responses of the maximum length; predicted and measured peaks by phase"

START_SECONDS = 100.0
"""Time of a job until its first step, with four jobs at a time."""
LONG_STEP_SECONDS = 15.0
"""If steps are predicted to take longer, one of them is counted instead of two."""


def steps_of(arm: Arm, gpu: str) -> tuple[int, float]:
    """Steps that the arm runs on this type of GPU, and its estimated seconds."""
    step = planned(arm, gpu)[1].budget.seconds()
    steps = 3 if step <= LONG_STEP_SECONDS else 2
    return steps, START_SECONDS + steps * step


# --- one arm ---


def wait_until_free(gpu: Any) -> None:
    """Wait until the processes of an earlier arm are gone, for at most a minute."""
    deadline = time.monotonic() + 60
    while int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) > 2 * GIB and time.monotonic() < deadline:
        time.sleep(0.5)


def uri_of(arm: Arm) -> str:
    return str(spec_of(arm, 1, smoke=arm is SMOKE)["model"]["uri"])


def row_of(name: str, arm: Arm, steps: int, mark: Row, output: Path, gpus: Sequence[Any], most_seconds: float) -> Row:
    """Run the arm on these GPUs (handles of NVML; none in a smoke run), and compare. `mark`: further columns."""
    shutil.rmtree(output, ignore_errors=True)
    is_smoke = arm is SMOKE
    # A job that is measured is killed before its last step, which would write a checkpoint and the model.
    spec = spec_of(arm, steps if is_smoke else steps + 1, smoke=is_smoke)
    spec["model"]["uri"] = f"file://{resolve_model(uri_of(arm))}"
    card_bytes = arm.card_gib * GIB
    if card_bytes:
        spec["memory"] = pinned_to_a_card(spec, card_bytes)
    path = write_job(output.parent, name, spec)
    numbers = [pynvml.nvmlDeviceGetIndex(gpu) for gpu in gpus]
    environment = dict(os.environ)
    if numbers:  # ports of their own, for arms that run at the same time
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers)), "MASTER_PORT": str(29_500 + numbers[0])}
    command = [sys.executable, "-m", "rljob_client", "run", str(path), "--output", str(output)]
    for gpu in gpus:
        wait_until_free(gpu)
    with (
        ballast(leave_bytes=card_bytes, gpu=numbers[0]) if card_bytes else nullcontext(),
        DeviceUse(gpus) as use,
        (output.parent / f"{name}.log").open("w", encoding="utf-8") as log,
    ):
        exit_code = run_steps(
            command, output, steps, environment, to_the_end=is_smoke, log=log, most_seconds=most_seconds
        )
    return {"arm": name, "job": described(arm), "exit_code": exit_code} | mark | measured(output, use)


def measured(output: Path, use: DeviceUse) -> Row:
    """Plan, predicted and measured values of each phase; only the reason if the run has none."""
    lines = ledger_of(output)
    attempts = [line for line in lines if line["kind"] == "attempt"]
    steps = [line for line in lines if line["kind"] == "step"]
    changes = {"plan_changes": sum(line["kind"] == "plan_change" for line in lines)}
    setup = setup_of_facts(attempts[-1]["plan_facts"]) if attempts else None
    if setup is None or not steps:
        return changes | {"reason": "no step was committed"}
    counted = steps[1:] or steps
    logs = {log.stem: complete_lines(log) for log in sorted((output / "memory").glob("*-*.jsonl"))}
    values = {phase: _of_phase(phase, counted, logs, use) for phase in PHASES}
    plan, facts = attempts[-1]["plan"], attempts[-1]["plan_facts"]
    step_seconds = statistics.median(step["total_seconds"] for step in counted)
    found = compared(setup, MemoryPlan.model_validate(plan), values, step_seconds)
    return {"plan": plan, "facts": facts, "counted_steps": len(counted)} | changes | found


def _of_phase(phase: str, steps: Sequence[Row], logs: Mapping[str, Sequence[Row]], use: DeviceUse) -> dict[str, float]:
    role, process = ("rollout", "engine") if phase == "rollout" else ("policy", "policy")
    samples = [
        line
        for actor, lines in logs.items()
        for line in lines
        if actor.startswith(role) and line["phase"] == phase and line["step"] >= steps[0]["step"]
    ]
    spans = [(line["began"], line["time"]) for line in samples if line.get("began")]
    return {
        "gpu": use.peak(spans),
        "seconds": statistics.median(step["seconds"].get(phase, 0.0) for step in steps),
        process: max((line.get("peak_reserved_bytes", 0) for line in samples), default=0),
        "host": max((line.get("peak_rss_bytes", 0) for line in samples), default=0),
    }


# --- all arms ---


class Rows:
    """The rows of the result: predictions for rows to which the predictor was fitted are those of today."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.rows = [compared_again(row) if row.get("in_sample") else row for row in recorded(NAME, output)]

    def add(self, job: GpuJob, row: Row) -> None:
        self.rows = [*(other for other in self.rows if other["arm"] != job.name), row]
        shown = {phase: {n: pair["ratio"] for n, pair in v.items()} for phase, v in row.get("phases", {}).items()}
        print(job.name, row["exit_code"], row.get("reason", ""), json.dumps(shown), flush=True)
        record(NAME, self.rows, NOTE, self._output, statistics=statistics_of(self.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*ARMS, []], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="also run N configurations that are drawn")
    parser.add_argument("--seed", type=int, help="of the draw")
    parser.add_argument("--predictor", help="commit of the predictor, with which the drawn rows are marked")
    parser.add_argument("--gpus", type=int, help="GPUs to use; default: all that are visible")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time, with the rows until then")
    parser.add_argument("--runs", type=Path, default=Path("runs") / NAME, help="directory of the runs (replaced)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the JSON")
    parser.add_argument("--estimate", action="store_true", help="print the arms and their estimated times, on H100s")
    parser.add_argument("--page", action="store_true", help="write the sections of the docs from the results")
    parser.add_argument("--smoke", action="store_true", help="a tiny job on any device; records nothing")
    given = parser.parse_args()
    if given.draw and (given.seed is None or not given.predictor):
        parser.error("--draw requires --seed and --predictor")
    if given.smoke:
        smoke()
        return
    if given.page:
        print(*page.write(), sep="\n")
        return
    chosen = {name: ARMS[name] for name in given.arms} if given.arms or given.draw else ARMS
    of_draw = drawn(given.seed, given.draw) if given.draw else {}
    arms = {**chosen, **of_draw}
    if given.estimate:
        for name, arm in arms.items():
            steps, seconds = steps_of(arm, "h100")
            print(f"{arm.gpus} GPUs, {seconds:4.0f} s, {steps} steps  {name:<22} {described(arm)}")
        total = sum(steps_of(arm, "h100")[1] * arm.gpus for arm in arms.values())
        print(f"{len(arms)} arms, {total:,.0f} s of GPU time")
        return
    require_gpus(given.gpus or 1)
    pynvml.nvmlInit()
    handles = visible_handles()[: given.gpus]
    rows, gpu = Rows(given.output), type_of_product(visible_gpus()[0].name) or "h100"
    known = {row["arm"] for row in rows.rows if row["exit_code"] == 0} - set(given.arms)
    jobs = []
    for name, arm in arms.items():
        if name in known or arm.gpus > len(handles):
            continue
        mark: Row = {"in_sample": name in IN_SAMPLE, "drawn": name in of_draw}
        if name in of_draw:
            mark["predictor"] = given.predictor
        steps, seconds = steps_of(arm, gpu)
        run = partial(row_of, name, arm, steps, mark, given.runs / name / "run")
        jobs.append(GpuJob(name, uri_of(arm), arm.gpus, seconds, run))
    for job in run_jobs(jobs, handles, given.seconds, resolve_model, rows.add):
        print(f"{job.name} was not started: {job.seconds:.0f} s are not left")
    print("\n".join(summary(rows.rows)))


def smoke() -> None:
    with tempfile.TemporaryDirectory() as folder:
        row = row_of("smoke", SMOKE, 2, {}, Path(folder) / "smoke", [], math.inf)
        print(json.dumps(row, indent=2))
        assert row["exit_code"] == 0, "the job failed"
        assert row["phases"]["update"]["host"]["measured"] > 0
        print("\n".join(summary([row])))


if __name__ == "__main__":
    main()
