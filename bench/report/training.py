"""Blocks on training speed: a step compared with TRL, a learned task, the overhead of RLJob and of its probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from bench.report.markdown import Result, facts, gib, read, sentence, source, table

_STAGING_BUFFERS_BYTES = 11 * 312475648
"""Buffers that the weight sync of the run in h200_step.json kept, one per step from the second on."""


def step(result: Result) -> str:
    """A step of RLJob and of TRL on one GPU, and RLJob alone in a later run."""
    ours, trl = result["rows"]
    alone = read("h200_step_alone")
    [later] = alone["rows"]
    rows = [
        ("seconds per step", *(f"{row['seconds_per_step']:.2f}" for row in (ours, trl, later))),
        ("generated tokens per second", *(f"{row['tokens_per_second']:,.0f}" for row in (ours, trl, later))),
        ("peak GPU memory, all processes", *(gib(row["device_peak_bytes"]) for row in (ours, trl, later))),
        ("first step", f"{ours['first_step_seconds']:.1f} s", f"{trl['all_seconds'][0]:.1f} s", "–"),
        ("start-up", *(f"{row['start_up_seconds']:.0f} s" for row in (ours, trl, later))),
    ]
    phases = [
        (phase, *(f"{row['seconds_by_phase'][phase]:.2f}" for row in (ours, later)))
        for phase in ("rollout", "update", "sync", "reward")
    ]
    arms = (
        "",
        f"RLJob, {result['date']}",
        f"TRL {result['versions']['trl']}, {result['date']}",
        f"RLJob, {alone['date']}",
    )
    kept, difference = gib(_STAGING_BUFFERS_BYTES), ours["logprob_diff_mean"]
    return (
        f"{source(result)}\n{table(arms, rows)}\n"
        f"{table(('seconds of RLJob by phase', result['date'], alone['date']), phases)}\n"
        f"RLJob's peak of {result['date']} contains {kept} of staging buffers that the weight sync kept; fixed since.\n"
        f"Mean difference of log-probabilities between engine and policy: {difference:.4f} (bfloat16).\n"
    )


def means_of_five(rewards: Sequence[float]) -> list[float]:
    """The mean of the rewards of each five successive steps, by the last of them, from step 5 on."""
    return [fmean(rewards[end - 5 : end]) for end in range(5, len(rewards) + 1)]


def chain_sum(result: Result) -> str:
    [row] = result["rows"]
    peak = row["peak_memory_gib"]
    counts = {"device": "peak reserved by torch", "host": "peak resident memory"}[peak["policy"]["counts"]]
    right = sum(reward == 1.0 for reward in row["rewards"])
    rows = [
        ("mean reward, first and last five steps", f"{row['first_reward']:.2f} → {row['last_reward']:.2f}"),
        ("steps", f"{row['steps']}"),
        ("first step whose last five average 0.9", f"{row['first_step_with_mean_of_five_above_0.9']}"),
        (
            "steps with 64 of 64 correct responses",
            f"{right}, including the last step" if row["rewards"][-1] == 1.0 else f"{right}",
        ),
        ("median seconds per step", f"{row['median_step_seconds']:.2f}"),
        ("first step", f"{row['first_step_seconds']:.0f} s"),
        ("all steps", f"{row['loop_seconds']:.0f} s"),
        ("start-up", f"{row['start_up_seconds']:.0f} s"),
        (f"{counts}, policy", f"{peak['policy']['gib']:.1f} GiB"),
        (f"{counts}, engine", f"{peak['rollout']['gib']:.1f} GiB"),
    ]
    return f"{source(result)}\n{facts(rows)}"


def chain_sum_cpu(result: Result) -> str:
    [row] = result["rows"]
    peak = row["peak_memory_gib"]
    rows = [
        ("mean reward, first and last five steps", f"{row['first_reward']:.2f} → {row['last_reward']:.2f}"),
        ("steps", f"{row['steps']} of 80, then stopped"),
        ("median seconds per step", f"{row['median_step_seconds']:.0f}"),
        ("peak resident memory, policy", f"{peak['policy']['gib']:.1f} GiB"),
        ("peak resident memory, engine", f"{peak['rollout']['gib']:.1f} GiB"),
    ]
    return f"{source(result)}\n{facts(rows)}"


def overhead(result: Result) -> str:
    bare, ours, ratio = result["rows"]
    names = {"bare": "bare loop", "rljob": "`rljob run`"}
    phases = ("rollout", "reward", "update", "sync", "checkpoint", "step")
    rows = [
        (
            names[arm["arm"]],
            *(_milliseconds(arm["seconds_by_phase"].get(phase)) for phase in phases),
            f"{arm['start_up_seconds']:.0f} s",
        )
        for arm in (bare, ours)
    ]
    return (
        f"{source(result)}{sentence(result['note'])}\n\n"
        f"{table(('median milliseconds', *phases, 'start-up'), rows)}\n"
        f"A step of `rljob run` takes **{ratio['step']:.2f}×** as long as a step of the bare loop.\n"
    )


def probe(result: Result) -> str:
    without, _, added = result["rows"]
    rows = [
        ("added to the start of a process", f"{1e3 * added['start_seconds']:.1f} ms"),
        ("the same without compiled files, as in pods", f"{1e3 * added['start_in_pods_seconds']:.1f} ms"),
        ("fastest step of a run without the probe", f"{1e6 * without['step_seconds']:.0f} µs"),
        ("difference with the probe", f"{1e6 * added['step_seconds']:.1f} µs"),
    ]
    return f"{source(result)}{sentence(result['note'])}\n\n{facts(rows)}"


def probe_on_gpu(result: Result) -> str:
    [row] = result["rows"]

    def sample(kind: Mapping[str, float]) -> str:
        return f"{1e6 * kind['median']:.0f} µs (highest {1e6 * kind['highest']:.0f} µs, {kind['count']} samples)"

    queued, steps = row["queued"], row["counted_steps"]
    pending = f"{1e3 * queued['remaining_seconds']:.0f} ms" if queued["is_pending_after"] else "none"
    rows = [
        ("median time of a sample in a step", sample(row["sample_in_step_seconds"])),
        ("one sample after another", sample(row["sample_seconds"])),
        ("the same while the GPU has queued work", sample(queued["sample_seconds"])),
        ("work left on the GPU after these samples", pending),
        ("both hooks of a step without a sample", f"{1e6 * row['idle_hook_seconds']:.2f} µs"),
        ("median step", f"{row['step_seconds']:.3f} s"),
        (
            f"calls into the probe in {steps} steps",
            ", ".join(f"`{name}` {calls}" for name, calls in sorted(row["probe_calls"].items())),
        ),
        ("parameter tensors", f"{row['parameter_tensors']}"),
        ("blocks in use between steps", f"{row['allocated_blocks']:,} ({gib(row['allocated_bytes'])})"),
        ("largest share of a step (calculated)", f"{row['step_percent']:.3f} %"),
    ]
    return f"{source(result)}{sentence(result['note'])}\n\n{facts(rows)}"


def telemetry(result: Result) -> str:
    """An arm that failed is left out."""
    found = {row["arm"]: row for row in result["rows"] if "error" not in row}
    rows: list[tuple[str, str]] = []
    if samples := found.get("samples alone"):
        rows += [
            ("sample of a micro-batch", f"{samples['micro_batch_microseconds']:.0f} µs"),
            ("sample of a phase", f"{samples['phase_microseconds'] / 1e3:.2f} ms"),
            (
                f"all samples of an update with {samples['micro_batches']} micro-batches",
                f"{samples['share_percent']:.2f} % of the update",
            ),
            ("line of the log", f"{samples['line_bytes']} bytes"),
        ]
    if turns := found.get("log on and off in turn"):
        medians = f"{turns['update_seconds_on']:.3f} s, {turns['update_seconds_off']:.3f} s"
        rows.append(
            (
                "median update with the log and without, in turn",
                f"{medians} (updates vary by {turns['spread_percent']:.1f} %)",
            )
        )
    if snapshot := found.get("snapshot of a failed request"):
        times = f"{snapshot['milliseconds_with']:.0f} ms, {snapshot['milliseconds_without']:.0f} ms"
        size = f"snapshot of {snapshot['json_bytes'] / 1024:.1f} KiB"
        rows.append(("failed request with its snapshot and without, including torch's retries", f"{times} ({size})"))
    return f"On one {result['device']}, torch {result['versions']['torch']}:\n\n{facts(rows)}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f}"
