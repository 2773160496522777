"""Writes what docs/ says of the recorded results: two whole pages, and a table each in two others.

    python -m bench.report.pages [--check]

`--check`: writes nothing, and fails where a page says something else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.record import RESULTS
from bench.report import confusion_matrix, telemetry_cost
from bench.report import memory as mitigations_page
from bench.report import recoveries as recovery_sections
from bench.report import soak as soak_section
from bench.report.recoveries import parts_text
from rljob_testing.repository import ROOT

DOCS = ROOT / "docs"
GIB = 2**30

Result = dict[str, Any]


def page() -> str:
    return "\n".join(
        [
            _INTRODUCTION,
            _step(_read("h200_step"), _read("h200_step_alone")),
            _chain_sum(_read("smollm2_chain_sum"), _read("smollm2_chain_sum_cpu")),
            _overhead(_read("overhead")),
            _operator_scale(_read("operator_scale")),
            _operator_job(_read("operator_single_job"), _read("cluster_job")),
            _recovery(_read("recovery_in_pods")),
            recovery_sections.recovered_jobs(_read("recovered_jobs"), _versions(_read("recovered_jobs"))),
            recovery_sections.freed_bytes(),
            _recovery_time(_read("recovery_time_h200"), "on one H200") + _COMPILED_ANEW,
            _recovery_time(_read("recovery_time"), "on a CPU"),
            soak_section.section(_read("soak")),
            _probe(_read("probe_overhead")),
        ]
    )


_INTRODUCTION = """# Benchmarks

Made from `bench/results/*.json` by `bench/report/pages.py`; do not edit. Each file names its script, date, device and versions.
Memory is in GiB and says what it counts.
"""


_COMPILED_ANEW = """
In the same process, 8 of the seconds are torch compiling a layer anew for the smaller micro-batches of the changed plan.
`fuse_kernels` has since been told to leave out the fusion which asks for that; on a GPU this has not been measured.
"""


def _step(result: Result, alone: Result) -> str:
    ours, trl = result["rows"]
    [later] = alone["rows"]
    phases = ours["seconds_by_phase"]
    rows = [
        ("seconds a step", f"**{ours['seconds_per_step']:.2f}**", f"{trl['seconds_per_step']:.2f}"),
        ("generated tokens/s", f"**{ours['tokens_per_second']:,.0f}**", f"{trl['tokens_per_second']:,.0f}"),
        ("peak of the GPU, all processes", f"**{_gib(ours['device_peak_bytes'])}**", _gib(trl["device_peak_bytes"])),
        ("first step", f"{ours['first_step_seconds']:.1f} s", f"{trl['all_seconds'][0]:.1f} s"),
        ("start-up", f"{ours['start_up_seconds']:.0f} s", f"{trl['start_up_seconds']:.0f} s"),
    ]
    return f"""## A step on one H200

`bench/programs/h200_step.py`, {result["date"]}, {_versions(result)}. A model of Qwen3-0.6B's shape with random weights; 16 prompts × 8
completions × 512 tokens; float32 weights, bfloat16 compute; the engine asleep during the update. Both arms one after the
other on the same GPU; medians from the third step on.

| | RLJob | TRL {result["versions"]["trl"]} |
|---|---|---|
{_table(rows)}

Where RLJob's {ours["seconds_per_step"]:.2f} s go: rollout {phases["rollout"]:.2f} s (vLLM generates; about 3.6 ms for each
of 512 tokens of 128 sequences), update {phases["update"]:.2f} s (5 micro-batches of at most 16,384 tokens; layers compiled),
sync {phases["sync"]:.2f} s (waking the engine, 1.2 GB of weights over CUDA IPC, waking the KV cache), reward and the rest
{ours["seconds_per_step"] - sum(phases.values()) + phases["reward"]:.2f} s. The first step compiles the policy's layers.

Peaks: RLJob's from `cudaMemGetInfo` after each micro-batch, TRL's from NVML every 20 ms. RLJob's contains
{_gib(11 * 312475648)} of buffers that the weight sync of this run kept, one a step (`weight_sync/ipc.py` says how that comes
about and how it is avoided); in the run below memory after a sync is the same at step 1 and step 80.
Mean difference between the engine's and the policy's log-probabilities: {ours["logprob_diff_mean"]:.4f} (bfloat16).

RLJob alone, {alone["date"]}, on an H200 again: {later["seconds_per_step"]:.2f} s a step (rollout {later["seconds_by_phase"]["rollout"]:.2f} s,
update {later["seconds_by_phase"]["update"]:.2f} s, sync {later["seconds_by_phase"]["sync"]:.2f} s), start-up {later["start_up_seconds"]:.0f} s, and a peak of the GPU, all processes, from NVML every
20 ms, of {_gib(later["device_peak_bytes"])}: without those buffers.
"""


def _chain_sum(result: Result, on_cpu: Result) -> str:
    [row], [cpu] = result["rows"], on_cpu["rows"]
    return f"""## SmolLM2-135M-Instruct learns to add, on one H200

