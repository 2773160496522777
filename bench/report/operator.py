"""Blocks on the operator: a thousand jobs at once, comparison with KubeRay, ten thousand jobs, a single job, real
kubelets."""

from __future__ import annotations

from collections.abc import Callable

from bench.report.markdown import Result, Row, facts, source, table


def scale(result: Result) -> str:
    [row] = result["rows"]
    peak = row["peak_bytes"]
    rows = [
        ("jobs, of two pods each", f"{row['jobs']:,}"),
        ("nodes, simulated by KWOK", f"{row['nodes']}"),
        ("all jobs created after", f"{row['submitted_seconds']:.0f} s"),
        ("last pod created after", f"{row['last_pod_created_seconds']:.0f} s"),
        ("median until all pods of a job run", f"{row['median_running_seconds']:.0f} s"),
        ("all jobs `Running` after", f"{row['all_running_seconds']:.0f} s"),
        ("all jobs `Complete`, after all have ended at once", f"{row['all_complete_seconds_after_last_report']:.0f} s"),
        (
            "writes per job until `Running`",
            f"{row['writes_per_job_until_running']:.0f}, including one Event",
        ),
        ("writes per job in its life", f"{row['writes_per_job']:.1f}"),
        ("CPU time of the operator until all run", f"{row['operator_cpu_seconds_until_running']:.0f} s"),
        ("resident memory of the operator, idle", f"{row['operator_idle_bytes'] / 1e6:.0f} MB"),
        ("resident memory of the operator, peak", f"{peak['operator'] / 1e6:.0f} MB"),
        ("resident memory of the API server, peak", f"{peak['kube-apiserver'] / 1e9:.1f} GB"),
    ]
    return f"{source(result, versions=False)}\n{facts(rows)}"


def duel(result: Result) -> str:
    header = ("", *(row["operator"] for row in result["rows"]))
    rows = [
        ("last pod created after", _each(result, lambda row: f"{row['last_pod_created_seconds']:.0f} s")),
        ("median until all pods of a job run", _each(result, lambda row: f"{row['median_running_seconds']:.0f} s")),
        ("all jobs run after", _each(result, lambda row: f"{row['all_running_seconds']:.0f} s")),
        ("writes per job until all run", _each(result, lambda row: f"{row['writes_per_job_until_running']:.1f}")),
        ("CPU time until all run", _each(result, lambda row: f"{row['operator_cpu_seconds_until_running']:.0f} s")),
        ("resident memory, peak", _each(result, lambda row: f"{row['peak_bytes']['operator'] / 1e6:.0f} MB")),
    ]
    return f"{source(result, versions=False)}\n{table(header, [(name, *cells) for name, cells in rows])}"


def _each(result: Result, cell: Callable[[Row], str]) -> list[str]:
    return [cell(row) for row in result["rows"]]


def large(result: Result) -> str:
    [row] = result["rows"]
    peak = row["peak_bytes"]
    rows = [
        ("jobs, of two pods each", f"{row['jobs']:,}"),
        ("of these pending, because no node fits", f"{row['pending_jobs']:,}"),
        ("nodes, simulated by KWOK", f"{row['nodes']:,}"),
        ("all pods created, half of the jobs `Running`", f"after {row['start_seconds'] / 60:.0f} minutes"),
        ("nodes cordoned and uncordoned, then", f"{row['node_changes'] / row['seconds']:.0f} a second"),
        (
            "from a StepReport to the step in the RLJob's status",
            f"median {row['reaction_p50_seconds']:.2f} s, p99 {row['reaction_p99_seconds']:.2f} s, "
            f"of {row['reports']:,} reports",
        ),
        ("p99 of the time in the queue, running jobs", f"at most {row['queue_p99_seconds_at_most']:g} s"),
        ("p99 of the time in the queue, pending jobs", f"at most {row['queue_pending_p99_seconds_at_most']:g} s"),
        ("CPU use of the operator meanwhile", f"{100 * row['operator_cpu_share']:.0f} % of a core"),
        ("resident memory of the operator, peak", f"{peak['operator'] / (1 << 20):.0f} MiB"),
        ("resident memory of the API server, peak", f"{peak['kube-apiserver'] / 1e9:.1f} GB"),
    ]
    return f"{source(result, versions=False)}\n{facts(rows)}"


def single_job(result: Result) -> str:
    [row] = result["rows"]
    rows = [
        ("from the manifest to both pods", f"{row['pods_created_seconds']:.2f} s"),
        ("from running pods to the condition `Running`", f"{row['running_seconds']:.2f} s"),
        ("a reconcile with its writes", f"{1e3 * row['reconcile_mean_seconds']:.0f} ms"),
        ("requests in the life of a job without failures", f"{row['requests_per_life']:.0f}"),
        (f"requests in {row['idle_seconds']:.0f} s without a change", f"{row['requests_while_idle']}"),
    ]
    return f"{source(result, versions=False)}Means of {row['jobs']} jobs, one after the other.\n\n{facts(rows)}"


def large_templates(result: Result) -> str:
    header = (
        "template",
        "replicas",
        "pods built in",
        "pods created",
        "`/healthz`, longest",
        "other job",
        "peak memory",
    )
    rows = [
        (
            f"{row['template_bytes']:,} bytes",
            f"{row['replicas']:,}",
            f"{1e3 * row['build_seconds']:.0f} ms",
            "refused" if row["refusal"] else f"{row['pods']:,}",
            f"{row['healthz_max_seconds']:.2f} s",
            f"{row['other_job_condition_seconds']:.2f} s",
            f"{row['operator_peak_bytes'] / (1 << 20):.0f} MiB",
        )
        for row in result["rows"]
    ]
    return f"{source(result, versions=False)}\n{table(header, rows)}"


def cluster_job(result: Result) -> str:
    runs = result["rows"]
    rows = [
        ("containers run", _seconds(result, "containers_started_seconds")),
        ("first step committed", _seconds(result, "first_step_seconds")),
        ("`Complete`", _seconds(result, "complete_seconds")),
        ("mean reward of the last step", ", ".join(f"{run['reward']:.3f}" for run in runs)),
    ]
    return f"{source(result, versions=False)}{len(runs)} runs; times count from `kubectl apply`.\n\n{facts(rows)}"


def _seconds(result: Result, name: str) -> str:
    return ", ".join(f"{run[name]:.1f} s" for run in result["rows"])
