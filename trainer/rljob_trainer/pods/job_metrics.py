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

disable_created_metrics()

_REQUEST_SECONDS = 10.0
"""Time that a caller may take to send its request."""

_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "steps": ("Steps of the job.", ()),
    "step": ("Committed steps.", ()),
    "reward_mean": ("Mean reward of all responses of the last committed step.", ()),
    "reward_std": ("Standard deviation of these rewards.", ()),
    "response_tokens_mean": ("Mean length of the responses of the last committed step.", ()),
    "clipped_ratio": ("Share of these responses that were cut at the token limit.", ()),
    "tokens_per_second": ("Prompt and response tokens of the last committed step, by its wall time.", ()),
    "step_seconds": ("Wall time of the last committed step.", ()),
    "phase_seconds": ("Seconds of each phase of the last committed step.", ("phase",)),
    "metric": ("Metrics of the last committed step, by their names in the ledger.", ("name",)),
    "evaluation": ("Metrics of the last evaluation.", ("name",)),
    "evaluation_step": ("Step of the last evaluation.", ()),
    "memory_peak_bytes": (
        "Peak memory of the role's process with the highest peak in the last committed step: reserved by torch on a "
        "GPU, resident on a CPU.",
        ("role",),
    ),
    "memory_headroom_bytes": (
        "Least memory that was free in the last committed step: on a GPU, all processes together; in a container.",
        ("role", "place"),
    ),
}
"""Help and further labels by name, without the prefix `rljob_job_`. All have the label `rljob`: the job's name."""


class JobMetrics(RunListener):
    """Keeps the metrics up to date."""

    def __init__(self, job: str, steps: int) -> None:
        """`steps`: those of the job."""
        self.registry = CollectorRegistry()
        self._job = job
        self._gauges = {
            name: Gauge(f"rljob_job_{name}", text, ("rljob", *labels), registry=self.registry)
            for name, (text, labels) in _GAUGES.items()
        }
        self._failures = self._counter("out_of_memory", "Out-of-memory failures in this pod's life, by cause.", "class")
        self._changes = self._counter("adjustments", "Changes of the memory plan in this pod's life.", "setting")
        self._set("steps", steps)

    def attempt_began(self, plan: MemoryPlan, committed: Any, warn: Callable[[str], None]) -> None:
        if committed:
            self._set_step(committed[-1])

    def step_committed(self, record: StepRecord, memory: Mapping[str, Mapping[Phase, MemorySample]]) -> None:
        self._set_step(record)
        for place, free in headroom(memory).items():
            self._gauges["memory_headroom_bytes"].labels(self._job, *place).set(free)

    def evaluated(self, record: EvaluationRecord) -> None:
        self._set("evaluation_step", record.step)
        self._set_each("evaluation", record.metrics)

    def failed(self, evidence: Evidence) -> None:
        self._failures.labels(self._job, evidence.diagnoses[0].class_name if evidence.diagnoses else "Unknown").inc()

    def plan_changed(self, change: PlanChange, plan: MemoryPlan) -> None:
        self._changes.labels(self._job, change.remedy.setting).inc()

    def _set_step(self, record: StepRecord) -> None:
        for name, value in {
            "step": record.step,
            "reward_mean": record.reward.mean,
            "reward_std": record.reward.std,
            "response_tokens_mean": record.response.mean_tokens,
            "clipped_ratio": record.response.clipped_ratio,
            "tokens_per_second": record.tokens_per_second,
            "step_seconds": record.total_seconds,
        }.items():
            self._set(name, value)
        self._set_each("phase_seconds", record.seconds)
        self._set_each("metric", record.metrics)
        self._set_each("memory_peak_bytes", record.peak_memory_bytes)

    def _set(self, name: str, value: float) -> None:
        self._gauges[name].labels(self._job).set(value)

    def _set_each(self, name: str, values: Mapping[str, float]) -> None:
        for label, value in values.items():
            self._gauges[name].labels(self._job, label).set(value)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"rljob_job_{name}", text, ("rljob", label), registry=self.registry)


def headroom(memory: Mapping[str, Mapping[Phase, MemorySample]]) -> dict[tuple[str, str], int]:
    """Least free bytes by role and place (`gpu`, `host`). `memory`: by actor and phase."""
    least: dict[tuple[str, str], int] = {}
    for actor, phases in memory.items():
        for sample in phases.values():
            free = {}
            if sample.device_total_bytes:
                free["gpu"] = sample.device_free_bytes
            if sample.host_limit_bytes:
                free["host"] = sample.host_limit_bytes - sample.host_used_bytes
            for place, size in free.items():
                key = role_and_rank(actor)[0], place
                least[key] = min(size, least.get(key, size))
    return least


def serve(registry: CollectorRegistry, port: int, token_sha256: str) -> WSGIServer:
    """Serve /metrics from a thread to callers whose bearer token has this SHA-256 (hexadecimal). Raises `OSError`.

    The pod knows only the digest: whoever reads its environment cannot read the metrics of other jobs.
    """
    server = make_server("", port, _guarded(make_wsgi_app(registry), token_sha256), ThreadingWSGIServer, _Handler)
    Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus asks twice a minute."""


def _guarded(app: Callable[..., Iterable[bytes]], token_sha256: str) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).hexdigest()
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, token_sha256):
            start_response("401 Unauthorized", [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
            return [b"expected the bearer token of the installation's Secret for job metrics\n"]
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"expected the path /metrics\n"]
        return app(environ, start_response)

    return answer