`{result["script"]}`, {result["date"]}, {_versions(result)}. Two one-digit numbers; reward: the last number of the response is
the sum; 64 responses a step.

| | |
|---|---|
| reward, means of the first and the last five steps | {row["first_reward"]:.2f} → {row["last_reward"]:.2f} of {row["steps"]} steps |
| first step whose last five average 0.9 | {row["first_step_with_mean_of_five_above_0.9"]} |
| steps of which all 64 responses were right | {sum(reward == 1.0 for reward in row["rewards"])}, the last among them |
| a step (median) | {row["median_step_seconds"]:.2f} s |
| all steps; start-up | {row["loop_seconds"]:.0f} s, of which the first {row["first_step_seconds"]:.0f} s; {row["start_up_seconds"]:.0f} s |
| peak reserved by torch: policy, engine | {row["peak_memory_gib"]["policy"]["gib"]:.1f} GiB, {row["peak_memory_gib"]["rollout"]["gib"]:.1f} GiB |

The same manifest on two CPU cores ({on_cpu["device"]}), stopped after {cpu["steps"]} of 80 steps: reward
{cpu["first_reward"]:.2f} → {cpu["last_reward"]:.2f} (means of the first and the last five), {cpu["median_step_seconds"]:.0f} s a step,
{cpu["peak_memory_gib"]["policy"]["gib"]:.1f} GiB resident in the policy and {cpu["peak_memory_gib"]["rollout"]["gib"]:.1f} GiB in the engine.

![Reward by step](../bench/results/smollm2_chain_sum_reward.png)
![Seconds by phase](../bench/results/smollm2_chain_sum_timing.png)
"""


def _overhead(result: Result) -> str:
    bare, ours, ratio = result["rows"]
    phases = ("rollout", "reward", "update", "sync", "checkpoint", "step")
    lines = [
        " | ".join([arm["arm"], *(_milliseconds(arm["seconds_by_phase"].get(phase)) for phase in phases)])
        for arm in (bare, ours)
    ]
    return f"""## What a step costs beside its arithmetic, on a CPU

`bench/programs/overhead.py`, {result["date"]}, {result["device"]}. `examples/digits.yaml` through `rljob run`, and the same arithmetic as
one bare loop in one process ([`bench/programs/bare_loop.py`](../bench/programs/bare_loop.py)); {result["note"].split(", ", 2)[2]}; medians, in
milliseconds.

| | {" | ".join(phases)} |
|---|{"---|" * len(phases)}
| {lines[0]} |
| {lines[1]} |

A step takes **{ratio["step"]:.2f}×** the bare loop's. The difference is what makes a step a transaction in processes of its
own: calls to the roles and copies of rollouts and weights through shared memory, two fsyncs (journal and ledger), the
memory log. Start-up, apart: {ours["start_up_seconds"]:.0f} s (Ray, two processes that import torch and vLLM on two cores)
beside {bare["start_up_seconds"]:.0f} s.
"""


def _operator_scale(result: Result) -> str:
    [row] = result["rows"]
    peak = row["peak_bytes"]
    rows = [
        ("last pod created", f"{row['last_pod_created_seconds']:.0f} s"),
        ("median until all of a job's pods run", f"{row['median_running_seconds']:.0f} s"),
        ("all Running", f"{row['all_running_seconds']:.0f} s"),
        ("writes a job until then", f"{row['writes_per_job_until_running']:.0f}, an Event among them"),
        ("CPU of the operator until then", f"{row['operator_cpu_seconds_until_running']:.0f} s"),
        ("all Complete, after all have ended at once", f"{row['all_complete_seconds_after_last_report']:.0f} s"),
        ("writes a job over its life", f"{row['writes_per_job']:.1f}"),
        (
            "memory of the operator, idle and at most",
            f"{row['operator_idle_bytes'] / 1e6:.0f}, {peak['operator'] / 1e6:.0f} MB",
        ),
    ]
    return f"""## A thousand jobs at once

`{result["script"]}`, {result["date"]}, {result["device"]}. {row["jobs"]:,} RLJobs, each with a controller and a worker,
created within {row["submitted_seconds"]:.0f} s on {row["nodes"]} nodes played by KWOK; control plane, KWOK and operator share the
machine, and the API server, at {peak["kube-apiserver"] / 1e9:.1f} GB, is what it is busy with.

