"""Arms of a comparison: jobs that differ in their manifests, each run by `rljob run` and measured from its records."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from bench.harness.record import RESULTS, record_row, require_gpus
from bench.harness.samplers import DevicePeak, GpuUse, idle_of_each_gpu
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import Phase, Setup, budget, setup_of_facts
from rljob_memory.budget.gpu import evenly_filled
from rljob_memory.budget.seconds import decode_step_bytes, forward_flops
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import compute_bytes
from rljob_memory.plan import first_plan
from rljob_memory.plan_settings import text_of
from rljob_memory.workload import workload_of
from rljob_testing.ballast import ballast
from rljob_testing.machine import processor
from rljob_testing.plan_accuracy.errors import TIMED_OUT, Row
from rljob_testing.plan_accuracy.jobs import LONG_PROMPTS, SHAPES
from rljob_trainer.hardware import this_machine
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.models.checkpoint import model_dimensions
from rljob_trainer.models.lora_targets import adapted_layers, adapter_parameters
from rljob_trainer.models.resolve import resolve_model

REWARDS = Path(__file__).parents[1] / "programs" / "spread_rewards.py"
SECONDS = "BENCH_SECONDS"
"""Environment variable: seconds after which an arm of another trainer should end, with the steps until then."""
METRICS = ("logprob_diff_mean", "logprob_diff_max", "importance_weight_mean", "streamed_groups")


@dataclass(frozen=True, slots=True)
class Arms:
    """A comparison of jobs with random weights, a row for each arm."""

    name: str
    """Name of the result, and of the directory of the runs."""
    spec: Callable[[str, int, bool], dict[str, Any]]
    """The RLJob's spec from arm, number of steps, and whether it is a smoke run."""
    names: Sequence[str]
    """Names of the arms."""
    note: str
    """Note in the result: the setup."""
    steps: int
    """Steps of each arm by default, the warm-up included."""
    gpus: int = 1
    warm_up_steps: int = 1
    """Steps that are not counted."""
    card_bytes: Callable[[str], int | None] = lambda _arm: None
    """Memory of the GPU, from the arm: another process holds the rest. None: all."""
    variables: Callable[[str], Mapping[str, str]] = lambda _arm: {}
    """Environment variables, from the arm."""
    others: Mapping[str, Callable[[int], Row]] = field(default_factory=dict)
    """Arms that are no RLJobs: each runs a number of steps and returns its row."""
    smoke_names: Sequence[str] = ()
    smoke_options: Sequence[str] = ()
    """Options of `rljob run` in a smoke run."""
    check_smoke: Callable[[Row], None] = lambda _row: None
    """Raises AssertionError if the row of a smoke run is wrong."""

    def main(self, description: str | None) -> None:
        """Parse the command line and run the arms. Rows of other arms that the result already has are kept."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        names = [*self.names, *self.others]
        parser.add_argument("arms", nargs="*", choices=[*names, []], metavar="ARM", help=", ".join(names))
        parser.add_argument("--steps", type=int, default=self.steps, help="steps of each arm, the warm-up included")
        parser.add_argument("--smoke", action="store_true", help="a tiny model; records nothing")
        parser.add_argument("--output", type=Path, default=Path("runs") / self.name, help="of the runs (replaced)")
        parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
        given = parser.parse_args()
        if not given.smoke:
            require_gpus(self.gpus)
        for arm in given.arms or (given.smoke and self.smoke_names) or names:
            row = self.row(arm, given.steps, given.smoke, given.output / arm)
            print(json.dumps(row, indent=2), flush=True)
            if given.smoke:
                assert row["exit_code"] == 0, f"the arm {arm} failed"
                self.check_smoke(row)
            else:
                print(record_row(self.name, row, "arm", self.note, given.results, self.gpus), flush=True)

    def row(self, arm: str, steps: int, smoke: bool, output: Path, most_seconds: float = math.inf) -> Row:
        """Run one arm, for at most `most_seconds`, in the directory `output`, which is replaced."""
        if arm in self.others:
            return {"arm": arm} | self.others[arm](steps)
        shutil.rmtree(output, ignore_errors=True)
        # A job that is measured is killed before its last step, which would write a checkpoint and the model.
        spec = self.spec(arm, steps if smoke else steps + 1, smoke)
        # Written first, so that the start-up time does not count it.
        spec["model"]["uri"] = f"file://{resolve_model(spec['model']['uri'])}"
        card_bytes = None if smoke else self.card_bytes(arm)
        if card_bytes:
            spec["memory"] = pinned_to_a_card(spec, card_bytes)
        path = write_job(output.parent, arm, spec)
        options = self.smoke_options if smoke else ()
        command = [sys.executable, "-m", "rljob_client", "run", str(path), "--output", str(output), *options]
        environment = os.environ | self.variables(arm)
        with ballast(leave_bytes=card_bytes) if card_bytes else nullcontext(), DevicePeak() as peak, GpuUse() as use:
            exit_code = run_steps(command, output, steps, environment, to_the_end=smoke, most_seconds=most_seconds)
        row = {"arm": arm, "exit_code": exit_code, "device_peak_bytes": peak.peak_bytes}
        return row | measured(output, self.warm_up_steps, use)


def write_job(folder: Path, arm: str, spec: dict[str, Any]) -> Path:
    """Write the manifest of the arm, and the reward function next to it."""
    metadata = {"name": f"bench-{arm.replace('.', '-')}"}
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "spec": spec}
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(REWARDS, folder)
    if spec["task"].get("args"):  # a character is a token of these models
        tokens = spec["algorithm"]["maxPromptTokens"]
        prompts = ({"prompt": str(digit) * tokens} for digit in range(10))
        (folder / LONG_PROMPTS).write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    path = folder / f"{arm}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def model_with_ends(size: str, mean_tokens: int) -> Path:
    """A model with random weights in Qwen3's shape of which one token in `mean_tokens` ends a sequence."""
    source = resolve_model(f"random://qwen3?{SHAPES[size]}")
    config = json.loads((source / "config.json").read_text())
    ends = [config["eos_token_id"], *range(mean_tokens, config["vocab_size"], mean_tokens)]
    directory = source.with_name(f"{source.name}-ends-{mean_tokens}")
    if not directory.exists():
        shutil.copytree(source, directory, copy_function=os.link)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory


