"""Prometheus metrics. Labels have few values: never the name of a job."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.process_collector import ProcessCollector

disable_created_metrics()

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

RECONCILE_ERRORS = Counter(
    "rljob_operator_reconcile_errors",
    "Reconciles that failed, by cause: Conflict, Unavailable, Refused, Unexpected.",
    ("cause",),
    registry=REGISTRY,
)
API_REQUESTS = Counter(
    "rljob_operator_api_requests",
    "Requests to the API server, by verb, resource and HTTP status; code none: no answer.",
    ("verb", "resource", "code"),
    registry=REGISTRY,
)
JOBS = Gauge("rljob_operator_jobs", "RLJobs by phase, as in kubectl get.", ("phase",), registry=REGISTRY)
JOBS_FINISHED = Counter(
    "rljob_operator_jobs_finished",
    "RLJobs that completed or failed while this replica led, by result: Complete or Failed.",
    ("result",),
    registry=REGISTRY,
)
for _result in ("Complete", "Failed"):
    JOBS_FINISHED.labels(_result)  # counts from 0, so that an alert sees the first one
JOB_RESTARTS = Counter("rljob_operator_job_restarts", "Restarts of jobs under the same memory plan.", registry=REGISTRY)
OUT_OF_MEMORY = Counter(
    "rljob_operator_out_of_memory",
    "Out-of-memory failures of jobs, by the class of their cause.",
    ("class",),
    registry=REGISTRY,
)
DIAGNOSED_FAILURES = Counter(
    "rljob_operator_diagnosed_failures",
    "Out-of-memory failures of labelled pods that no RLJob owns, by class of the cause and kind of the owner.",
    ("class", "kind"),
    registry=REGISTRY,
)
ADJUSTMENTS = Counter(
    "rljob_operator_adjustments",
    "Changes of jobs' memory plans, by the setting that was changed.",
    ("setting",),
    registry=REGISTRY,
)
SECONDS_TO_RECOVER = Histogram(
    "rljob_operator_seconds_to_recover",
    "Time from a change of the memory plan after a failure until the failed step was committed.",
    buckets=(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600),
    registry=REGISTRY,
)
WATCH_AGE_SECONDS = Gauge(
    "rljob_operator_watch_age_seconds",
    "Seconds since the last message on a watch, by resource; bookmarks count.",
    ("resource",),
    registry=REGISTRY,
)
UNREADABLE_OBJECTS = Gauge(
    "rljob_operator_unreadable_objects",
    "Objects that are ignored because they cannot be read, by resource.",
    ("resource",),
    registry=REGISTRY,
)
STATUS_WRITES_DELAYED = Counter(
    "rljob_operator_status_writes_delayed",
    "Reconciles that changed a status and wrote it later, because the job had written too often.",
    registry=REGISTRY,
)
STEP_REPORTS_REFUSED = Counter(
    "rljob_operator_step_reports_refused",
    "StepReports that were not read because they are larger than 256 KiB.",
    registry=REGISTRY,
)
UNATTENDED_NAMESPACES = Gauge(
    "rljob_operator_unattended_namespaces",
    "Namespaces of --namespaces that the operator may not list or watch.",
    registry=REGISTRY,
)
LEADER = Gauge("rljob_operator_leader", "1 if this replica is the leader, else 0.", registry=REGISTRY)
NODE_LABEL_WRITES = Counter(
    "rljob_operator_node_label_writes", "Nodes whose rljob.dev/has-gpus label was changed.", registry=REGISTRY
)
EVENTS_DROPPED = Counter(
    "rljob_operator_events_dropped",
    "Kubernetes Events that were not recorded, over a limit or refused.",
    registry=REGISTRY,
)