| | |
|---|---|
{_table(rows)}
"""


def _operator_job(alone: Result, in_pods: Result) -> str:
    [row] = alone["rows"]
    runs = in_pods["rows"]
    spread = ", ".join(f"{r['first_step_seconds']:.0f} s" for r in runs)
    ends = ", ".join(f"{r['complete_seconds']:.0f} s" for r in runs)
    return f"""## One job

`{alone["script"]}`, {alone["date"]}: mean of {row["jobs"]} jobs, one after the other, pods started by hand. From the
manifest to both pods {row["pods_created_seconds"]:.2f} s, from running pods to the condition Running
{row["running_seconds"]:.2f} s; a reconcile takes {1000 * row["reconcile_mean_seconds"]:.0f} ms with its writes. A job without
failures costs {row["requests_per_life"]:.0f} requests in all, and none in {row["idle_seconds"]:.0f} s in which nothing changes.

`{in_pods["script"]}`, {in_pods["date"]}: `examples/digits.yaml` with real kubelets, {len(runs)} runs. From
`kubectl apply` to running containers at most {max(r["containers_started_seconds"] for r in runs):.0f} s, to the first
step {spread} (Ray, then the imports of torch and vLLM on two cores), to Complete {ends}; rewards from {min(r["reward"] for r in runs):.3f}.
"""


def _recovery(in_pods: Result) -> str:
    [row] = in_pods["rows"]
    after = row["seconds_from_apply"]
    parts = row["attempt_ready_seconds"]
    names = {
        "reading": "model and task",
        "ray": "Ray",
        "processes": "processes, imports",
        "policy": "policy",
        "engine": "engine",
        "replay": "replaying three steps, compiling",
        "sync": "weights to the engine",
    }
    rows = [
        (text, *(f"{parts[number][name]:.1f} s" if name in parts[number] else "–" for number in ("1", "2")))
        for name, text in names.items()
    ]
    restarted = after["failed_step_committed"] - after["plan_changed"]
    return f"""## A recovery on one H200

`bench/programs/recovery_in_pods.py`, {in_pods["date"]}, {_versions(in_pods)}: {in_pods["note"]}. From the failure to
the changed plan {after["plan_changed"] - after["out_of_memory"]:.1f} s, then the containers were restarted in the same pods, and {restarted:.0f} s later the failed
step was committed. Where a start's time goes, before the failure and after it:

| | first start | restarted in place |
|---|---|---|
{_table(rows)}
"""


def _recovery_time(result: Result, where: str) -> str:
    rows = [
        (
            "first start" if row["arm"].startswith("first start") else row["arm"],
            f"{row['seconds']:.1f} s",
            parts_text(row["parts"]),
        )
        for row in result["rows"]
        if not row["arm"].startswith("first start") or row["arm"] == result["rows"][-2]["arm"]
    ]
    return f"""## The ways back, {where}

`bench/programs/recovery_time.py`, {result["date"]}, {result["device"]}: {result["note"]}. From the failure until the failed phase is done.

| | seconds | of these |
|---|---|---|
{_table(rows)}
"""


def _probe(result: Result) -> str:
    without, _, added = result["rows"]
    return f"""## What the probe costs another trainer

`bench/programs/probe_overhead.py`, {result["date"]}, {result["device"]}: {result["note"]}. A process starts {1e3 * added["start_seconds"]:.1f} ms later. In
{without["step_seconds"] * 1e6:.0f} µs of a step the arms differ by {1e6 * added["step_seconds"]:.1f} µs, which is noise: no code of the probe runs in a step.
"""


def _read(name: str) -> Result:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f}"


def _versions(result: Result) -> str:
    shown = [(name, result["versions"].get(name)) for name in ("torch", "vllm", "ray", "transformers")]
    return ", ".join(f"{name} {version}" for name, version in shown if version)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is not up to date")
    check = parser.parse_args().check
    pages = {
        "benchmarks.md": page(),
        "mitigations.md": mitigations_page.page(),
        "diagnose.md": _with_table("diagnose.md", "induced_failures", confusion_matrix.inserted),
        "telemetry.md": _with_table("telemetry.md", "memory_telemetry", telemetry_cost.table),
    }
    stale = {name: text for name, text in pages.items() if _text(DOCS / name) != text}
    for name, text in stale.items():
        if check:
            print(f"docs/{name} is not up to date: run python -m bench.report.pages", file=sys.stderr)
        else:
            (DOCS / name).write_text(text)
    return int(check and bool(stale))


def _with_table(name: str, result: str, table: Callable[[Result], str]) -> str:
    return between_marks((DOCS / name).read_text(), f"{result}.json", table(_read(result)))


def between_marks(page: str, result: str, inserted: str) -> str:
    """`page` with `inserted` after its mark for `result`, in the place of what stood there."""
    begin, end = f"<!-- from bench/results/{result} -->\n", "<!-- end -->\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{inserted}{end}{after}"


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
