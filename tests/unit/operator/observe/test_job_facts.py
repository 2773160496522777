"""Reading of stored RLJobs, including those that cannot be read."""

from __future__ import annotations

import pytest
from pydantic_core import ErrorDetails

from rljob_api.problem_text import ProblemText
from rljob_operator.kube.decoding import NESTED_TOO_DEEPLY
from rljob_operator.observe.job_facts import job_fact, parse_job
from rljob_operator.observe.node_facts import node_fact
from tests.unit.operator.observe.objects import job, node


def test_the_job_comes_back_as_it_was_stored_without_managed_fields() -> None:
    fact = job_fact(job(finalizers=["rljob.dev/pods-end-first"], status={"step": 3}))
    parsed = parse_job(fact.text).job
    assert parsed is not None
    assert parsed.spec.algorithm.steps == 60
    assert parsed.status is not None
    assert parsed.status.step == 3
    assert parsed.metadata.managed_fields == []
    assert fact.has_finalizer
    assert fact.status() == {"step": 3}
    assert (fact.resource_version, fact.generation, fact.deleting) == ("10", 2, False)


def test_a_job_that_cannot_be_read_says_where_and_what_to_write() -> None:
    spec = {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": "many"}}
    parsed = parse_job(job_fact(job(spec=spec, status={"step": 3})).text)
    assert parsed.job is None
    assert parsed.problem is not None
    assert parsed.problem.startswith("spec.algorithm.steps: expected a whole number")
    assert parsed.status is not None
    assert parsed.status.step == 3


def test_a_status_that_cannot_be_read_counts_as_absent() -> None:
    parsed = parse_job(job_fact(job(status={"step": "some"})).text)
    assert parsed.job is not None
    assert parsed.job.status is None
    assert parsed.problem is None


def test_a_job_that_has_its_nodes_or_needs_none() -> None:
    scheduled = {"conditions": [{"type": "Scheduled", "status": "True"}]}
    assert not job_fact(job()).placed
    assert job_fact(job(status=scheduled)).placed
    assert job_fact(job(status={"display": {"phase": "Complete"}})).placed
    assert not job_fact(job(status={"display": {"phase": "Recovering"}})).placed


def test_a_job_nested_too_deeply_has_a_problem_and_keeps_its_status() -> None:
    placeholder = {NESTED_TOO_DEEPLY: True}
    parsed = parse_job(job_fact(job(status={"step": 3}, spec={"policy": {"template": placeholder}})).text)
    assert parsed.job is None
    assert "levels of nesting" in (parsed.problem or "")
    assert parsed.status
    assert parsed.status.step == 3


def test_metadata_of_later_versions_of_kubernetes_is_left_out() -> None:
    assert parse_job(job_fact(job(laterField={"a": 1})).text).job is not None


@pytest.mark.parametrize("quantity", ["1000", "1k", "1e3"])
def test_gpus_are_counted_in_every_form_of_a_quantity(quantity: str) -> None:
    stored = node(status={"allocatable": {"example.com/gpu": quantity}})
    assert node_fact(stored, ("example.com/gpu",)).node.gpus == 1000


def test_only_the_first_errors_of_a_job_are_put_into_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_into_words(_: ProblemText, error: ErrorDetails) -> str:
        worded.append(error)
        return "wrong"

    worded: list[ErrorDetails] = []
    monkeypatch.setattr(ProblemText, "of", put_into_words)
    stored = job(spec={"task": {"name": "digits", "args": {f"a{number}": 1 for number in range(1_000)}}})
    problem = parse_job(job_fact(stored).text).problem
    assert problem is not None
    assert len(worded) == problem.count("wrong") == 20


@pytest.mark.parametrize(
    ("spec", "delegated"),
    [
        ({}, False),
        ({"managedBy": "rljob.dev/operator"}, False),
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, True),
        ({"managedBy": "kueue.x-k8s.io/multikueue", "algorithm": "cannot be parsed"}, True),
        ({"managedBy": ["a"]}, False),
        (None, False),
    ],
)
def test_a_job_of_another_manager_waits_for_no_node_and_holds_none(spec: object, delegated: bool) -> None:
    fact = job_fact(job() | {"spec": spec})
    assert (fact.delegated, fact.placed) == (delegated, delegated)
    running = job_fact(job(status={"display": {"phase": "Running"}}) | {"spec": spec})
    assert running.runs == (not delegated)
