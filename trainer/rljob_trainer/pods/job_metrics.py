"""Prometheus metrics of the job, which the controller's pod serves to callers with the installation's token."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, PlanChange
from rljob_api.step_report import Evidence
from rljob_client.run_directory.records import EvaluationRecord, StepRecord
from rljob_memory.sample import MemorySample
from rljob_trainer.run_listener import RunListener
from rljob_trainer.step_report.reporter import role_and_rank
from rljob_trainer.trackers.values import record_values

disable_created_metrics()

_REQUEST_SECONDS = 10.0
"""Time that a caller may take to send its request."""


class JobMetrics(RunListener):
    """Keeps the metrics up to date. All have the label `rljob`, the name of the job."""

    def __init__(self, job: str, steps: int) -> None:
        """`steps`: those of the job."""
        self.registry = CollectorRegistry()
        self._job = job

        def made(kind: type[Any], name: str, text: str, *labels: str) -> Any:
            return kind(f"rljob_job_{name}", text, ("rljob", *labels), registry=self.registry)

        self._step = made(Gauge, "step", "Committed steps.")
        made(Gauge, "steps", "Steps of the job.").labels(job).set(steps)
        self._values = made(
            Gauge, "value", "Numbers of the last committed step and of the last evaluation, by their names.", "name"
        )
        self._peaks = made(Gauge, "memory_peak_bytes", "Highest peak of the role's processes in that step.", "role")
        self._free = made(Gauge, "memory_headroom_bytes", "Least free memory in that step.", "role", "place")
        self._failures = made(Counter, "out_of_memory", "Out-of-memory failures since the pod started.", "class")
        self._changes = made(Counter, "adjustments", "Changes of the memory plan since the pod started.", "setting")

    def attempt_began(self, plan: MemoryPlan, committed: Any, warn: Callable[[str], None]) -> None:
        if committed:
            self.step_committed(committed[-1], {})

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        self._step.labels(self._job).set(record.step)
        self._set_values(record)
        for role, peak in record.peak_memory_bytes.items():
            self._peaks.labels(self._job, role).set(peak)
        for place, free in headroom(memory).items():
            self._free.labels(self._job, *place).set(free)

    def evaluated(self, record: EvaluationRecord) -> None:
        self._set_values(record)

    def failed(self, evidence: Evidence) -> None:
        self._failures.labels(self._job, evidence.diagnoses[0].class_name if evidence.diagnoses else "Unknown").inc()

    def plan_changed(self, change: PlanChange, plan: MemoryPlan) -> None:
        self._changes.labels(self._job, change.remedy.setting).inc()

    def _set_values(self, record: StepRecord | EvaluationRecord) -> None:
        for name, value in record_values(record).items():
            if not name.startswith("memory/"):  # in bytes elsewhere
                self._values.labels(self._job, name).set(value)


def headroom(memory: Mapping[str, Mapping[Phase, MemorySample]]) -> dict[tuple[str, str], int]:
    """Least free bytes by role and place (`gpu`, `host`). `memory`: by actor and phase."""
    least: dict[tuple[str, str], int] = {}
    for actor, phases in memory.items():
        for sample in phases.values():
            gpu = (sample.device_total_bytes, sample.device_free_bytes)
            host = (sample.host_limit_bytes, sample.host_limit_bytes - sample.host_used_bytes)
            for place, (total, free) in {"gpu": gpu, "host": host}.items():
                key = role_and_rank(actor)[0], place
                if total:
                    least[key] = min(free, least.get(key, free))
    return least


def serve(registry: CollectorRegistry, port: int, token_sha256: str) -> WSGIServer:
    """Serve /metrics from a thread to callers whose bearer token has this SHA-256 (hexadecimal). Raises `OSError`.

    The pod knows only the digest: whoever reads its environment cannot read the metrics of other jobs.
    """
    metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).hexdigest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, token_sha256):
            start_response("401 Unauthorized", [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
            return [b"expected the bearer token of the installation's Secret for job metrics\n"]
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"expected the path /metrics\n"]
        return metrics(environ, start_response)

    server = make_server("", port, answer, ThreadingWSGIServer, _MetricsHandler)
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


class _MetricsHandler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus asks twice a minute."""
