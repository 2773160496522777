"""The allocator's environment of each role, and what a template says about it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_operator.event_note import EventNote
from rljob_operator.objects.job_objects import JobObjects
from tests.unit.operator.objects.builders import (
    Object,
    environment_of,
    job,
    objects,
    of_kind,
    pod_of,
    references_of,
    settings,
)

CUDA, GENERIC = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
CLASSIC = "expandable_segments:False"
OWN = "max_split_size_mb:128"


def template(*entries: Object) -> Object:
    return {"spec": {"containers": [{"env": list(entries)}]}}


def built(*policy_entries: Object, torch: str = "2.13.0", **spec: Any) -> JobObjects:
    return objects(job(policy={"template": template(*policy_entries)}, **spec), settings(trainer_torch_version=torch))


def role_environment(of: JobObjects, role: str) -> Any:
    return json.loads(of_kind("ConfigMap", of)["data"]["attempt.json"])[f"{role}Environment"]


def notes(of: JobObjects) -> list[tuple[str, str]]:
    return [(note.type, note.reason) for note in of.notices]


def the_note(of: JobObjects, reason: str) -> EventNote:
    (found,) = (note for note in of.notices if note.reason == reason)
    return found


def test_each_role_has_its_environment_and_nothing_is_told() -> None:
    of = built()
    assert role_environment(of, "policy") == role_environment(of, "rollout") == {CUDA: CLASSIC}
    assert environment_of(pod_of(of, "policy"))[CUDA] == CLASSIC
    assert CUDA not in environment_of(pod_of(of, "controller"))
    assert of.notices == ()


def test_a_users_value_is_the_policys_and_not_the_rollouts() -> None:
    of = built({"name": CUDA, "value": OWN})
    assert environment_of(pod_of(of, "policy"))[CUDA] == OWN
    assert role_environment(of, "policy") == {CUDA: OWN}
    assert role_environment(of, "rollout") == {CUDA: CLASSIC}
    assert notes(of) == [("Normal", "AllocatorSettingKept")]
    assert OWN in the_note(of, "AllocatorSettingKept").message


def test_a_value_by_reference_reaches_the_policy() -> None:
    source = {"configMapKeyRef": {"name": "mine", "key": "allocator"}}
    of = built({"name": CUDA, "valueFrom": source})
    assert references_of(pod_of(of, "policy"))[CUDA] == source
    assert CUDA not in environment_of(pod_of(of, "policy"))
    assert role_environment(of, "policy") == {}
    assert notes(of) == [("Normal", "AllocatorSettingKept")]


def test_a_user_can_leave_the_allocator_to_torch() -> None:
    of = built({"name": CUDA, "$patch": "delete"})
    assert CUDA not in environment_of(pod_of(of, "policy"))
    assert role_environment(of, "policy") == {}


def test_the_other_name_is_folded_into_the_one_that_counts() -> None:
    of = built({"name": GENERIC, "value": OWN}, {"name": "MINE", "value": "1"})
    environment = environment_of(pod_of(of, "policy"))
    assert (environment[CUDA], environment["MINE"]) == (OWN, "1")
    assert GENERIC not in environment
    assert role_environment(of, "policy") == {CUDA: OWN}
    assert ("Normal", "AllocatorSettingFolded") in notes(of)


def test_of_both_names_the_one_that_counts_is_kept() -> None:
    of = built({"name": GENERIC, "value": "max_split_size_mb:64"}, {"name": CUDA, "value": OWN})
    assert environment_of(pod_of(of, "policy"))[CUDA] == OWN
    assert GENERIC not in environment_of(pod_of(of, "policy"))
    assert "removed" in the_note(of, "AllocatorSettingFolded").message


def test_folding_leaves_the_rest_of_the_environment_as_it_was_written() -> None:
    entries = [{"name": GENERIC, "value": OWN}, {"name": "HOME", "$patch": "delete"}, {"name": "MINE", "value": "1"}]
    environment = environment_of(pod_of(built(*entries), "policy"))
    assert (environment[CUDA], environment["MINE"]) == (OWN, "1")
    assert "HOME" not in environment


def test_removing_the_other_name_removes_nothing() -> None:
    of = built({"name": GENERIC, "$patch": "delete"})
    assert environment_of(pod_of(of, "policy"))[CUDA] == CLASSIC
    assert of.notices == ()


@pytest.mark.parametrize(
    ("value", "torch", "said"),
    [
        ("expandable_segments:true", "2.13.0", "expected True or False, spelt so, found 'true'"),
        ("expandable_segment:True", "2.13.0", "'expandable_segment' is not an option"),
        ("per_process_memory_fraction:0.9", "2.9.1", "known since torch 2.10, and the image has torch 2.9"),
    ],
)
def test_a_wrong_value_is_respected_and_told(value: str, torch: str, said: str) -> None:
    of = built({"name": CUDA, "value": value}, torch=torch)
    assert environment_of(pod_of(of, "policy"))[CUDA] == value
    note = the_note(of, "AllocatorSettingDoubtful")
    assert note.type == "Warning"
    assert said in note.message


def test_a_value_that_contradicts_the_memory_settings_is_told() -> None:
    of = built({"name": CUDA, "value": "expandable_segments:True"}, memory={"expandableSegments": "Disabled"})
    assert "contradicts spec.memory.expandableSegments: Disabled" in the_note(of, "AllocatorSettingDoubtful").message


def test_expandable_segments_for_rollouts_are_told() -> None:
    rollout = {"template": template({"name": CUDA, "value": "expandable_segments:True"})}
    of = objects(job(topology="Disaggregated", rollout=rollout))
    assert role_environment(of, "rollout") == {CUDA: "expandable_segments:True"}
    assert role_environment(of, "policy") == {CUDA: CLASSIC}
    assert "vLLM's custom all-reduce" in the_note(of, "AllocatorSettingDoubtful").message


def test_a_message_never_outgrows_an_event() -> None:
    of = built({"name": CUDA, "value": "x" * 5000})
    assert all(len(note.message) <= 1024 for note in of.notices)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("Auto", None), ("Enabled", "expandable_segments:True"), ("Disabled", "expandable_segments:False")],
)
def test_another_trainer_gets_what_is_pinned(setting: str, expected: str | None) -> None:
    of = objects(job(trainer={"image": "verl:1"}, memory={"expandableSegments": setting}))
    assert environment_of(pod_of(of, "policy")).get(CUDA) == expected
    assert "policy-environment.json" not in of_kind("ConfigMap", of)["data"]


@pytest.mark.parametrize(("version", "is_reported"), [("2.1", True), (None, False)])
def test_another_trainers_torch_is_what_its_image_declares(version: str | None, is_reported: bool) -> None:
    entry = {"name": CUDA, "value": "per_process_memory_fraction:0.9"}
    of = objects(job(trainer={"image": "verl:1", "torchVersion": version}, policy={"template": template(entry)}))
    assert (("Warning", "AllocatorSettingDoubtful") in notes(of)) is is_reported
