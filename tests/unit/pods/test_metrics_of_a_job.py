from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rljob_api.step_report import Evidence
from rljob_memory.sample import MemorySample
from rljob_trainer.pods.job_metrics import JobMetrics, serve
from tests.unit.ledger.samples import GIB, PLAN, plan_change, step_record
from tests.unit.trackers.tracked import evaluation

TOKEN = "a-token"


@pytest.fixture
def metrics() -> JobMetrics:
    return JobMetrics("sums", steps=40)


@pytest.fixture
def address(metrics: JobMetrics) -> Iterator[str]:
    server = serve(metrics.registry, 0, hashlib.sha256(TOKEN.encode()).hexdigest())
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(url: str, authorization: str | None = f"Bearer {TOKEN}") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": authorization} if authorization else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_prometheus_reads_step_reward_evaluation_and_memory(metrics: JobMetrics, address: str) -> None:
    gpu = MemorySample(device_total_bytes=80 * GIB, device_free_bytes=10 * GIB)
    host = MemorySample(host_limit_bytes=32 * GIB, host_used_bytes=20 * GIB)
    metrics.attempt_began(PLAN, [step_record(6)], print)
    metrics.step_committed(
        step_record(7, 0.25, metrics={"loss": 0.5, "rewards/format": 1.0}),
        {"policy-0": {"update": gpu}, "policy-1": {"update": host}, "rollout-0": {"rollout": gpu}},
    )
    metrics.evaluated(evaluation(7))
    metrics.failed(
        Evidence(
            time=datetime(2026, 1, 2, tzinfo=UTC), attempt=1, role="policy", rank=0, step=8, message="out of memory"
        )
    )
    metrics.plan_changed(plan_change(2), PLAN)
    code, text = get(f"{address}/metrics")
    assert code == 200
    found = {
        (
            sample.name.removeprefix("rljob_job_"),
            *sorted(value for key, value in sample.labels.items() if key != "rljob"),
        ): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert {sample.labels["rljob"] for sample in found.values()} == {"sums"}
    values = {key: sample.value for key, sample in found.items()}
    assert values[("step",)] == 7
    assert values[("steps",)] == 40
    assert values["value", "reward/mean"] == 0.25
    assert values["value", "tokens_per_second"] == 1000
    assert values["value", "seconds/rollout"] == 0.6
    assert values["value", "rewards/format"] == 1.0
    assert values["value", "evaluation/avg@8"] == 0.75
    assert ("value", "memory/policy") not in values
    assert values["memory_peak_bytes", "rollout"] == 2 * GIB
    assert values["memory_headroom_bytes", "gpu", "policy"] == 10 * GIB
    assert values["memory_headroom_bytes", "host", "policy"] == 12 * GIB
    assert values["out_of_memory_total", "Unknown"] == 1
    assert values["adjustments_total", "microBatchTokens"] == 1


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer other", f"Basic {TOKEN}", "Bearer \xff"])
def test_nobody_reads_without_the_token(address: str, authorization: str | None) -> None:
    code, text = get(f"{address}/metrics", authorization)
    assert code == 401
    assert "rljob_job" not in text


def test_the_metrics_are_at_their_path_only(address: str) -> None:
    assert get(f"{address}/metrics", f"bearer {TOKEN}")[0] == 200
    assert get(f"{address}/")[0] == 404
