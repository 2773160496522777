"""Prometheus metrics. Labels have few values: never the name of a job."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.process_collector import ProcessCollector

disable_created_metrics()

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
counter = partial(Counter, registry=REGISTRY)
gauge = partial(Gauge, registry=REGISTRY)
histogram = partial(Histogram, registry=REGISTRY)

RECONCILE_ERRORS = counter(
    "rljob_operator_reconcile_errors",
    "Reconciles that failed, by cause: Conflict, Unavailable, Refused, Unexpected.",
    ("cause",),
)
API_REQUESTS = counter(
    "rljob_operator_api_requests",
    "Requests to the API server, by verb, resource and HTTP status; code none: no answer.",
    ("verb", "resource", "code"),
)
JOBS = gauge("rljob_operator_jobs", "RLJobs by phase, as in kubectl get.", ("phase",))
JOBS_FINISHED = counter(
    "rljob_operator_jobs_finished",
    "RLJobs that completed or failed while this replica led, by result: Complete or Failed.",
    ("result",),
)
for _result in ("Complete", "Failed"):
    JOBS_FINISHED.labels(_result)  # counts from 0, so that an alert sees the first one
JOB_RESTARTS = counter("rljob_operator_job_restarts", "Restarts of jobs under the same memory plan.")
OUT_OF_MEMORY = counter(
    "rljob_operator_out_of_memory", "Out-of-memory failures of jobs, by the class of their cause.", ("class",)
)
DIAGNOSED_FAILURES = counter(
    "rljob_operator_diagnosed_failures",
    "Out-of-memory failures of labelled pods that no RLJob owns, by class of the cause and kind of the owner.",
    ("class", "kind"),
)
ADJUSTMENTS = counter(
    "rljob_operator_adjustments", "Changes of jobs' memory plans, by the setting that was changed.", ("setting",)
)
SECONDS_TO_RECOVER = histogram(
    "rljob_operator_seconds_to_recover",
    "Time from a change of the memory plan after a failure until the failed step was committed.",
    buckets=(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600),
)
WATCH_AGE_SECONDS = gauge(
    "rljob_operator_watch_age_seconds",
    "Seconds since the last message on a watch, by resource; bookmarks count.",
    ("resource",),
)
UNREADABLE_OBJECTS = gauge(
    "rljob_operator_unreadable_objects",
    "Objects that are ignored because they cannot be read, by resource.",
    ("resource",),
)
STATUS_WRITES_DELAYED = counter(
    "rljob_operator_status_writes_delayed",
    "Reconciles that changed a status and wrote it later, because the job had written too often.",
)
STEP_REPORTS_REFUSED = counter(
    "rljob_operator_step_reports_refused", "StepReports that were not read because they are larger than 256 KiB."
)
UNATTENDED_NAMESPACES = gauge(
    "rljob_operator_unattended_namespaces", "Namespaces of --namespaces that the operator may not list or watch."
)
LEADER = gauge("rljob_operator_leader", "1 if this replica is the leader, else 0.")
NODE_LABEL_WRITES = counter("rljob_operator_node_label_writes", "Nodes whose rljob.dev/has-gpus label was changed.")
EVENTS_DROPPED = counter(
    "rljob_operator_events_dropped", "Kubernetes Events that were not recorded, over a limit or refused."
)
