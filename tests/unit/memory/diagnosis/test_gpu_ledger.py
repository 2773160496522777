"""The ledger accounts for the GPU before a class is named: who holds what, and what is more than expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose, explain, gpu_entries, host_entries, ledger_of
from rljob_memory.diagnosis.expected_memory import expected_memory
from rljob_memory.diagnosis.ledger_entries import LedgerEntry
from rljob_memory.evidence import CollectedEvidence, Failure, FailureKind
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import EngineRecord
from rljob_memory.evidence.failure import DeviceMemory, GpuProcess
from rljob_memory.evidence.model_facts import ModelFacts
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB
from tests.unit.memory.diagnosis.recorded import evidence_of

BESIDE = DeviceMemory(
    2 * GIB,
    gpu=0,
    total_bytes=80 * GIB,
    free_bytes=GIB,
    allocated_bytes=36 * GIB,
    cached_bytes=GIB,
    process_bytes=38 * GIB,
)
"""41 GiB of the GPU belong to other processes."""
ALONE = replace(BESIDE, allocated_bytes=77 * GIB, process_bytes=79 * GIB)


def failing(
    device: DeviceMemory = BESIDE, activity: Activity = Activity.BACKWARD, *, role: str | None = None, **of: Any
) -> CollectedEvidence:
    return CollectedEvidence(Failure(FailureKind.ALLOCATOR, device=device, activity=activity, role=role), **of)


def beside(*siblings: str, role: str | None = "policy") -> CollectedEvidence:
    return failing(role=role, siblings=siblings)


def entries_of(evidence: CollectedEvidence) -> list[LedgerEntry]:
    assert evidence.failure is not None
    return gpu_entries(ledger_of(evidence.failure, evidence))


# --- who holds the memory ---


LISTED = replace(BESIDE, others=(GpuProcess(7, 40 * GIB),))


@pytest.mark.parametrize(
    ("evidence", "owner", "size_gib"),
    [
        (beside("python", "VLLM::EngineCor"), "engines of the same job (VLLM::EngineCor), and the driver", 41),
        (beside("python"), "other processes of the same job (python), and the driver", 41),
        (beside(), "other processes, and the driver", 41),
        (
            failing(replace(BESIDE, process_bytes=None), role="policy"),
            "unexplained: other processes, or this one beside torch",
            42,
        ),
        (failing(LISTED), "process 7", 40),
        (failing(LISTED), "the driver", 1),
    ],
)
def test_every_part_of_the_gpu_has_the_owner_that_is_known(
    evidence: CollectedEvidence, owner: str, size_gib: int
) -> None:
    entries = entries_of(evidence)
    assert {entry.owner: entry.size_bytes for entry in entries}[owner] == size_gib * GIB
    assert sum(entry.size_bytes for entry in entries if not (entry.is_part or entry.is_expected)) == 80 * GIB


def test_memory_of_a_sleeping_engine_is_back_with_the_gpu() -> None:
    asleep = replace(BESIDE, allocated_bytes=84 * GIB, cached_bytes=30 * GIB, process_bytes=77 * GIB)
    sizes = {entry.owner: entry.size_bytes for entry in entries_of(failing(asleep))}
    assert sizes["an engine that sleeps, whose memory is back with the GPU"] == 37 * GIB


def test_an_engine_that_starts_finds_the_gpu_in_use() -> None:
    sizes = {"free_bytes": 30 * GIB, "total_bytes": 80 * GIB, "wanted_bytes": 72 * GIB}
    refused = CollectedEvidence(Failure(FailureKind.ENGINE_START, sizes=sizes))
    assert [(entry.owner, entry.size_bytes) for entry in entries_of(refused)] == [
        ("in use before the engine started", 50 * GIB),
        ("free", 30 * GIB),
    ]
    assert host_entries(refused) == []


def test_the_host_has_a_ledger() -> None:
    host = MemorySample(host_used_bytes=31 * GIB, host_limit_bytes=32 * GIB, shared_memory_bytes=GIB)
    engine = EngineRecord(seen=True, backed_up_bytes=14 * GIB)
    entries = host_entries(CollectedEvidence(Failure(FailureKind.KILLED), host=host, engine=engine))
    assert {entry.owner: entry.size_bytes for entry in entries} == {
        "limit": 32 * GIB,
        "in use": 31 * GIB,
        "weights of an engine that sleeps, pinned": 14 * GIB,
        "size of /dev/shm": GIB,
    }


def test_an_explanation_has_the_rules_before_and_after_weighing() -> None:
    explanation = explain(beside("VLLM::EngineCor"))
    assert explanation is not None
    rules = {rule.failure_class: (rule.name, rule.confidence, rule.weighed_confidence) for rule in explanation.rules}
    name, before, after = rules[FailureClass.ACTIVATION_SPIKE]
    assert (name, before) == ("activation_spike", 0.65)
    assert after < before
    assert explain(CollectedEvidence()) is None


# --- the engine's parts ---


def test_the_engines_log_has_its_parts() -> None:
    evidence = evidence_of(
        "INFO gpu_model_runner.py:5348] Model loading took 14.25 GiB memory and 3.100000 seconds\n"
        "INFO gpu_worker.py:300] Available KV cache memory: 22.50 GiB\n"
        "INFO gpu_model_runner.py:6845] Graph capturing finished in 20 secs, took 0.75 GiB"
    )
    engine = evidence.engine
    assert (engine.weights_bytes, engine.kv_cache_bytes, engine.graphs_bytes) == (14.25 * GIB, 22.5 * GIB, 0.75 * GIB)
    failure = Failure(FailureKind.ALLOCATOR, device=BESIDE, activity=Activity.BACKWARD)
    ledger = ledger_of(failure, replace(evidence, failure=failure))
    assert ledger.engine_bytes == 37.5 * GIB
    assert [item.failure_class for item in ledger.unexpected] == [FailureClass.ENGINE_NOT_ASLEEP]


def test_the_share_of_an_engine_decides_its_confidence() -> None:
    """In the failing process, whose tensors it is a part of."""
    asleep, spike = [], []
    for kv_cache in (24, 40, 60):
        engine = EngineRecord(seen=True, in_process=True, kv_cache_bytes=kv_cache * GIB)
        found = diagnose(failing(ALONE, Activity.LOGITS, engine=engine))
        by_class = {each.failure_class: each.confidence for each in found}
        asleep.append(by_class[FailureClass.ENGINE_NOT_ASLEEP])
        spike.append(by_class[FailureClass.ACTIVATION_SPIKE])
    assert asleep == sorted(asleep)
    assert spike == sorted(spike, reverse=True)
    assert asleep[0] > spike[0]


# --- the model's state ---

PARAMETERS = 6_600_000_000
"""Weights and gradients in 16 bits and Adam's state take 73.8 GiB."""


def test_the_name_of_a_model_is_a_guess() -> None:
    evidence = failing(ALONE, model=ModelFacts(parameters_of_name=PARAMETERS))
    expected = [entry for entry in entries_of(evidence) if entry.is_expected]
    assert [entry.owner for entry in expected] == ["weights", "gradients", "Adam's state"]
    assert all("by the model's name" in entry.source for entry in expected)


def test_trained_parameters_are_all_unless_a_name_has_many_more() -> None:
    for name in (None, 7_000_000_000):
        expected = expected_memory(ModelFacts(trained_parameters=PARAMETERS, parameters_of_name=name))
        assert expected is not None
        assert (expected.parameters, expected.is_guess) == (PARAMETERS, False)
    adapters = expected_memory(ModelFacts(trained_parameters=20_000_000, parameters_of_name=7_000_000_000))
    assert adapters is not None
    assert (adapters.parameters, adapters.optimizer_bytes, adapters.is_guess) == (7_000_000_000, 160_000_000, True)
