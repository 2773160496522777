"""Parsers of what others write. A target raises for an input that its parser does not take as documented."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from rljob_api.manifest import ManifestError, load_manifest
from rljob_api.termination_message import read_termination_message
from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.reports import read_report
from rljob_memory.evidence.run_files import read_ledger, read_memory_log, read_oom_snapshot
from rljob_operator.apply.status_patch import status_object
from rljob_operator.diagnose.container_end import container_ends
from rljob_operator.diagnose.explanation import explanation_of
from rljob_operator.kube.decoding import decode
from rljob_operator.observe.job_facts import job_fact, parse_job
from rljob_operator.observe.pod_facts import pod_fact
from rljob_operator.observe.step_report_facts import step_report_fact
from rljob_operator.reconcile.observed import Observed
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.status_bounds import MAX_STATUS_BYTES
from rljob_testing.fuzz import seeds
from rljob_testing.simulated_cluster import POLICY_0, SETTINGS, START, SimulatedCluster
from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.ledger import ledger
from rljob_trainer.ledger.checkpoint_manifest import MANIFEST_NAME, find_damage

_INTEGERS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Target:
    """A parser, and valid inputs of it, which a fuzzer damages."""

    check: Callable[[bytes], None]
    """Raises if the parser raises an undocumented error, or returns something impossible."""
    seeds: tuple[bytes, ...]


def manifest(data: bytes) -> None:
    """`rljob run` and `rljob validate`."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        with suppress(ManifestError):
            load_manifest(Path(file.name))


def stored_job(data: bytes) -> None:
    """The operator: an RLJob that the API server stores."""
    found = _decoded(data)
    if found is None:
        return
    fact = job_fact(found | {"metadata": seeds.JOB_METADATA})
    parsed = parse_job(fact.text)
    assert (parsed.job is None) == (parsed.problem is not None)
    fact.status()
    observed = Observed(
        job=parsed.job,
        problem=parsed.problem,
        stored_status=parsed.status,
        namespace="team",
        name="demo",
        uid="job-uid",
        generation=1,
        created_at=START,
        deleting=False,
        has_finalizer=True,
        pods=(),
        step_report=None,
        nodes=(),
    )
    _require_writable(observed)


def step_report(data: bytes) -> None:
    """The operator: the status of a StepReport, which the pods of a job write."""
    found = _decoded(data)
    if found is None:
        return
    owner = {"uid": "job-uid"}
    fact = step_report_fact({"metadata": {"ownerReferences": [owner]}, "status": found})
    cluster = _running_job()
    cluster.report, problem = fact.content("job-uid")
    cluster.facts = {"step_report_problem": problem}
    for seconds in (1, 4000):
        cluster.tick(seconds)
        _require_writable(cluster.observe())
        cluster.round()
    cluster.end(POLICY_0, 80)
    for seconds in (30, 400):
        cluster.tick(seconds)
        _require_writable(cluster.observe())
        cluster.round()
        cluster.finish_deletions()


def termination_message(data: bytes) -> None:
    """The operator: a container's last message, which any program in it writes."""
    text = data.decode("utf-8", "replace")
    message = read_termination_message(text)
    assert message is None or 0 <= message.exit_code <= 255
    stored = seeds.failed_pod(text)
    for end in container_ends(stored):
        explanation = explanation_of(end)
        assert explanation is None or explanation.message.isprintable()
    fact = pod_fact(stored)
    assert fact.pod is not None
    cluster = _running_job()
    cluster.change_pod(POLICY_0, phase="Failed", end=fact.pod.end, started=True)
    cluster.tick(30)
    _require_writable(cluster.observe())
    cluster.round()


def logs(data: bytes) -> None:
    """`rljob diagnose`, and the operator for the messages of other trainers."""
    builder = EvidenceBuilder()
    LogReader(builder, "log").read(BytesIO(data))
    read_memory_log(builder, BytesIO(data), "policy-0")
    read_ledger(builder, BytesIO(data))
    text = data.decode("utf-8", "replace")
    read_oom_snapshot(builder, text, "snapshot")
    read_report(builder, text, "document")
    for found in diagnose(builder.build()):
        assert 0 <= found.confidence <= 1
        assert all(isinstance(number, int) for number in found.numbers.values())


def checkpoint_manifest(data: bytes) -> None:
    """`rljob run`: the manifest of a checkpoint on a volume that others can write to."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / MANIFEST_NAME).write_bytes(data)
        problem = find_damage(Path(directory), step=20)
        assert problem is None or len(problem) < 10_000


def run_ledger(data: bytes) -> None:
    """`rljob run`: the ledger on that volume."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        path.write_bytes(data)
        with suppress(OutputUnavailable):
            contents = ledger.read_ledger(path)
            assert 0 <= contents.whole_bytes <= len(data)


@cache
def _once_running() -> SimulatedCluster:
    return SimulatedCluster().run()


def _running_job() -> SimulatedCluster:
    """A running job of its own."""
    running = _once_running()
    return replace(running, pods=dict(running.pods), facts={}, events=[])


def _decoded(data: bytes) -> dict[str, Any] | None:
    """As the API server sends it; None for what it cannot store."""
    try:
        found = asyncio.run(decode(data))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _require_writable(observed: Observed) -> None:
    """The decision is made, and its status is one that the API server takes."""
    desired = reconcile(observed, SETTINGS, START)
    if desired.status is None:
        return
    text = json.dumps(status_object(desired.status), allow_nan=False)
    assert len(text.encode()) <= 6 * MAX_STATUS_BYTES  # escaped; as UTF-8 it is within the bound
    json.loads(text, parse_int=_require_int64)


def _require_int64(digits: str) -> None:
    assert int(digits) in _INTEGERS, f"{digits} has more than 64 bits"


TARGETS = {
    "manifest": Target(manifest, seeds.MANIFESTS),
    "stored job": Target(stored_job, seeds.STORED_JOBS),
    "step report": Target(step_report, seeds.STEP_REPORTS),
    "termination message": Target(termination_message, seeds.TERMINATION_MESSAGES),
    "logs": Target(logs, seeds.LOGS),
    "checkpoint manifest": Target(checkpoint_manifest, seeds.CHECKPOINT_MANIFESTS),
    "ledger": Target(run_ledger, seeds.LEDGERS),
}