def run_steps(
    command: list[str],
    output: Path,
    steps: int,
    environment: Mapping[str, str],
    *,
    to_the_end: bool,
    log: IO[str] | None = None,
    most_seconds: float = math.inf,
) -> int:
    """Run a job and kill it after `steps` steps: 0. Otherwise its exit code, or `TIMED_OUT`. `log`: for what it
    prints."""
    deadline = time.monotonic() + most_seconds
    job = subprocess.Popen(command, start_new_session=True, env=environment, stdout=log, stderr=log)
    try:
        while job.poll() is None:
            if not to_the_end and sum(line["kind"] == "step" for line in ledger_of(output)) >= steps:
                return 0
            if time.monotonic() > deadline:
                return TIMED_OUT
            time.sleep(0.2)
        return job.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def measured(output: Path, warm_up_steps: int, use: GpuUse) -> Row:
    """Start-up, plan, and the medians of the steps after the warm-up; without them, only the seconds of all steps."""
    lines = ledger_of(output)
    all_steps = [line for line in lines if line["kind"] == "step"]
    row: Row = {"all_seconds": [step["total_seconds"] for step in all_steps]}
    row |= {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    if ready := [line["seconds"] for line in lines if line["kind"] == "ready"]:
        row |= {"start_up_seconds": sum(ready[0].values()), "start_up_by_part": ready[0]}
    if attempts := [line for line in lines if line["kind"] == "attempt" and line.get("plan")]:
        row |= {"plan": attempts[0]["plan"], "predicted": predicted(attempts[0])}
    steps = all_steps[warm_up_steps:]
    if not steps:
        return row
    seconds = {phase: [step["seconds"].get(phase, 0.0) for step in steps] for phase in steps[0]["seconds"]}
    whole = [step["total_seconds"] for step in steps]
    if len(steps) > 1:
        row["quartiles"] = {phase: quartiles(values) for phase, values in {"step": whole, **seconds}.items()}
        if attempts and all(step["response"]["mean_tokens"] == step["response"]["max_tokens"] for step in steps):
            row |= use_of_gpus(attempts[0], row["quartiles"])
    return row | {
        "seconds_per_step": statistics.median(whole),
        "seconds_by_phase": {phase: statistics.median(values) for phase, values in seconds.items()},
        "tokens_per_second": statistics.median(step["tokens"] / step["total_seconds"] for step in steps),
        "response_tokens": quantiles([length for step in steps for length in lengths_of(output, step["step"])]),
        "idle_share_of_gpus": idle_of_each_gpu(use.samples, steps),
        "metrics": {name: [step["metrics"].get(name) for step in steps] for name in METRICS},
        "memory": {log.stem: memory_of(log) for log in sorted((output / "memory").glob("*-*.jsonl"))},
        "reserved_by_phase": {
            log.stem: reserved_by_phase(log, steps[0]["step"]) for log in sorted((output / "memory").glob("*-0.jsonl"))
        },
    }


def lengths_of(output: Path, step: int) -> list[int]:
    """Tokens of the step's responses, if no checkpoint covers it yet."""
    batch = RolloutJournal(output / "journal").find(step)
    return [len(ids) for ids in batch.response_ids] if batch else []


def quantiles(lengths: Sequence[int]) -> Row:
    """Number, mean and quantiles of the lengths of responses."""
    if not lengths:
        return {}
    shares = (5, 25, 50, 75, 95, 100)
    found = zip((f"p{share}" for share in shares), np.percentile(lengths, shares).tolist(), strict=True)
    return {"responses": len(lengths), "mean": statistics.mean(lengths), **dict(found)}


def predicted(attempt: Row) -> Row:
    """Seconds and GPU memory by phase that the budget predicts for the plan of an attempt; empty without its facts."""
    setup = setup_of_facts(attempt["plan_facts"])
    if setup is None:
        return {}
    found = budget(setup, evenly_filled(setup.work, MemoryPlan.model_validate(attempt["plan"])))
    phases: tuple[Phase, ...] = ("rollout", "update", "sync")
    return {
        "seconds_per_step": found.seconds(),
        "seconds_by_phase": {phase: found.seconds(phase) for phase in phases},
        "gpu_bytes_by_phase": {phase: found.peak("gpu", phase) for phase in phases},
        "reserved_by_phase": {
            "policy": {phase: found.in_torch("policy", phase) for phase in ("update", "optimizer", "sync")},
            "rollout": {"rollout": found.in_torch("engine", "rollout")},
        },
    }


def use_of_gpus(attempt: Row, seconds: Mapping[str, Sequence[float]]) -> Row:
    """Shares of the data sheet's rates in the median step, if all responses have the maximum length; empty on a CPU.

    Model flops of the update: three forward passes, without recomputation. Bandwidth of the rollout: weights, keys and
    values of an engine's sequences, read once for each token; half of the keys and values are there on average.
    `seconds`: quartiles by phase.
    """
    setup = setup_of_facts(attempt["plan_facts"]) if attempt.get("plan_facts") else None
    if setup is None or setup.hardware.device == "cpu":
        return {}
    setup = setup.under(MemoryPlan.model_validate(attempt["plan"]))
    work, model, gpu = setup.work, setup.model, setup.hardware.gpu_type
    tokens, sequences = work.max_response_tokens, work.prompts_per_step * work.group_size
    flops = 3 * forward_flops(model, tokens) * sequences * tokens / work.policy_ranks
    read = tokens * decode_step_bytes(work, model, -(-sequences // work.engines), tokens / 2)
    return {
        "update_model_flops_share": flops / seconds["update"][1] / gpu.bfloat16_flops,
        "decode_bandwidth_share": read / seconds["rollout"][1] / gpu.memory_rate,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def ledger_of(output: Path) -> list[Row]:
    file = output / "ledger.jsonl"
    return complete_lines(file) if file.exists() else []


def complete_lines(file: Path) -> list[Row]:
    """Without a last line that a killed process has not completed."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def memory_of(log: Path) -> dict[str, int]:
    """Largest values of one process: all memory in use on its GPU, its own part of that, and its host memory."""
    samples = complete_lines(log)
    return {
        "gpu_used_bytes": max(each["device_total_bytes"] - each.get("device_free_bytes", 0) for each in samples),
        "peak_reserved_bytes": max(each.get("peak_reserved_bytes", 0) for each in samples),
        "peak_rss_bytes": max(each.get("peak_rss_bytes", 0) for each in samples),
    }


def reserved_by_phase(log: Path, first_step: int) -> dict[str, int]:
    """Peak memory that the process's torch reserved in each phase, from a step on."""
    peaks: dict[str, int] = {}
    for sample in complete_lines(log):
        if sample["step"] >= first_step:
            peaks[sample["phase"]] = max(sample.get("peak_reserved_bytes", 0), peaks.get(sample["phase"], 0))
    return peaks


def pinned_to_a_card(job: dict[str, Any], card_bytes: int) -> dict[str, Any]:
    """`spec.memory` of the spec `job`, with the sizes of its plan for a GPU of `card_bytes`. Resolves the model."""
    spec = RLJobSpec.model_validate(job, by_alias=True, by_name=False)
    directory, lora = resolve_model(spec.model.uri), spec.policy.lora
    in_adapters = adapter_parameters(adapted_layers(directory, lora.targets, lora.rank), lora.rank) if lora else 0
    shape = model_dimensions(directory).shape(compute_bytes(spec, "cuda"), in_adapters)
    machine = this_machine()
    hardware = Hardware("cuda", card_bytes, machine.host_memory_bytes, gpu=machine.gpu_name, layers_compiled=True)
    plan = first_plan(spec.memory, Setup(workload_of(spec), shape, hardware))
    return {
        "kvCache": str(plan.kv_cache_bytes),
        "microBatchTokens": plan.micro_batch_tokens,
        "logprobChunkTokens": plan.logprob_chunk_tokens,
        "activationCheckpointing": "Enabled" if plan.activation_checkpointing else "Disabled",
        "optimizerOffload": text_of("optimizer_offload", plan.optimizer_offload),
        "policyOffload": "Enabled" if plan.policy_offload else "Disabled",
        "syncBucketSize": str(plan.sync_bucket_bytes),
    }
